# The block manager: no torch, no CUDA. Build from the repository's root.
FROM python:3.11-slim
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# Dependencies alone, so that this layer is kept until pyproject.toml changes.
COPY pyproject.toml deploy/docker/requirements.py ./
RUN python requirements.py service > requirements.txt && pip install -r requirements.txt
COPY README.md ./
COPY clients/python/pagedkv clients/python/pagedkv
COPY block_manager_svc block_manager_svc
COPY gpu_executor/__init__.py gpu_executor/__init__.py
RUN pip install --no-deps .
COPY deploy/docker/healthcheck.py /opt/pagedkv/
WORKDIR /
USER 10001:10001
EXPOSE 50061
# Healthy while the process takes executors; whether one is attached is the overall status, "".
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s \
    CMD ["python", "/opt/pagedkv/healthcheck.py", "127.0.0.1:50061", "pagedkv.v1.ExecutorLinkService"]
ENTRYPOINT ["block-manager"]
CMD ["--listen", "0.0.0.0:50061", "--log-format", "json"]

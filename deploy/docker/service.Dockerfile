# The block manager: no torch, no CUDA. Build from the repository's root.
FROM python:3.11-slim AS build
WORKDIR /build
RUN python -m venv /opt/pagedkv
# Dependencies alone, so that this layer is kept until pyproject.toml changes.
COPY pyproject.toml deploy/docker/requirements.py ./
RUN python requirements.py service > requirements.txt \
    && /opt/pagedkv/bin/pip install --no-cache-dir --disable-pip-version-check -r requirements.txt
COPY README.md ./
COPY clients/python/pagedkv clients/python/pagedkv
COPY block_manager_svc block_manager_svc
COPY gpu_executor/__init__.py gpu_executor/__init__.py
RUN /opt/pagedkv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps .

FROM python:3.11-slim
COPY --from=build /opt/pagedkv /opt/pagedkv
COPY deploy/docker/healthcheck.py /opt/pagedkv/healthcheck.py
ENV PATH=/opt/pagedkv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 50061
# Healthy while the process takes executors; whether one is attached is the overall status, "".
HEALTHCHECK --interval=5s --timeout=5s --start-period=20s \
    CMD ["python", "/opt/pagedkv/healthcheck.py", "127.0.0.1:50061", "pagedkv.v1.ExecutorLinkService"]
ENTRYPOINT ["block-manager"]
CMD ["--listen", "0.0.0.0:50061", "--log-format", "json"]

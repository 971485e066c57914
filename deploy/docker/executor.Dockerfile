# The executor, with PyTorch. Build from the repository's root.
#
# PyPI's torch for Linux is the CUDA build: it runs on CPUs too, and is large. For an image without CUDA name the
# index of PyTorch's CPU builds: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# Dependencies alone, so that this layer is kept until pyproject.toml changes.
COPY pyproject.toml deploy/docker/requirements.py ./
RUN python requirements.py executor > requirements.txt && pip install -r requirements.txt
COPY README.md ./
COPY clients/python/pagedkv clients/python/pagedkv
COPY block_manager_svc/__init__.py block_manager_svc/__init__.py
COPY gpu_executor gpu_executor
# New volumes take the owner of the folder that they cover.
RUN pip install --no-deps . && install -d -o 10001 -g 10001 /models /cache
ENV HF_HUB_OFFLINE=1 HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor PAGEDKV_EXECUTOR_MODEL_CACHE=/cache/models
COPY deploy/docker/healthcheck.py /opt/pagedkv/
WORKDIR /
USER 10001:10001
VOLUME ["/models", "/cache"]
EXPOSE 50062
# Healthy when attached to a service; a model that is converted first takes its time.
HEALTHCHECK --interval=5s --timeout=10s --start-period=180s \
    CMD ["python", "/opt/pagedkv/healthcheck.py", "127.0.0.1:50062", ""]
ENTRYPOINT ["gpu-executor"]

# One image for GPU and CPU: the web page is built in its own stage, Python sees only the result.
#   docker build -t chatcache .                                  CUDA build of torch (the default on PyPI for Linux)
#   docker build -t chatcache:cpu --build-arg TORCH_INDEX=URL .  another index, e.g. PyTorch's CPU wheels: gigabytes smaller
FROM node:22-slim AS web
WORKDIR /src/web
COPY web/package.json web/package-lock.json ./
RUN npm ci --no-audit --no-fund
COPY web/ ./
RUN npm run build

FROM python:3.12-slim AS app
ARG TORCH_INDEX=""
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Triton compiles its launcher with the system's C compiler the first time a kernel runs.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /app
RUN if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" "torch>=2.11,<2.14"; fi
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY chatcache ./chatcache
COPY kernels/chatcache_kernels ./kernels/chatcache_kernels
COPY --from=web /src/chatcache/gateway/static ./chatcache/gateway/static
RUN pip install . && useradd --create-home --uid 10001 chatcache \
    && mkdir -p /data /cache && chown chatcache /data /cache
USER chatcache
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton NUMBA_CACHE_DIR=/cache/numba \
    CHATCACHE_DB=/data/chatcache.db CHATCACHE_HOST=0.0.0.0
VOLUME ["/data", "/cache"]
EXPOSE 8000
ENTRYPOINT ["python", "-m", "chatcache"]
CMD ["serve"]

# One image for GPU and CPU: the web page is built in its own stage, Python sees only the result.
#   docker build -t chatcache .                                  CUDA build of torch (the default on PyPI for Linux)
#   docker build -t chatcache:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .  no CUDA, 6 GB smaller
# constraints.txt has the version of every package but Triton and torch's CUDA packages: torch's CUDA build requires exact
# versions of those, and its CPU build none, so that the extra `gpu` is not needed in either image.
# Layers that change rarely come first: an edit of the source rebuilds the last layers only and reinstalls no dependency.
ARG NODE_IMAGE=node:22.20.0-bookworm-slim
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

FROM ${NODE_IMAGE} AS web
WORKDIR /src/web
COPY web/package.json web/package-lock.json ./
RUN npm ci --no-audit --no-fund
COPY web/ ./
RUN npm run build

FROM ${PYTHON_IMAGE} AS app
ARG TORCH_INDEX=""
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Triton compiles its launcher with the system's C compiler the first time a kernel runs.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 chatcache && useradd --uid 10001 --gid 10001 --create-home chatcache \
    && mkdir -p /data /cache /secret && chown chatcache:chatcache /data /cache /secret && chmod 0750 /secret
WORKDIR /app
COPY pyproject.toml constraints.txt ./
RUN if [ -n "$TORCH_INDEX" ]; then \
    pip install --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"; fi
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > /tmp/requirements.txt && pip install -r /tmp/requirements.txt -c constraints.txt && rm /tmp/requirements.txt
COPY hatch_build.py README.md LICENSE ./
COPY kernels/chatcache_kernels ./kernels/chatcache_kernels
COPY chatcache ./chatcache
COPY --from=web /src/chatcache/gateway/static ./chatcache/gateway/static
RUN pip install --no-deps .
# A settings file, not CHATCACHE_DB: CHATCACHE_REDIS overrides the file, but is refused together with CHATCACHE_DB.
RUN echo 'db = "/data/chatcache.db"' > chatcache.toml
USER chatcache
# Files are written to /data (conversations), /cache (models, compiled kernels), /secret and /tmp only.
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton NUMBA_CACHE_DIR=/cache/numba CUDA_CACHE_PATH=/cache/nv \
    XDG_CACHE_HOME=/cache CHATCACHE_HOST=0.0.0.0
VOLUME ["/data", "/cache"]
EXPOSE 8000
ENTRYPOINT ["python", "-m", "chatcache"]
CMD ["serve"]

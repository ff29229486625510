# docker build --target cpu -t radixserve .        docker run -p 8000:8000 radixserve
# docker build --target cuda -t radixserve:cuda .  docker run --gpus all -p 8000:8000 radixserve:cuda Qwen/Qwen3-0.6B
# (The cuda image has not been built yet: docs/deployment.md.)
#
# The cpu image is much smaller with a CPU build of torch: name a package index that has one,
# --build-arg PIP_EXTRA_INDEX_URL=...

FROM python:3.11-slim AS cpu-base

# FlashInfer and Triton compile kernels when they first run: nvcc, a C compiler and Python's headers stay in the image.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda-base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM cpu-base AS cpu-build
ARG PIP_EXTRA_INDEX_URL=""
RUN apt-get update && apt-get install --yes --no-install-recommends g++
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv
WORKDIR /src
COPY requirements.lock .
RUN pip install --constraint requirements.lock "$(grep '^torch==' requirements.lock)" \
    && pip install --no-deps --requirement requirements.lock
COPY . .
RUN pip install --no-deps --no-build-isolation . && cd / && python -m radixserve.kernels.native_library

FROM cuda-base AS cuda-build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv
WORKDIR /src
COPY requirements.lock .
RUN pip install --constraint requirements.lock "$(grep '^torch==' requirements.lock)" \
    && pip install --no-deps --requirement requirements.lock
COPY . .
RUN pip install --no-build-isolation --constraint requirements.lock '.[cuda]'

FROM cpu-base AS cpu
COPY --from=cpu-build /opt/venv /opt/venv
# The OpenMP library that the CPU kernels were linked with.
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 radixserve && mkdir /models && chown radixserve /models
USER radixserve
WORKDIR /home/radixserve
# Models from Hugging Face are kept here; mount a volume to keep them over containers.
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:%s/health' % (os.environ.get('RADIXSERVE_PORT') or 8000), timeout=4)"]
ENTRYPOINT ["radixserve", "serve", "--host", "0.0.0.0"]

FROM cuda-base AS cuda
COPY --from=cuda-build /opt/venv /opt/venv
RUN useradd --create-home --uid 10001 radixserve && mkdir /models && chown radixserve /models
USER radixserve
WORKDIR /home/radixserve
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:%s/health' % (os.environ.get('RADIXSERVE_PORT') or 8000), timeout=4)"]
ENTRYPOINT ["radixserve", "serve", "--host", "0.0.0.0"]

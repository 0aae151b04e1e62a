# A server of one trained network, `gaudi-apps serve`, with TensorFlow for CPUs. From the root of the clone:
#   docker build -f containers/serve.Dockerfile -t gaudi-vision:serve .
#   docker run --read-only --tmpfs /tmp --publish 127.0.0.1:8080:8080 --volume "$PWD/runs/cells:/model:ro" gaudi-vision:serve
# It asks nobody who calls: put it behind something that does before others reach it.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
ENV PATH=/opt/gaudi/bin:${PATH}
# What changes seldom comes first.
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/gaudi \
    && pip install --constraint constraints.txt pip \
    && pip install --constraint constraints.txt tensorflow-cpu
COPY packages packages
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt --build-constraint constraints.txt \
    ./packages/ops ./packages/datasets ./packages/models ./packages/distributed "./packages/apps[serve,export,tensorflow-cpu]" \
    && pip check

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="gaudi-vision, server" org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libjemalloc2 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home --shell /usr/sbin/nologin gaudi
COPY --from=build /opt/gaudi /opt/gaudi
# Of many threads, glibc's own allocator keeps more memory than it uses.
ENV PATH=/opt/gaudi/bin:${PATH} \
    LD_PRELOAD=libjemalloc.so.2
USER 1000:1000
EXPOSE 8080
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/healthz', timeout=5)"]
ENTRYPOINT ["gaudi-apps", "serve", "--host", "0.0.0.0", "--port", "8080"]
CMD ["--model_dir", "/model"]

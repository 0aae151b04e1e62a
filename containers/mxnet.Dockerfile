# The MXNet lane: MXNet 1.9.1 for CPUs, Horovod over Open MPI and Gloo, and ssd_mxnet_train. From the root of the clone:
#   docker build -f containers/mxnet.Dockerfile -t gaudi-vision:mxnet .
# No HEALTHCHECK: the container ends with its program; a worker's sshd is probed by Kubernetes.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 libopenmpi-dev make openmpi-bin python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
ENV PATH=/opt/gaudi/bin:${PATH}
# What changes seldom comes first: MXNet, then Horovod, which is compiled against it, then the programs.
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/gaudi \
    && pip install --constraint constraints.txt pip \
    && pip install --constraint constraints.txt mxnet
COPY packages/distributed packages/distributed
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=cache,id=gaudi-horovod,target=/root/.cache/gaudi/horovod \
    pip install --constraint constraints.txt --build-constraint constraints.txt "./packages/distributed[horovod]" \
    && gaudi-run install-horovod --with_mxnet --constraint constraints.txt
COPY packages packages
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt --build-constraint constraints.txt \
    ./packages/ops "./packages/datasets[plots,scenes]" ./packages/models "./packages/apps[mlperf,mxnet]" \
    && pip uninstall --yes cmake \
    && pip check

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="gaudi-vision, MXNet lane" org.opencontainers.image.licenses="Apache-2.0"
# sshd's package makes host keys; nobody else's image may have the same.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 libjemalloc2 libquadmath0 openmpi-bin openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --uid 1000 --create-home --shell /bin/bash gaudi \
    && mkdir --mode 1777 /work
COPY containers/sshd_config /etc/gaudi/sshd_config
COPY containers/ssh_config /etc/ssh/ssh_config.d/gaudi.conf
COPY --from=build /opt/gaudi /opt/gaudi
# Open MPI's ranks may not read each other's memory in a container.
ENV PATH=/opt/gaudi/bin:${PATH} \
    OMPI_MCA_btl_vader_single_copy_mechanism=none
WORKDIR /work
USER 1000:1000
CMD ["gaudi-run", "--help"]

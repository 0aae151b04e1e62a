# The gaudi lane: the vendor's image with TensorFlow 2.15.0, SynapseAI 1.14 and its Horovod, and the programs beside them.
# Who builds it accepts the vendor's licence. From the root of the clone:
#   docker build -f containers/gaudi.Dockerfile -t gaudi-vision:gaudi .
# No HEALTHCHECK: the container ends with its program; a worker's sshd is probed by Kubernetes.
ARG BASE_IMAGE=vault.habana.ai/gaudi-docker/1.14.0/ubuntu22.04/habanalabs/tensorflow-installer-tf-cpu-2.15.0:latest

FROM ${BASE_IMAGE} AS build
# hadolint ignore=DL3002
USER 0
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
ENV PATH=/opt/gaudi/bin:${PATH}
# TensorFlow and what it requires in versions of its own stay the vendor's.
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv --system-site-packages /opt/gaudi \
    && sed -i -E '/^(tensorflow-cpu|ml-dtypes)==/d' constraints.txt \
    && pip install --constraint constraints.txt pip
COPY packages packages
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt --build-constraint constraints.txt \
    ./packages/ops "./packages/datasets[imagenet,plots,scenes]" ./packages/models ./packages/distributed ./packages/apps

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="gaudi-vision, gaudi lane" org.opencontainers.image.licenses="Apache-2.0"
USER 0
# Host keys that sshd's package makes would be the same wherever the image runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libjemalloc2 openssh-client openssh-server \
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

# Compiles the wheel that the images of the operator and of the runtime contain, on any host that can build images: it has the Python
# and the glibc of both images. The host needs neither.
#
#   docker build -f images/wheel.Dockerfile --output type=local,dest=dist .      podman: the same
ARG BASE=debian:bookworm-slim
FROM ${BASE} AS builder
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ca-certificates g++ python3 python3-dev python3-venv \
 && python3 -m venv /opt/build
# The configuration that pip needs behind a mirror. It is not part of the wheel.
ARG PIP_CERT
ARG PIP_FIND_LINKS
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY pyproject.toml README.md LICENSE /source/
COPY csrc /source/csrc
COPY runtime /source/runtime
COPY operator /source/operator
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /dist \
      --config-settings=cmake.define.TOPKUBE_CUDA=off /source

FROM scratch
COPY --from=builder /dist /

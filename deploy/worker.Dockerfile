# syntax=docker/dockerfile:1
# A worker, which also prepares and exports jobs. Two targets; from the top of the repository:
#
#   docker build -f deploy/worker.Dockerfile --target cpu -t starlings-worker:cpu .
#   docker build -f deploy/worker.Dockerfile --target cuda -t starlings-worker:cuda .
#   docker run -d --init --network host -v starlings-worker:/data -e STARLINGS_INVITE='starlings://...' starlings-worker:cpu
#   docker run -d --init --network host -v starlings-worker:/data -e STARLINGS_INVITE='starlings://...' --gpus all \
#     starlings-worker:cuda
#
# The volume keeps the worker's identity, so the invite is needed once. `docker stop --time 90` leaves in order.
FROM python:3.13-slim AS base

ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore HOME=/data

# As in coordinator.Dockerfile.
RUN mkdir -p /job /data /invite && chown 10001:10001 /job /data /invite

WORKDIR /data

# One port per device, from here upwards.
EXPOSE 7710

# It lives, has an engine, and the coordinator has welcomed it.
HEALTHCHECK --interval=30s --timeout=20s --start-period=300s --start-interval=5s --retries=3 \
    CMD starlings health --dir /data > /dev/null || exit 1

ENTRYPOINT ["starlings"]
CMD ["join", "--dir", "/data"]

FROM base AS cpu
# PyTorch's own index has builds without CUDA: a tenth of the size.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --index-url "$TORCH_INDEX" "torch>=2.10"
RUN --mount=type=bind,target=/src --mount=type=cache,target=/root/.cache/pip \
    pip install "/src[worker]"
USER 10001:10001

FROM base AS cuda
# The build on PyPI brings CUDA along; the host brings the driver (NVIDIA Container Toolkit).
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG TORCH_INDEX=https://pypi.org/simple
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --index-url "$TORCH_INDEX" "torch>=2.10"
RUN --mount=type=bind,target=/src --mount=type=cache,target=/root/.cache/pip \
    pip install "/src[worker]"
USER 10001:10001

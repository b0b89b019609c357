# syntax=docker/dockerfile:1
# The coordinator with planner and keeper: no torch. From the top of the repository:
#
#   docker build -f deploy/coordinator.Dockerfile -t starlings-coordinator .
#   docker run -d --init -v starlings-job:/job -p 7700:7700 -p 7701:7701 -p 7703:7703 -p 7704:7704 starlings-coordinator \
#     coordinator /job --no-invite --host swarm.example.org
#   docker exec CONTAINER starlings invite create --job /job
#
# The volume holds a job that `starlings prepare` made (deploy/README.md says how it gets there).
FROM python:3.13-slim

ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore HOME=/job

# Numbers, not names, in all images: a volume that one of them fills is readable to the others. A named volume takes
# over the owner of the directory that it covers.
RUN mkdir -p /job /data /invite /broker && chown 10001:10001 /job /data /invite /broker

RUN --mount=type=bind,target=/src --mount=type=cache,target=/root/.cache/pip \
    pip install /src

USER 10001:10001
WORKDIR /job

# Control, enrolment, keeper: all three must be reachable for volunteers.
EXPOSE 7700 7701 7703 7704

# It answers its owner over mTLS out of the core's state.
HEALTHCHECK --interval=30s --timeout=20s --start-period=120s --start-interval=3s --retries=3 \
    CMD starlings status --job /job > /dev/null || exit 1

ENTRYPOINT ["starlings"]
CMD ["coordinator", "/job", "--no-invite"]

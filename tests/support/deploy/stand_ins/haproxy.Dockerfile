# In the place of haproxy:VERSION-alpine where no registry is reached: Debian's.
ARG BASE
FROM ${BASE}
# hadolint ignore=DL3008,DL3009
RUN apt-get update && apt-get install --yes --no-install-recommends haproxy
USER 99:99
STOPSIGNAL SIGUSR1
ENTRYPOINT ["haproxy", "-W", "-db", "-f", "/usr/local/etc/haproxy/haproxy.cfg"]

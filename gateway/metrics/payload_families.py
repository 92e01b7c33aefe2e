"""Metrics of payloads that were fetched from other hosts, through the broker or on connections to their owners.

What workers fetched is the same at every gateway; `weir_gateway_*` are this gateway's.
"""

from __future__ import annotations

from collections.abc import Iterator

from bus.payload_fetcher import PayloadFetcher, fetched_bytes
from bus.payload_server import PayloadServer
from gateway.metrics.text import NO_LABELS, Family, Sample, counter
from gateway.statistics import Statistics

_WAYS = ("nats", "tcp")


def payload_families(statistics: Statistics, fetcher: PayloadFetcher, server: PayloadServer) -> Iterator[Family]:
    """Those that there are."""
    of_workers = [worker.payload_bytes for worker in statistics.workers()]
    for role, told in (("gateway", [fetched_bytes(fetcher)]), ("worker", of_workers)):
        yield counter(
            f"weir_{role}_payload_fetched_bytes",
            f"Bytes of tensors that a {role} fetched from other hosts",
            [Sample({"way": way}, sum(ways.get(way, 0) for ways in told)) for way in _WAYS],
        )
    refused = sum(worker.payload_readers_refused for worker in statistics.workers())
    for role, count in (("gateway", server.refused_readers), ("worker", refused)):
        yield counter(
            f"weir_{role}_payload_readers_refused",
            f"Connections for tensors to a {role} that were refused, or did not prove in time that they may read",
            [Sample(NO_LABELS, count)],
        )

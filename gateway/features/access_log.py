"""`RequestLog`: the access log of a gateway, and the metric of the lines that it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weir.gateway.features.feature import Feature
from weir.gateway.metrics.text import Labels, MetricFamily
from weir.gateway.metrics.weir import access_log_family
from weir.telemetry.access_log import AccessLog


class RequestLog(Feature):
    """Writes `log`."""

    def __init__(self, path: str) -> None:
        self.log = AccessLog(path)

    def metrics(self, served: Mapping[str, Labels]) -> Iterable[MetricFamily]:
        """Implements `Feature.metrics`."""
        return [access_log_family(self.log.dropped)]

    async def start(self) -> None:
        """Implements `Feature.start`: opens the file."""
        self.log.open()

    async def stop(self) -> None:
        """Implements `Feature.stop`: writes what waits."""
        self.log.close()

"""`Feature`: what a part of a gateway that can be left out adds to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weir.gateway.grpc.handlers import Methods
from weir.gateway.metrics.text import Labels, MetricFamily
from weir.http_server.routing import Route


class Feature:
    """One part of a gateway, with nothing to add. `weir.gateway.main` builds each in one line, and starts and stops them.

    A feature starts after the gateway is connected and before it accepts requests; it stops after the last request.
    """

    def http_routes(self) -> Sequence[Route]:
        """Routes of the HTTP ports."""
        return ()

    def grpc_methods(self) -> Methods:
        """Methods of the gRPC port, by their path `/<service>/<method>`."""
        return {}

    def metrics(self, served: Mapping[str, Labels]) -> Iterable[MetricFamily]:
        """Families of the metrics page. `served` are the labels of models by identity."""
        return ()

    async def start(self) -> None:
        """Starts it. Raises WeirError, OSError or ValueError where an option can't be met."""

    async def stop(self) -> None:
        """Stops it."""

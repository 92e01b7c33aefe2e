"""`Platforms`: the ports on which managed services (SageMaker, Vertex AI) send their requests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from starlette.types import ASGIApp

from weir.gateway.context import GatewayContext
from weir.gateway.cross_site import CrossSiteCheck
from weir.gateway.features.feature import Feature
from weir.gateway.http.app import make_app
from weir.gateway.parsed_settings import ParsedSettings
from weir.gateway.platforms.frontend import Platform, PlatformApp, PlatformProtocol
from weir.gateway.platforms.multi_model import MultiModel
from weir.gateway.platforms.sagemaker import SageMaker
from weir.gateway.platforms.vertex_ai import VertexAi
from weir.gateway.settings import GatewaySettings
from weir.http_server.listeners import HttpListeners
from weir.http_server.routing import Route


class PlatformPorts(NamedTuple):
    """Where platforms are served: `stop_http` stops the frontend of this name among `listeners`."""

    settings: GatewaySettings
    listeners: HttpListeners
    stop_http: Callable[[str], Awaitable[None]]


class Platforms(Feature):
    """The platforms that have a port. They start and stop with the HTTP frontend.

    `routes` are those of other features, which the platforms' ports have too; `make_metrics` makes the application of the
    metrics page. `ports` are those that are served, by their names in announcements.
    """

    def __init__(
        self,
        at: PlatformPorts,
        parsed: ParsedSettings,
        context: GatewayContext,
        routes: Sequence[Route],
        make_metrics: Callable[[], ASGIApp],
    ) -> None:
        self._at = at
        self._context = context
        self._routes = routes
        self._make_metrics = make_metrics
        settings = at.settings
        self._platforms: list[tuple[str, Platform, GatewayContext]] = []
        self.ports: dict[str, int] = {}
        if parsed.sagemaker is not None:
            own = self._context_at(settings.sagemaker_address)
            sagemaker = SageMaker(parsed.sagemaker, context.catalog, MultiModel(own, parsed.sagemaker.root))
            self._add("sagemaker_port", sagemaker, own)
        if parsed.vertex_ai_routes is not None:
            vertex_ai = VertexAi(*parsed.vertex_ai_routes, settings.vertex_ai_default_model, context.catalog)
            self._add("vertex_ai_port", vertex_ai, self._context_at(settings.vertex_ai_address))

    async def start(self) -> None:
        """Accepts connections."""
        for port, platform, context in self._platforms:
            app = PlatformApp(platform, make_app(context, self._routes), self._make_metrics(), context.gate)
            make_connection = functools.partial(PlatformProtocol, self._context, platform, app)
            await self._at.listeners.serve(platform.service, make_connection)
            self.ports[port] = self._at.listeners.port(platform.service)

    async def stop(self) -> None:
        """Refuses new connections, and waits a moment for the others."""
        for _, platform, _ in reversed(self._platforms):
            await self._at.stop_http(platform.service)

    def _add(self, port: str, platform: Platform, context: GatewayContext) -> None:
        if self._at.listeners.has(platform.service):
            self._platforms.append((port, platform, context))

    def _context_at(self, address: str) -> GatewayContext:
        """The context of a frontend that listens on `address`."""
        cross_site = CrossSiteCheck(self._at.settings.allowed_hosts, self._at.settings.allowed_origins, address)
        return dataclasses.replace(self._context, cross_site=cross_site)

"""What a gateway makes of its settings before it connects to anything.

`weir serve` asks for it before it starts any role: a gateway is started last, when all models are loaded.
"""

from __future__ import annotations

from typing import NamedTuple

from calls.cache_config import CacheConfig
from gateway.access import Access
from gateway.grpc.options import GrpcOptions
from gateway.http.cross_site import CrossSiteCheck
from gateway.settings import GatewaySettings
from telemetry.metrics_config import MetricsConfig, parse_metrics_config
from telemetry.trace_settings import TraceConfig


class ParsedSettings(NamedTuple):
    """The settings that are texts with a form of their own, parsed."""

    access: Access
    cross_site: CrossSiteCheck
    trace: TraceConfig
    metrics: MetricsConfig
    cache: CacheConfig | None
    grpc: GrpcOptions


def parse_settings(settings: GatewaySettings) -> ParsedSettings:
    """Raises WeirError or ValueError for a setting that makes no sense, OSError for a file that can't be used."""
    grpc = GrpcOptions.of(settings)
    if settings.allow_grpc:
        _ = grpc.compression_level
        grpc.tls_context()
    return ParsedSettings(
        Access.of(settings),
        CrossSiteCheck(settings.allowed_hosts, settings.allowed_origins, settings.http_address),
        TraceConfig.parse(settings.trace_config),
        parse_metrics_config(settings.metrics_config),
        CacheConfig.parse(settings.cache_config),
        grpc,
    )

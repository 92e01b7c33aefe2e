"""What a gateway derives from its settings before it connects to anything: parsed options and memory limits.

`weir serve` parses the options before it starts any role: it starts a gateway last, when all models are loaded.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from weir.calls.cache.config import CacheConfig
from weir.gateway.access import Access
from weir.gateway.cross_site import CrossSiteCheck
from weir.gateway.grpc.codec import MAX_MESSAGE_BYTES
from weir.gateway.grpc.options import GrpcOptions
from weir.gateway.platforms.sagemaker import SageMakerOptions
from weir.gateway.platforms.vertex_ai import read_routes
from weir.gateway.settings import GatewaySettings
from weir.http_server.tls import ServerTls
from weir.runtime.limits.budgets import memory_for_requests_bytes
from weir.runtime.memory_ledger import DEFAULT_LIMIT_BYTES, MemoryLedger
from weir.telemetry.metrics_config import MetricsConfig, parse_metrics_config
from weir.telemetry.tracing.settings import TraceConfig


class ParsedSettings(NamedTuple):
    """The options that are texts with a syntax of their own, parsed."""

    access: Access
    cross_site: CrossSiteCheck
    trace: TraceConfig
    metrics: MetricsConfig
    cache: CacheConfig | None
    grpc: GrpcOptions
    sagemaker: SageMakerOptions | None
    vertex_ai_routes: tuple[str, str] | None
    tls: ServerTls | None
    tells_reasons: bool
    """Whether errors about models that failed to load say why: every client may read the repository index, which does."""


def parse_settings(settings: GatewaySettings) -> ParsedSettings:
    """Parses the options. Raises WeirError or ValueError for a malformed one, OSError for a file that can't be used."""
    grpc = GrpcOptions.of(settings)
    if settings.allow_grpc:
        _ = grpc.compression_level
        grpc.tls_context()
    files = settings.tls_files()
    access = Access.of(settings)
    return ParsedSettings(
        access,
        CrossSiteCheck(settings.allowed_hosts, settings.allowed_origins, settings.http_address),
        TraceConfig.parse(settings.trace_config),
        parse_metrics_config(settings.metrics_config),
        CacheConfig.parse(settings.cache_config),
        grpc,
        SageMakerOptions.of(os.environ) if settings.allow_sagemaker else None,
        read_routes(os.environ) if settings.allow_vertex_ai else None,
        None if files is None else ServerTls(files),
        access.is_open("model-repository") and not settings.access_policy,
    )


MIN_LEDGER_BYTES = 16 * 1024 * 1024
"""The smallest default limit, in however small a container."""


def default_ledger_bytes(gateways: int = 1) -> int:
    """The default limit of the ledger of each of the gateways that share the memory of this machine, in bytes."""
    return max(MIN_LEDGER_BYTES, min(DEFAULT_LIMIT_BYTES, memory_for_requests_bytes() // 4 // gateways))


def request_ledger(settings: GatewaySettings) -> MemoryLedger:
    """The ledger of what clients have sent and of responses that they have not read yet.

    One request may be as large as `--http-max-input-size`, or over gRPC as half of the memory for requests.
    """
    largest_bytes = max(settings.http_max_input_size, min(MAX_MESSAGE_BYTES, memory_for_requests_bytes() // 2))
    return MemoryLedger(settings.gateway_memory_byte_size or default_ledger_bytes(), largest_bytes)


def arriving_slots_ledger(payload_bytes: int) -> MemoryLedger:
    """The ledger of payload slots in which bodies are still arriving: half of the shared memory for payloads."""
    return MemoryLedger(payload_bytes // 2, payload_bytes // 2)

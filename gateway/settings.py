"""`GatewaySettings`: the settings of a gateway, which `weir gateway` fills in from the command line.

Fields have the names and units of Triton's options. `weir.options` describes what each option means.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.bus.nats.access import NO_ACCESS, BrokerAccess
from weir.durable.settings import QueueSettings
from weir.http_server.tls import TlsOptions
from weir.telemetry.log_settings import LogOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(QueueSettings, TlsOptions, LogOptions):
    """Settings of one gateway.

    With `gateway_id` None the gateway draws an id. With a port of 0 it takes a free one and announces it when it is ready
    (`http_port`, `grpc_port`, `metrics_port`, `sagemaker_port`, `vertex_ai_port`). `server_id` is the server's name in its
    metadata, as Triton's `--id`. `http_max_input_size` bounds, in bytes, a request body as sent and as decompressed. With
    `strict_readiness` the server is ready only when all its models are. `exit_timeout_secs` is the time for open requests
    after SIGTERM.
    `live_streams` None uses as many streams as exist. `payload_listen` is the address for readers of payloads, None: none.
    `payload_memory_byte_size` 0 derives the limit from the host. `gateway_memory_byte_size` limits the memory ledger; 0
    derives it from the memory of the container or machine (`weir.gateway.parsed_settings`).
    With `durable_consumer` the gateway runs durable requests and jobs itself. `durable_id` names the `weir durable` process
    whose counters this gateway reports. `gateway_number` is above 0 for further gateways of one `weir serve`: they serve no
    metrics and no managed services (SageMaker, Vertex AI), but report their counters to the first one, which has the same
    `durable_id`.
    Tuples of text hold the values of options that may be repeated, as they were given.
    """

    nats_url: str
    nats_access: BrokerAccess = NO_ACCESS
    payload_listen: str | None = None
    payload_memory_byte_size: int = 0
    gateway_memory_byte_size: int = 0
    gateway_id: str | None = None
    server_id: str = "triton"
    strict_readiness: bool = True
    exit_timeout_secs: float = 30.0
    durable_consumer: bool = True
    durable_id: str | None = None
    gateway_number: int = 0
    live_streams: int | None = None

    allow_http: bool = True
    http_address: str = "127.0.0.1"
    http_port: int = 8000
    reuse_http_port: bool = False
    http_max_input_size: int = 64 * 1024 * 1024
    http_header_forward_pattern: str = ""
    http_restricted_api: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allow_openapi: bool = True
    require_access_policy: bool = False

    allow_grpc: bool = True
    grpc_address: str = "127.0.0.1"
    grpc_port: int = 8001
    reuse_grpc_port: bool = False
    grpc_header_forward_pattern: str = ""
    grpc_restricted_protocol: tuple[str, ...] = ()
    grpc_use_ssl: bool = False
    grpc_use_ssl_mutual: bool = False
    grpc_server_cert: str = ""
    grpc_server_key: str = ""
    grpc_root_cert: str = ""
    grpc_infer_response_compression_level: str = "none"
    grpc_keepalive_time: int = 7_200_000
    grpc_keepalive_timeout: int = 20_000
    grpc_keepalive_permit_without_calls: bool = False
    grpc_http2_max_pings_without_data: int = 2
    grpc_http2_min_recv_ping_interval_without_data: int = 300_000
    grpc_http2_max_ping_strikes: int = 2
    grpc_max_connection_age: int = 0
    grpc_max_connection_age_grace: int = 0

    allow_metrics: bool = True
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 8002
    metrics_config: tuple[str, ...] = ()

    allow_sagemaker: bool = False
    sagemaker_address: str = "127.0.0.1"
    sagemaker_port: int = 8080
    allow_vertex_ai: bool = False
    vertex_ai_address: str = "127.0.0.1"
    vertex_ai_port: int = 8080
    vertex_ai_default_model: str = ""

    cache_config: tuple[str, ...] = ()

    allow_client_shm: bool = False
    client_shm_prefix: tuple[str, ...] = ()

    trace_config: tuple[str, ...] = ()

    access_log: str = ""

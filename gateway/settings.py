"""What a gateway is told at its start; `weir gateway` fills it in from the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of one gateway.

    `gateway_id` None lets the gateway draw one. A port of 0 takes a free one, which the gateway announces when it is
    ready (`http_port`, `grpc_port`, `metrics_port`). `server_id` is the server's name in its metadata, as Triton's
    `--id`. `http_max_input_size` bounds, in bytes, a request body as sent and as decompressed. With `strict_readiness`
    the server is ready only when all its models are. `exit_timeout_secs` is the time for open requests after SIGTERM.
    """

    nats_url: str
    gateway_id: str | None = None
    server_id: str = "triton"
    http_address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_address: str = "127.0.0.1"
    grpc_port: int = 8001
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 8002
    http_max_input_size: int = 64 * 1024 * 1024
    strict_readiness: bool = True
    exit_timeout_secs: float = 30.0
    log_format: str = "text"
    log_verbose: int = 0

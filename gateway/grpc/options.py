"""`GrpcOptions`: what an operator can choose about the gRPC server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, fields

from gateway.grpc.codec import MAX_MESSAGE_BYTES
from gateway.grpc.compression import LEVELS
from gateway.grpc.tls import tls_context
from gateway.http2.options import Http2Options
from gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """Options of the gRPC server, with Triton's names and defaults: sizes in bytes, times in milliseconds.

    `max_connection_age` and its grace are unlimited when 0. `reuse_port` lets several processes share the port; without
    it a taken port is an error. `infer_response_compression_level` is one of `LEVELS`. With `use_ssl` (and its stricter
    form `use_ssl_mutual`, by which clients too must show a certificate, signed by `root_cert`) connections are
    encrypted; `server_cert`, `server_key` and `root_cert` name files in the PEM format.
    """

    max_receive_bytes: int = MAX_MESSAGE_BYTES
    keepalive_time: int = 7_200_000
    keepalive_timeout: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age: int = 0
    max_connection_age_grace: int = 0
    reuse_port: bool = False
    infer_response_compression_level: str = "none"
    use_ssl: bool = False
    use_ssl_mutual: bool = False
    server_cert: str = ""
    server_key: str = ""
    root_cert: str = ""

    @classmethod
    def of(cls, settings: GatewaySettings) -> GrpcOptions:
        """The options among a gateway's settings, where all but the port's have the prefix `grpc_`."""
        named = {option.name: getattr(settings, f"grpc_{option.name}", None) for option in fields(cls)}
        chosen = {name: value for name, value in named.items() if value is not None}
        return cls(**chosen, reuse_port=settings.reuse_grpc_port)

    @property
    def compression_level(self) -> int:
        """The level as zlib counts it; 0 for none. Raises ValueError for a name that is not known."""
        level = LEVELS.get(self.infer_response_compression_level)
        if level is None:
            raise ValueError(
                f"invalid argument for --grpc-infer-response-compression-level, one of {', '.join(LEVELS)}"
            )
        return level

    def tls_context(self) -> ssl.SSLContext | None:
        """What connections are encrypted with, if they are. Raises OSError, which names the option that is at fault."""
        if not (self.use_ssl or self.use_ssl_mutual):
            return None
        return tls_context(self.server_cert, self.server_key, self.root_cert if self.use_ssl_mutual else None)

    def http2(self) -> Http2Options:
        """The options as connections take them."""
        return Http2Options(
            keepalive_time_s=self.keepalive_time / 1000,
            keepalive_timeout_s=self.keepalive_timeout / 1000,
            keepalive_permit_without_calls=self.keepalive_permit_without_calls,
            max_pings_without_data=self.http2_max_pings_without_data,
            min_ping_interval_s=self.http2_min_recv_ping_interval_without_data / 1000,
            max_ping_strikes=self.http2_max_ping_strikes,
            max_age_s=self.max_connection_age / 1000,
            max_age_grace_s=self.max_connection_age_grace / 1000,
        )

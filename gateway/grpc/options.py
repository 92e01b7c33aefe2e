"""`GrpcOptions`: the options of the gRPC server, and its TLS context: HTTP/2 by ALPN, certificates from files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, fields

from weir.gateway.grpc.codec import MAX_MESSAGE_BYTES
from weir.gateway.grpc.messages import LEVELS
from weir.gateway.http2.options import Http2Options
from weir.gateway.settings import GatewaySettings
from weir.http_server.tls import GRPC_PROTOCOLS, TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """Options of the gRPC server, with Triton's names and defaults: sizes in bytes, times in milliseconds.

    `max_connection_age` and its grace are unlimited when 0. `reuse_port` lets several processes share the port; without
    it a port in use is an error. `infer_response_compression_level` is one of `LEVELS`. With `use_ssl` connections are
    encrypted; with the stricter `use_ssl_mutual` clients must present a certificate signed by `root_cert`.
    `server_cert`, `server_key` and `root_cert` name files in the PEM format. Without either, `shared_tls` holds the files
    of all ports of the gateway, None for no TLS.
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
    shared_tls: TlsFiles | None = None

    @classmethod
    def of(cls, settings: GatewaySettings) -> GrpcOptions:
        """The options in the settings of a gateway, where they have the prefix `grpc_`."""
        named = {option.name: getattr(settings, f"grpc_{option.name}", None) for option in fields(cls)}
        chosen = {name: value for name, value in named.items() if value is not None}
        return cls(**chosen, reuse_port=settings.reuse_grpc_port, shared_tls=settings.tls_files(GRPC_PROTOCOLS))

    @property
    def compression_level(self) -> int:
        """The level for zlib; 0 for none. Raises ValueError for an unknown name."""
        level = LEVELS.get(self.infer_response_compression_level)
        if level is None:
            raise ValueError(
                f"invalid argument for --grpc-infer-response-compression-level, one of {', '.join(LEVELS)}"
            )
        return level

    def tls_files(self) -> TlsFiles | None:
        """The files of the TLS context, None without TLS."""
        if not (self.use_ssl or self.use_ssl_mutual):
            return self.shared_tls
        return TlsFiles(
            self.server_cert,
            self.server_key,
            self.root_cert if self.use_ssl_mutual else None,
            protocols=GRPC_PROTOCOLS,
            owner="gRPC",
            options=("--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert"),
        )

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context, None without TLS. Raises OSError that names the option at fault."""
        files = self.tls_files()
        return None if files is None else files.context()

    def http2(self) -> Http2Options:
        """The options of connections."""
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

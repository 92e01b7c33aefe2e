"""Settings of the console, as the command line gives them. `weir/options/console.py` describes each option."""

from __future__ import annotations

from dataclasses import dataclass

from weir.bus.nats.access import NO_ACCESS, BrokerAccess
from weir.bus.streams.declarations import AUDIT_MAX_BYTES
from weir.http_server.tls import TlsOptions
from weir.telemetry.log_settings import LogOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings(TlsOptions, LogOptions):
    """Settings of `weir console`. Fields have the names and units of the options. Port None is
    `weir.console.DEFAULT_PORT`, 0 a free one.
    """

    nats_url: str
    nats_access: BrokerAccess = NO_ACCESS
    live_streams: int | None = None
    exit_timeout_secs: float = 30.0
    console_id: str | None = None
    console_address: str = "127.0.0.1"
    console_port: int | None = None
    console_allow_changes: bool = False
    allowed_hosts: tuple[str, ...] = ()
    access_policy: str = ""
    access_keys: str = ""
    audit_log: str = ""
    audit_max_bytes: int = AUDIT_MAX_BYTES
    require_access_policy: bool = False

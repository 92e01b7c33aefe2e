"""Settings of durable requests and offline jobs, as the command line gives them.

Fields have the names and units of the options of `weir`; `weir/options/durable.py` describes each.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.bus.nats.access import NO_ACCESS, BrokerAccess
from weir.bus.streams.declarations import (
    AUDIT_MAX_BYTES,
    DEAD_MAX_BYTES,
    QUEUE_MAX_BYTES,
    RESULT_MAX_BYTES,
    QueueLimits,
)
from weir.schemas.config.parameters import QueueBounds
from weir.telemetry.log_settings import LogOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """What every process with durable requests or jobs is configured with: gateways, and `weir durable`.

    Sizes of streams are None for their defaults.
    """

    queue_max_messages: int = 1_000_000
    queue_max_bytes: int | None = None
    queue_max_age_secs: float = 7 * 86400.0
    result_ttl_secs: float = 86400.0
    result_max_bytes: int | None = None
    dead_max_bytes: int | None = None
    durable_attempts: int = 5
    tenant_weight: tuple[str, ...] = ()
    tenant_limit: tuple[str, ...] = ()
    callback_allow: tuple[str, ...] = ()
    batch_roots: tuple[str, ...] = ()
    nats_monitor: str = ""
    access_policy: str = ""
    access_keys: str = ""
    audit_log: str = ""
    audit_max_bytes: int = AUDIT_MAX_BYTES

    @property
    def queue_limits(self) -> QueueLimits:
        """The limits of the durable streams."""
        return QueueLimits(
            max_messages=self.queue_max_messages,
            max_bytes=self.queue_max_bytes or QUEUE_MAX_BYTES,
            result_ttl_s=self.result_ttl_secs,
            result_max_bytes=self.result_max_bytes or RESULT_MAX_BYTES,
            queue_max_age_s=self.queue_max_age_secs,
            dead_max_bytes=self.dead_max_bytes or DEAD_MAX_BYTES,
        )

    @property
    def queue_bounds(self) -> QueueBounds:
        """The bounds of the queue of a model that declares none."""
        return QueueBounds(self.queue_max_messages, self.queue_limits.max_bytes, self.queue_max_age_secs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableSettings(QueueSettings, LogOptions):
    """Settings of `weir durable`. They mean what they mean for a gateway.

    `durable_id` names the counters of the process, None: a random name. `gateway_memory_byte_size` 0 takes a share of the
    memory of the container or machine.
    """

    nats_url: str
    nats_access: BrokerAccess = NO_ACCESS
    durable_id: str | None = None
    exit_timeout_secs: float = 30.0
    live_streams: int | None = None
    payload_listen: str | None = None
    payload_memory_byte_size: int = 0
    gateway_memory_byte_size: int = 0
    http_max_input_size: int = 64 * 1024 * 1024
    allow_client_shm: bool = False

    cache_config: tuple[str, ...] = ()
    metrics_config: tuple[str, ...] = ()
    trace_config: tuple[str, ...] = ()

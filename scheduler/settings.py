"""`SchedulerSettings`: the options of a scheduler process, from the command line of `weir scheduler`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weir.bus.nats.access import NO_ACCESS, BrokerAccess
from weir.telemetry.log_settings import LogOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(LogOptions):
    """Options of one scheduler.

    `model_repositories` are the folders in which it looks for models' own batch strategies; it loads nothing else there.
    Without `scheduler_id` it draws one. `exit_timeout_secs` limits the wait for batches in flight after SIGTERM. With
    `live_streams` None it uses the existing streams. Live requests that would wait longer than `max_queue_wait_secs` are
    rejected on arrival (0: none). With `scale_to_zero` it remembers models whose workers have all left. While no worker
    serves a model, its requests wait for `scale_from_zero_patience_secs`.
    """

    nats_url: str
    nats_access: BrokerAccess = NO_ACCESS
    model_repositories: Sequence[Path] = ()
    scheduler_id: str | None = None
    exit_timeout_secs: float = 30.0
    live_streams: int | None = None
    max_queue_wait_secs: float = 0.0
    scale_to_zero: bool = False
    scale_from_zero_patience_secs: float = 30.0

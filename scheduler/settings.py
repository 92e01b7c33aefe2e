"""What a scheduler is told at its start; `weir scheduler` fills it in from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bus.broker_access import NO_ACCESS, BrokerAccess


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Settings of one scheduler.

    `model_repositories` are the folders in which it looks for models' own batch strategies; it loads nothing else there.
    `scheduler_id` None lets the scheduler draw one. `exit_timeout_secs` is the time after SIGTERM for
    batches in flight. `live_streams` None takes as many as there are. Live requests that would wait for longer than
    `max_queue_wait_secs` are refused as they come (0: none is). With `scale_to_zero` models stay known whose workers all
    went. While nobody serves a model, requests wait for `scale_from_zero_patience_secs`.
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
    event_log: str = ""
    log_format: str = "default"
    log_file: str = ""
    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True

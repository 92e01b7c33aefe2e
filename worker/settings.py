"""What a worker is told at its start; `weir worker` fills it in from the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of one worker.

    `model_repositories` exist when the worker is started. `worker_id` None lets the worker draw one.
    `model_config_name` NAME reads `configs/NAME.pbtxt` of a model instead of its `config.pbtxt`, where it exists.
    With `exit_on_error` a model that fails to load at the start ends the worker (`announce_failure`); without it the
    others serve. `exit_timeout_secs` is the time for running batches after SIGTERM.
    """

    nats_url: str
    model_repositories: tuple[Path, ...]
    worker_id: str | None = None
    model_config_name: str | None = None
    disable_auto_complete_config: bool = False
    model_load_thread_count: int = 4
    exit_on_error: bool = False
    exit_timeout_secs: float = 30.0
    log_format: str = "text"
    log_verbose: int = 0

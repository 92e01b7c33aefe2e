"""What a worker is told at its start; `weir worker` fills it in from the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bus.broker_access import NO_ACCESS, BrokerAccess


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of one worker; fields have the names of Triton's options, in their units.

    `model_repositories` are folders that exist when the worker is started, or addresses of repositories in NATS
    (`nats://NAME`), of which it has copies in `model_cache_dir`, or where temporary files lie. `worker_id` None lets the
    worker draw one. `model_config_name` NAME reads `configs/NAME.pbtxt` of a model instead of its `config.pbtxt`, where it
    exists.
    With `model_namespacing`, models of different repositories may have the same name.
    `model_control_mode` is "none", "poll" or "explicit"; `load_model` names the models that are loaded at the start in
    explicit mode ("*" alone: all). With `exit_on_error` a model that fails to load at the start ends the worker
    (`announce_failure`); without it the others serve. False (None does not) also allows repositories that are not there.
    `backend_config` holds values of the form `<backend>,<key>=<value>`, or `<key>=<value>` for all backends; in
    `backend_directories` are those of the user's own.
    `exit_timeout_secs` is the time for running batches after SIGTERM.
    `live_streams` None takes as many as there are. `payload_listen` is where readers of payloads connect, None: nowhere.
    `payload_memory_byte_size` 0 takes what follows from the host.
    `cache_config` is for what its models ask of others. `model_memory_bytes` (0: nobody counts) and `worker_resource`
    (`NAME=COUNT`) are what there is for models that declare what they need. `gpu` is the one GPU whose instances it runs,
    None for all of the host's; `cpu_instances` says that it runs those that need none. `model_load_gpu_limit` holds values
    of the form `<gpu>:<fraction>`. `host_policy` holds values of the form `<policy>,<setting>=<value>`.
    """

    nats_url: str
    nats_access: BrokerAccess = NO_ACCESS
    payload_listen: str | None = None
    payload_memory_byte_size: int = 0
    model_repositories: tuple[Path | str, ...]
    worker_id: str | None = None
    model_config_name: str | None = None
    disable_auto_complete_config: bool = False
    model_namespacing: bool = False
    model_control_mode: str = "none"
    repository_poll_secs: float = 15.0
    load_model: tuple[str, ...] = ()
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    backend_config: tuple[str, ...] = ()
    backend_directories: tuple[Path, ...] = ()
    rate_limit: str = "off"
    rate_limit_resource: tuple[str, ...] = ()
    pinned_memory_pool_byte_size: int = 256 << 20
    host_policy: tuple[str, ...] = ()
    exit_on_error: bool | None = None
    exit_timeout_secs: float = 30.0
    live_streams: int | None = None
    model_cache_dir: str | None = None
    model_memory_bytes: int = 0
    worker_resource: tuple[str, ...] = ()
    cache_config: tuple[str, ...] = ()
    metrics_config: tuple[str, ...] = ()
    allow_gpu_metrics: bool = True
    allow_cpu_metrics: bool = True
    metrics_interval_ms: int = 2000
    allow_client_shm: bool = False
    gpu: int | None = None
    cpu_instances: bool = True
    model_load_gpu_limit: tuple[str, ...] = ()
    log_format: str = "default"
    log_file: str = ""
    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True

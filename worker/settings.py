"""`WorkerSettings`: the settings of a worker, filled by `weir worker` from the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weir.bus.nats.access import NO_ACCESS, BrokerAccess
from weir.telemetry.log_settings import LogOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(LogOptions):
    """Settings of one worker. Fields have the names and units of Triton's options, where Triton has them.

    - `model_repositories` are existing folders, or addresses of repositories in NATS (`nats://NAME`) or in object stores
      (`s3://`, `gs://`, `as://`), which are mirrored in `model_cache_dir` (None: in temporary folders), in at most
      `model_cache_byte_size` bytes (0: nine tenths of the disk). `model_config_name` NAME replaces a model's
      `config.pbtxt` by `configs/NAME.pbtxt` if that exists. With `model_namespacing`, models of different repositories may
      share a name.
    - `model_control_mode` is "none", "poll" or "explicit"; in explicit mode `load_model` names the models to load at the
      start ("*": all). With `exit_on_error` a model that fails to load at the start ends the worker; False (not None) also
      allows missing repositories.
    - `backend_config` has values `<backend>,<key>=<value>` or, for all backends, `<key>=<value>`; `backend_directories` are
      folders of custom backends, `repoagent_directory` is the folder of repository agents. `cache_config` is for calls of
      other models. `host_policy` has values `<policy>,<setting>=<value>`, `model_load_gpu_limit` has values
      `<gpu>:<fraction>`.
    - `gpu` is the only GPU to use (None: all of the host); `cpu_instances` enables instances without a GPU.
      `model_memory_bytes` (0: unknown) and `worker_resource` (`NAME=COUNT`) are the capacity for models that declare needs.
    - `worker_id` None generates an id. `live_streams` None uses the existing number. `payload_listen` is the address for
      readers of payloads (None: none). `payload_memory_byte_size` 0 derives the size from the host. `exit_timeout_secs` is
      the time for running batches after SIGTERM.
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
    repoagent_directory: Path | None = None
    rate_limit: str = "off"
    rate_limit_resource: tuple[str, ...] = ()
    pinned_memory_pool_byte_size: int | None = None
    host_policy: tuple[str, ...] = ()
    exit_on_error: bool | None = None
    exit_timeout_secs: float = 30.0
    live_streams: int | None = None
    model_cache_dir: str | None = None
    model_cache_byte_size: int = 0
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

"""What `weir doctor` measures on a machine, as plain values, which the checks judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weir.commands.doctor.backend_rows import BackendRow
from weir.worker.devices.gpus import Gpu


class PortFacts(NamedTuple):
    """A port on which `weir serve` listens by default, and the option that changes it.

    `problem` is why nothing can listen there, "" if it is free. `user` describes the process that listens there, "" if
    unknown; `is_weir` says whether it is a running `weir serve`, which starts without the port if it `is_optional`.
    """

    name: str
    option: str
    address: str
    port: int
    problem: str = ""
    user: str = ""
    is_weir: bool = False
    is_optional: bool = False


class SharedMemoryFacts(NamedTuple):
    """The size of `/dev/shm`, its free space, and the shared memory that a process of Weir may use by default."""

    total_bytes: int
    free_bytes: int
    budget_bytes: int


class LimitFacts(NamedTuple):
    """Limits of this process: rlimits, and those of its control groups. None: no limit.

    `processes` and `processes_now` are those of the limit with the least room left.
    """

    open_files: int | None
    open_files_hard: int | None
    locked_bytes: int | None
    processes: int | None
    processes_now: int
    memory_bytes: int
    machine_memory_bytes: int
    processors: int
    machine_processors: int


class NatsServerFacts(NamedTuple):
    """The nats-server that `weir serve` would start: where it is and its version, or why there is none."""

    path: str = ""
    version: str = ""
    problem: str = ""


class GpuFacts(NamedTuple):
    """GPUs, driver, and installed packages of CUDA.

    `problem` is why there is no GPU. `cuda_version` is the newest CUDA that the driver supports. `packages` has (name,
    version, major version of CUDA that it needs). `obstacle` is why no model can run on a GPU that there is.
    """

    gpus: Sequence[Gpu]
    problem: str
    driver_version: str
    cuda_version: tuple[int, int] | None
    packages: Sequence[tuple[str, str, int]]
    obstacle: str


class DiskFacts(NamedTuple):
    """The data folder (or the nearest folder above it that exists), its file system, and seconds that each sync took.

    `problem` is why nothing can be written there.
    """

    folder: Path
    file_system: str
    total_bytes: int
    free_bytes: int
    syncs_s: Sequence[float]
    problem: str = ""


class ClockFacts(NamedTuple):
    """The kernel's clock source, the cost of reading the monotonic clock, and whether the time is synchronized (NTP)."""

    source: str
    monotonic_ns: float
    is_synchronized: bool | None


class PythonFacts(NamedTuple):
    """The interpreter, and what is installed. `other_weir` is the version of PyPI's other package called weir, if any."""

    version: str
    is_optimized: bool
    is_debug: bool
    uvloop: str
    uvloop_problem: str
    weir: str
    folder: Path
    other_weir: str


class Facts(NamedTuple):
    """Everything that is checked. `stream_bytes` is the maximal size of each stream on disk, by name.

    `missing_extras` has the purpose of each extra that is not installed.
    """

    ports: Sequence[PortFacts]
    shared_memory: SharedMemoryFacts | None
    limits: LimitFacts
    nats_server: NatsServerFacts
    gpu: GpuFacts
    onnxruntimes: Sequence[str]
    backends: Sequence[BackendRow]
    disk: DiskFacts
    stream_bytes: Mapping[str, int]
    clock: ClockFacts
    python: PythonFacts
    missing_extras: Mapping[str, str]

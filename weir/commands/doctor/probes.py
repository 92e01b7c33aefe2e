"""Measures the machine for `weir doctor`: `probe` returns `Facts`. It writes one temporary file, in the data folder."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import weir
from weir.bus.naming.identity import SHARED_MEMORY_DIRECTORY
from weir.bus.nats.embedded_server import EmbeddedNats, NatsStartError, find_binary, version_of
from weir.bus.payloads.arena import default_budget_bytes
from weir.bus.streams.declarations import sizes_of_streams
from weir.commands.doctor.backend_rows import backend_rows
from weir.commands.doctor.cuda_packages import cuda_major
from weir.commands.doctor.facts import (
    ClockFacts,
    DiskFacts,
    Facts,
    GpuFacts,
    LimitFacts,
    NatsServerFacts,
    PortFacts,
    PythonFacts,
    SharedMemoryFacts,
)
from weir.commands.doctor.python_build import is_optimized
from weir.commands.listening import IN_USE, listen_problem
from weir.commands.local.data_folders import default_data_dir
from weir.commands.local.servers import local_servers
from weir.console import DEFAULT_PORT as CONSOLE_PORT
from weir.options import SERVE, options_of
from weir.runtime.control_groups import limits_of
from weir.runtime.extras import EXTRAS, is_installed
from weir.runtime.limits.budgets import memory_for_requests_bytes
from weir.runtime.processors import processor_count
from weir.worker.backends.registry import BackendRegistry
from weir.worker.devices.gpus import HostGpus, cuda_obstacle, driver_cuda_version, find_gpus
from weir.worker.devices.metrics import find_nvml

SYNCS = 20
"""How often the cost of a sync is measured."""

SYNCED_BYTES = 4096
"""What is written before each sync: about a small durable request."""

_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_CLOCK_READS = 10_000
_TIMEX_BYTES, _STATUS_OFFSET, _UNSYNCHRONIZED = 208, 40, 0x40
"""`struct timex` of Linux on 64-bit machines (adjtimex(2)): its size, where `status` lies, and STA_UNSYNC."""

_SERVER_WORDS = {"serve", "gateway", "console"}
_SHOWN_COMMAND_LENGTH = 60


def probe(data_dir: Path | None = None) -> Facts:
    """Measure everything; takes about a second. Without `data_dir`, the disk is that of the default data folder."""
    gpus = find_gpus()
    folder = data_dir or default_data_dir(options_of(SERVE)["http_port"].default).path
    return Facts(
        ports=list(probe_ports()),
        shared_memory=probe_shared_memory(),
        limits=probe_limits(),
        nats_server=probe_nats_server(),
        gpu=probe_gpu(gpus),
        onnxruntimes=[name for name in ("onnxruntime", "onnxruntime-gpu") if _version(name)],
        backends=list(backend_rows(BackendRegistry(), gpus)),
        disk=probe_disk(folder),
        stream_bytes=probe_streams(folder),
        clock=probe_clock(),
        python=probe_python(),
        missing_extras={name: extra.purpose for name, extra in EXTRAS.items() if not is_installed(name)},
    )


def probe_streams(folder: Path) -> dict[str, int]:
    """The sizes that `weir serve` gives the streams of durable requests on the volume of `folder`, by their names."""
    try:
        return dict(zip(("QUEUE", "RESULT", "DEAD"), sizes_of_streams(EmbeddedNats(folder).store_bytes), strict=True))
    except OSError:  # the disk's own check reports it
        return {}


def probe_ports() -> Iterator[PortFacts]:
    """The ports on which `weir serve` listens without any option."""
    options = options_of(SERVE)
    default_address = options["http_address"].default
    own = {server.http.rpartition(":")[2] for server in local_servers()}
    for key, option in options.items():
        prefix = key.removesuffix("_port")
        is_optional = prefix == "console"
        port = CONSOLE_PORT if is_optional else option.default
        allowed = options.get(f"allow_{prefix}")
        is_off = allowed is not None and not allowed.default
        if prefix == key or not isinstance(port, int) or not port or is_off:
            continue
        named = options.get(f"{prefix}_address")
        address = (named.default if named is not None else None) or default_address
        facts = PortFacts(prefix.replace("_", " "), option.names[0], address, port, is_optional=is_optional)
        problem = listen_problem(address, port)
        if problem == IN_USE:
            user, is_weir = _user_of(port)
            yield facts._replace(problem=problem, user=user, is_weir=is_weir or str(port) in own)
        else:
            yield facts._replace(problem=problem)


def _user_of(port: int) -> tuple[str, bool]:
    """The process that listens at a port, and whether it is one of Weir. Processes of other users may be hidden."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            is_listener = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if not (is_listener and connection.pid):
                continue
            # A forked role has its whole command line in one word.
            words = [os.path.basename(word) for word in " ".join(psutil.Process(connection.pid).cmdline()).split()]
            is_weir = "weir" in words and bool(_SERVER_WORDS & set(words))
            return f"process {connection.pid} ({' '.join(words)[:_SHOWN_COMMAND_LENGTH]})", is_weir
    return "", False


def probe_shared_memory() -> SharedMemoryFacts | None:
    """The shared memory of this machine or container; None if there is none."""
    try:
        status = os.statvfs(SHARED_MEMORY_DIRECTORY)
    except OSError:
        return None
    free_bytes = status.f_bavail * status.f_frsize
    budget_bytes = default_budget_bytes(free_bytes, memory_for_requests_bytes())
    return SharedMemoryFacts(status.f_blocks * status.f_frsize, free_bytes, budget_bytes)


def probe_limits() -> LimitFacts:
    """The limits of this process and of its control groups."""
    open_files, open_files_hard = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    processes = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    groups = limits_of("pids", ("pids.max", "pids.current"), ("pids.max", "pids.current"))
    # The tightest is the one with the least room left.
    bounds = [(int(most), int(now)) for most, now in groups if most.isdigit() and now.isdigit()]
    if processes is not None and os.getuid():  # the kernel exempts root
        bounds.append((processes, _threads_of_user()))
    most, now = min(bounds, key=lambda bound: bound[0] - bound[1], default=(None, 0))
    return LimitFacts(
        open_files,
        open_files_hard,
        _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        most,
        now,
        memory_for_requests_bytes(),
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        processor_count(),
        os.cpu_count() or 1,
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _threads_of_user() -> int:
    """The threads of this user, which RLIMIT_NPROC counts."""
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid():
                count += process.num_threads()
    return count


def probe_nats_server() -> NatsServerFacts:
    """The nats-server that `weir serve` would start."""
    try:
        path = find_binary()
        return NatsServerFacts(str(path), ".".join(map(str, version_of(path))))
    except NatsStartError as error:
        return NatsServerFacts(problem=str(error))


def probe_gpu(gpus: HostGpus) -> GpuFacts:
    """GPUs, driver, and the installed packages that need CUDA."""
    packages = []
    for distribution in metadata.distributions():
        name, version = distribution.name, distribution.version
        major = cuda_major(name, version) if name else None
        if major is not None:
            packages.append((name, version, major))
    return GpuFacts(
        gpus.gpus, gpus.problem, _driver_version(), driver_cuda_version(), sorted(set(packages)), cuda_obstacle()
    )


def _driver_version() -> str:
    """The version of the NVIDIA driver as NVML reports it; "" if it can't be determined."""
    nvml: Any = find_nvml()
    if nvml is None:
        return ""
    try:
        nvml.nvmlInit()
        try:
            version = nvml.nvmlSystemGetDriverVersion()
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


def probe_disk(folder: Path) -> DiskFacts:
    """The disk of `folder`, which need not exist: then of the nearest folder above it."""
    there = folder.absolute()
    while not there.is_dir() and there != there.parent:
        there = there.parent
    try:
        usage = psutil.disk_usage(str(there))
    except OSError as error:
        return DiskFacts(there, "", 0, 0, (), error.strerror or str(error))
    facts = DiskFacts(there, _file_system(there), usage.total, usage.free, ())
    try:
        return facts._replace(syncs_s=list(_syncs_s(there)))
    except OSError as error:
        return facts._replace(problem=error.strerror or str(error))


def _syncs_s(folder: Path) -> Iterator[float]:
    """Seconds that each of `SYNCS` syncs of an appended block took. The file is deleted."""
    block = os.urandom(SYNCED_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(SYNCS):
            file.write(block)
            began_s = time.perf_counter()
            os.fsync(file.fileno())
            yield time.perf_counter() - began_s


def _file_system(folder: Path) -> str:
    """The type of the file system that `folder` is on, such as ext4; "" if unknown."""
    mounts = [one for one in psutil.disk_partitions(all=True) if folder.is_relative_to(one.mountpoint)]
    # Of several mounts at one place the last is in effect.
    return max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else ""


def probe_clock() -> ClockFacts:
    """The clocks of this machine."""
    try:
        source = _CLOCK_SOURCE.read_text().strip()
    except OSError:
        source = ""
    began_ns = time.perf_counter_ns()
    for _ in range(_CLOCK_READS):
        time.monotonic()
    return ClockFacts(source, (time.perf_counter_ns() - began_ns) / _CLOCK_READS, _is_synchronized())


def _is_synchronized() -> bool | None:
    """Whether the kernel's time is synchronized, as an NTP client reports it to the kernel; None if unknown."""
    timex = (ctypes.c_char * (2 * _TIMEX_BYTES))()  # `modes` 0: nothing is set
    try:
        state = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        return None
    if state < 0 or sys.maxsize < 1 << 32:
        return None
    return not ctypes.c_int.from_buffer(timex, _STATUS_OFFSET).value & _UNSYNCHRONIZED


def probe_python() -> PythonFacts:
    """The interpreter and the installation."""
    problem = ""
    try:
        import uvloop  # noqa: F401 - whether it can be imported
    except ImportError as error:
        problem = str(error)
    return PythonFacts(
        version=sys.version.split()[0],
        is_optimized=is_optimized(),
        is_debug=bool(sysconfig.get_config_var("Py_DEBUG")),
        uvloop=_version("uvloop"),
        uvloop_problem=problem,
        weir=weir.__version__,
        folder=Path(weir.__file__).parents[1],
        other_weir=_version("weir"),
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""

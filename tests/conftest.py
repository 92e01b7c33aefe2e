"""What holds for every test."""

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import pytest

from weir.runtime.process_memory import return_free_memory

# Tests tell nobody what they run; ONNX Runtime's packages would.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Tests start processes while clients of gRPC are at work: what gRPC does at a fork, for who forks and goes on, hangs then.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

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


# What a run leaves out, by the marker that says why. Workers of xdist send their counts, which are equal, to the parent.

MARKERS = ("gpu", "containers", "timing", "slow")
_left_out: Counter[str] = Counter()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count them by their markers; a test that has two counts for the first."""
    _left_out.update(next((name for name in MARKERS if item.get_closest_marker(name)), "other") for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of a worker."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the counts of a worker that has ended. One that was killed sends none."""
    _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}) if not _left_out else {})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print them at the end of the run."""
    if _left_out:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(_left_out.items()))
        terminalreporter.line(f"left out by marker: {counts}")

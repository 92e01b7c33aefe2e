"""Work in helper processes: results, refusals, failures, processes that die or hang, and who waits for whom."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from weir.runtime.containment import failures
from weir.runtime.offload import LARGE_BYTES, MAX_VALUES, MAX_WAITING, OFF_LOOP_BYTES, Offload, takes_long
from weir.runtime.offload_process import RETIRE_BYTES
from weir.schemas.core.errors import ErrorCode, WeirError, not_found

HERE = "test_offload"


def joined(parts: Sequence[memoryview]) -> list[bytes]:
    return [b"".join(parts), b"%d" % len(parts)]


def in_pieces(_parts: Sequence[memoryview]) -> list[Iterator[bytes] | bytes]:
    return [(b"%d " % number for number in range(3)), b"", b"end"]


def refused(_parts: Sequence[memoryview]) -> list[bytes]:
    raise not_found("there is no \udcff such thing")


def failing(_parts: Sequence[memoryview]) -> list[bytes]:
    raise ZeroDivisionError("a bug")


def fails_late(_parts: Sequence[memoryview]) -> list[Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield b"x" * 100_000
        raise not_found("after the first piece")

    return [pieces()]


def hungry(_parts: Sequence[memoryview]) -> list[bytes]:
    return [bytearray(5 << 30)]  # type: ignore[list-item]


def dying(_parts: Sequence[memoryview]) -> list[bytes]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def hanging(parts: Sequence[memoryview]) -> list[bytes]:
    while parts:
        time.sleep(0.01)
    return []


def waiting(parts: Sequence[memoryview]) -> list[bytes]:
    """Until the file is there whose name is the first part."""
    while not os.path.exists(bytes(parts[0])):
        time.sleep(0.002)
    return [b"%d" % os.getpid()]


@pytest.fixture
async def offload(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Offload]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    offload = Offload()
    yield offload
    offload.close()


def wait_until_dead(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)


async def code_of(offload: Offload, operation: str) -> tuple[ErrorCode, str]:
    with pytest.raises(WeirError) as caught:
        await offload.run(f"{HERE}:{operation}", [b"x"])
    return caught.value.code, caught.value.message


async def test_results_and_refusals(offload: Offload) -> None:
    assert offload.pids == []
    text, count = await offload.run(f"{HERE}:joined", [b"a", memoryview(bytes(3 << 20)), bytearray(b""), b"z"])
    assert (bytes(text), bytes(count)) == (b"a" + bytes(3 << 20) + b"z", b"4")
    (first,) = offload.pids
    assert [bytes(part) for part in await offload.run(f"{HERE}:in_pieces", [])] == [b"0 1 2 ", b"", b"end"]
    assert await code_of(offload, "refused") == (ErrorCode.NOT_FOUND, "there is no \udcff such thing")
    assert await code_of(offload, "fails_late") == (ErrorCode.NOT_FOUND, "after the first piece")
    assert await code_of(offload, "failing") == (ErrorCode.INTERNAL, "internal server error")
    assert failures()[f"weir.runtime.offload: {HERE}:failing"] == 1
    assert (await code_of(offload, "hungry"))[0] is ErrorCode.INVALID_ARG
    assert offload.pids == [first]


def keep_a_helper_of_a_large_process(folder: str) -> None:
    os.environ["PYTHONPATH"] = folder
    ballast = b"x" * (RETIRE_BYTES + (64 << 20))

    async def run_twice() -> None:
        offload = Offload()
        await offload.run(f"{HERE}:joined", [b"a"])
        (first,) = offload.pids
        await offload.run(f"{HERE}:joined", [b"a"])
        assert offload.pids == [first]
        offload.close()

    asyncio.run(run_twice())
    assert ballast


def test_what_the_parent_holds_does_not_count_as_the_helpers() -> None:
    """A large gateway would start a helper for each job: a child inherits the peak of the process that started it."""
    from tests.support.own_process import run_in_own_process  # the helpers import this module too

    run_in_own_process(keep_a_helper_of_a_large_process, str(Path(__file__).parent))


async def test_a_helper_does_not_inherit_the_headers_of_traces(
    offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=hush")
    monkeypatch.setenv("OTHER", "is inherited")
    await offload.run(f"{HERE}:joined", [b"a"])
    (pid,) = offload.pids
    environment = await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_bytes)
    assert b"is inherited" in environment
    assert b"hush" not in environment


async def test_a_process_that_dies_fails_its_job_alone(offload: Offload) -> None:
    assert await code_of(offload, "dying") == (ErrorCode.INTERNAL, "the process that read the request has died")
    assert bytes((await offload.run(f"{HERE}:joined", [b"on"]))[0]) == b"on"
    (pid,) = offload.pids
    os.kill(pid, signal.SIGKILL)  # while it has nothing to do
    wait_until_dead(pid)  # before the event loop can hear of it
    assert bytes((await offload.run(f"{HERE}:joined", [b"on"]))[0]) == b"on"


async def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    offload = Offload(run_limit_s=1.5)
    assert await code_of(offload, "hanging") == (ErrorCode.UNAVAILABLE, "the request was not read within 2 s")
    assert offload.pids == []
    offload.close()


async def test_the_event_loop_goes_on_and_small_jobs_pass_large_ones(offload: Offload, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    name = bytes(gate)
    large = [offload.start(f"{HERE}:waiting", [name, bytes(LARGE_BYTES + 1)]) for _ in range(3)]
    assert bytes((await offload.run(f"{HERE}:joined", [b"small"]))[0]) == b"small"
    assert not any(task.done() for task in large)
    gate.touch()
    pids = {bytes(answer[0]) for answer in await asyncio.gather(*large)}
    assert len(pids) <= 2
    assert len(offload.pids) == 2


async def test_a_large_job_leaves_the_process_that_has_started_to_small_ones(offload: Offload, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    small = [b"%b" % bytes(gate)]
    first = bytes((await offload.run(f"{HERE}:waiting", small))[0])
    gate.unlink()
    large = offload.start(f"{HERE}:waiting", [bytes(gate), bytes(LARGE_BYTES + 1)])
    while len(offload.pids) < 2:
        await asyncio.sleep(0)
    assert (await code_of(offload, "refused"))[0] is ErrorCode.NOT_FOUND
    gate.touch()
    assert bytes((await large)[0]) != first
    assert len(offload.pids) == 2


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("value", [b'"",', b"1,", b"[1],", b"{},", b'{"a":1},'])
def test_a_document_of_many_values_takes_long(kind: Any, value: bytes) -> None:
    values = OFF_LOOP_BYTES // 2 // len(value)
    assert takes_long(kind(b"[" + value * values + b"0]"))
    assert not takes_long(kind(b"[" + value * (MAX_VALUES // 5) + b"0]"))


def test_a_document_of_few_values_takes_long_from_its_size_on() -> None:
    assert not takes_long(b'["' + b"x" * (OFF_LOOP_BYTES - 4) + b'"]')
    assert takes_long(b'["' + b"x" * (OFF_LOOP_BYTES - 3) + b'"]')


async def test_a_cancelled_job_frees_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    offload = Offload(processes=1)
    task = offload.start(f"{HERE}:waiting", [bytes(tmp_path / "never")])
    while not offload.pids:
        await asyncio.sleep(0.001)
    task.cancel()
    assert bytes((await offload.run(f"{HERE}:joined", [b"next"]))[0]) == b"next"
    offload.close()


async def test_a_cancelled_job_ends_once_its_parts_are_not_read_any_more(
    offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def fill(parts: Sequence[bytes]) -> int:
        begun.set()
        assert goes_on.wait(10)
        return os.memfd_create("test")

    monkeypatch.setattr("weir.runtime.offload._filled", fill)
    job = offload.start("any", [b"body"])
    assert await asyncio.to_thread(begun.wait, 10)
    job.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not job.done()
    goes_on.set()
    await asyncio.wait([job])
    assert job.cancelled()


async def test_too_many_that_wait_are_refused(offload: Offload, tmp_path: Path) -> None:
    for _ in range(MAX_WAITING):
        offload.start(f"{HERE}:waiting", [bytes(tmp_path / "never")])
    with pytest.raises(WeirError) as caught:
        offload.start(f"{HERE}:joined", [b""])
    assert caught.value.code is ErrorCode.UNAVAILABLE


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_nothing_is_left_behind(offload: Offload) -> None:
    await offload.run(f"{HERE}:joined", [b"warm"])
    before = open_files()
    for _ in range(5):
        await offload.run(f"{HERE}:joined", [b"x" * 1000])
        assert (await code_of(offload, "refused"))[0] is ErrorCode.NOT_FOUND
        task = offload.start(f"{HERE}:joined", [bytes(1 << 20)])
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await offload.run(f"{HERE}:joined", [b"last"])
    deadline_s = time.monotonic() + 5
    while open_files() > before and time.monotonic() < deadline_s:
        await asyncio.sleep(0.01)  # a thread may still be filling a file that nobody wants
    assert open_files() <= before

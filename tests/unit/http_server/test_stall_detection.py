"""Transfers stall when too little moves in a period; the check of one connection does not affect others."""

import asyncio

import pytest

from weir.http_server import stall_detection
from weir.http_server.stall_detection import MIN_PROGRESS_BYTES, STALL_PERIOD_S, StallDetector, end_stalled_connections
from weir.runtime.memory_ledger import MemoryLedger


def test_a_transfer_stalls_without_enough_bytes_in_a_period() -> None:
    detector = StallDetector()
    assert not detector.is_stalled(0.0, 0)
    assert not detector.is_stalled(STALL_PERIOD_S - 1, 10)
    assert detector.is_stalled(STALL_PERIOD_S, MIN_PROGRESS_BYTES - 1)


def test_progress_starts_another_period() -> None:
    detector = StallDetector()
    assert not detector.is_stalled(0.0, 0)
    assert not detector.is_stalled(STALL_PERIOD_S, MIN_PROGRESS_BYTES)
    assert not detector.is_stalled(2 * STALL_PERIOD_S - 1, MIN_PROGRESS_BYTES)
    assert detector.is_stalled(2 * STALL_PERIOD_S, MIN_PROGRESS_BYTES)


def test_a_reset_starts_another_period() -> None:
    detector = StallDetector()
    assert not detector.is_stalled(0.0, 0)
    detector.reset()
    assert not detector.is_stalled(STALL_PERIOD_S, 0)


def test_every_connection_is_checked_even_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_detection, "CHECK_INTERVAL_S", 0.001)
    checked = asyncio.Event()

    class Broken:
        def check_progress(self, now_s: float) -> None:
            raise RuntimeError("injected")

    class Watched:
        def check_progress(self, now_s: float) -> None:
            checked.set()

    async def scenario() -> None:
        task = asyncio.create_task(end_stalled_connections(lambda: [Broken(), Watched()], MemoryLedger()))
        await checked.wait()
        assert not task.done()
        task.cancel()

    asyncio.run(scenario())


def test_free_memory_is_returned_after_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_detection, "CHECK_INTERVAL_S", 0.001)
    returned = asyncio.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(stall_detection, "return_free_memory", lambda: loop.call_soon_threadsafe(returned.set))
        ledger = MemoryLedger(1 << 30)
        account = ledger.account("a")
        assert account.charge("http", 128 << 20)
        account.release("http", 128 << 20)
        task = asyncio.create_task(end_stalled_connections(list, ledger))
        await returned.wait()
        task.cancel()
        assert ledger.recent_peak_bytes == 0

    asyncio.run(scenario())

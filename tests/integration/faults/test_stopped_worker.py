"""A worker that stands still holds batches: another one runs them meanwhile, and the first is lost until it registers
again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.request_ledger import Ledger, assert_nothing_lost
from tests.support.models.zoo import write_small_zoo
from tests.support.servers.roles import RoleProcess, Start
from tests.support.waiting import wait_until

STANDS_STILL = "stands still: its process is stopped or frozen"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = Start(tmp_path)
    yield started
    started.close()


@pytest.mark.timeout(120)
def test_requests_of_a_stopped_worker_run_elsewhere_while_it_stands_still(start: Start, tmp_path: Path) -> None:
    write_small_zoo(tmp_path / "models")
    scheduler = start("scheduler")
    workers = [start.worker(), start.worker()]
    served = start.gateway()
    wait_until(served.is_ready)
    ledger = Ledger(served, threads=8)

    recoveries: list[float] = []

    def stop_and_continue(worker: RoleProcess) -> None:
        ledger.wait_for_answers(time.monotonic())
        stopped_s = time.monotonic()
        worker.process.send_signal(signal.SIGSTOP)
        try:
            held = ledger.in_flight
            wait_until(lambda: not held & ledger.in_flight)
            recoveries.append(time.monotonic() - stopped_s)
            wait_until(lambda: scheduler.log().count(STANDS_STILL) == len(recoveries))
            ledger.wait_for_answers(time.monotonic())
        finally:
            worker.process.send_signal(signal.SIGCONT)
        # It finds its registration removed, registers again, and is used again.
        wait_until(lambda: worker.log().count("registering again") == 1)
        ledger.wait_for_answers(time.monotonic())

    with ledger.sending():
        for worker in workers:
            stop_and_continue(worker)
    print(ledger.summary("SIGSTOP of one of two workers", len(recoveries), recoveries))
    assert_nothing_lost(ledger)

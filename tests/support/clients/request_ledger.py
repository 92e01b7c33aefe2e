"""`Ledger`: clients that send requests continuously, and a record of each request's result.

Every request carries a unique value and expects it back. Nothing is resent: a request must be answered even if a
process dies while it runs.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.servers.endpoints import Endpoints
from tests.support.waiting import wait_until

MODELS = ("fast", "slow")

_PAUSE_S = 0.002
_PAUSE_AFTER_FAULT_S = 0.05


class Entry(NamedTuple):
    """One request: when it was sent and answered (monotonic seconds), and what was wrong with the answer, if anything."""

    model: str
    sent_s: float
    answered_s: float
    fault: str


class Ledger:
    """Threads that send to model `fast` and to the slow one, over HTTP and gRPC, while its context is entered."""

    def __init__(self, server: Endpoints, threads: int = 12, delay_ms: float = 20.0, pause_s: float = _PAUSE_S) -> None:
        self.server = server
        self._threads = threads
        self._delay_ms = delay_ms
        self._pause_s = pause_s
        self._values = itertools.count(1)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._open: set[int] = set()  # the values of requests without an outcome
        self.entries: list[Entry] = []
        self.sent = 0

    @contextmanager
    def sending(self, finish_within_s: float = 60.0) -> Iterator[Ledger]:
        """Sends as long as the context lasts, then waits for the answers that are still to come."""
        asks: list[Callable[[str], None]] = [self._over_http, self._over_grpc]
        threads = [
            threading.Thread(target=asks[number % 2], args=(MODELS[number // 2 % 2],), daemon=True)
            for number in range(self._threads)
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            deadline = time.monotonic() + finish_within_s
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def faults(self) -> list[str]:
        """What was wrong with answers."""
        with self._lock:
            return [entry.fault for entry in self.entries if entry.fault]

    @property
    def in_flight(self) -> frozenset[int]:
        """The values of the requests that were sent and have no outcome."""
        with self._lock:
            return frozenset(self._open)

    @property
    def unanswered(self) -> int:
        """Requests that were sent and have no outcome."""
        return len(self.in_flight)

    def wait_for_answers(self, moment_s: float, timeout_s: float = 40.0) -> float:
        """Seconds from `moment_s` until each model has rightly answered a request that was sent after it."""
        return max(self._wait_for_answer(model, moment_s, timeout_s) for model in MODELS) - moment_s

    def _wait_for_answer(self, model: str, moment_s: float, timeout_s: float) -> float:
        return float(wait_until(lambda: self._first_answer(model, moment_s), timeout_s))

    def _first_answer(self, model: str, moment_s: float) -> float | None:
        with self._lock:
            times = [e.answered_s for e in self.entries if e.model == model and e.sent_s > moment_s and not e.fault]
        return min(times, default=None)

    def summary(self, what: str, kills: int, recoveries_s: list[float]) -> str:
        """One line of figures."""
        latencies = sorted(entry.answered_s - entry.sent_s for entry in self.entries)
        wrong = sum(fault.startswith("wrong") for fault in self.faults)
        return (
            f"{what}: {self.sent} requests, {kills} faults, lost {self.unanswered}, wrong {wrong}, "
            f"errors {len(self.faults) - wrong}, recovery max {max(recoveries_s, default=0):.2f} s, "
            f"p50 {latencies[len(latencies) // 2] * 1000:.0f} ms, slowest {latencies[-1]:.2f} s"
        )

    def _over_http(self, model: str) -> None:
        with self.server.http(timeout_s=60) as client:
            while not self._stop.is_set():
                self._account(model, lambda arrays: client.infer(model, http_inputs(arrays)))

    def _over_grpc(self, model: str) -> None:
        with self.server.grpc() as client:
            while not self._stop.is_set():
                self._account(model, lambda arrays: client.infer(model, grpc_inputs(arrays), client_timeout=60))

    def _account(self, model: str, ask: Callable[[dict[str, np.ndarray]], Any]) -> None:
        with self._lock:
            value = next(self._values)
            self._open.add(value)
            self.sent += 1
        given = np.array([[value]], np.int64)
        arrays = {"IN": given}
        if model == "slow":
            arrays = {"VALUE": given, "DELAY_MS": np.array([[self._delay_ms]], np.float32)}
        sent_s = time.monotonic()
        try:
            answer = ask(arrays).as_numpy("VALUE_OUT" if model == "slow" else "OUT")
            fault = "" if answer.tolist() == [[value]] else f"wrong: {answer.tolist()} for {value}"
        except Exception as error:  # the clients' libraries raise errors of many kinds, and each counts
            fault = f"{model}: {type(error).__name__}: {error}"
        with self._lock:
            self._open.remove(value)
            self.entries.append(Entry(model, sent_s, time.monotonic(), fault))
        time.sleep(_PAUSE_AFTER_FAULT_S if fault else self._pause_s)


def rounds(ledger: Ledger, fault: Callable[[], None], times: int) -> list[float]:
    """Does `fault` several times at moments of chance; the seconds until requests were answered again, for each."""
    draw = random.Random(time.time_ns())
    recoveries: list[float] = []
    for _ in range(times):
        ledger.wait_for_answers(time.monotonic())
        time.sleep(draw.uniform(0.2, 0.7))
        moment = time.monotonic()
        fault()
        recoveries.append(ledger.wait_for_answers(moment))
    return recoveries


def assert_nothing_lost(ledger: Ledger) -> None:
    assert ledger.unanswered == 0
    assert ledger.faults == []

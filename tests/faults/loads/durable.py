"""`DurableLoad`: a producer of durable requests in a process of its own, and their results."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.errors import Error as NatsError

from tests.faults.account import Findings
from tests.support.durable.checker import Verdict, check
from tests.support.durable.producer import Share, Told, start
from weir.bus.naming.durable_subjects import QUEUE_STREAM

_LOOK_S = 0.1
_BEGINS_S = 60.0
_MOST = 10_000_000


class DurableLoad:
    """A producer of `rate` durable requests per second, until it is stopped."""

    def __init__(self, folder: Path, seed: int, url: str, rate: float, name: str = "producer") -> None:
        self._url = url
        self._ledger = folder / f"{name}.ledger"
        self._share = Share(
            url=url, seed=seed, name=name, first=0, count=_MOST, in_flight=256, rate=rate, ledger=self._ledger
        )
        self.verdict = Verdict()
        self.told = Told()

    async def start(self) -> None:
        """Wait until it sends. Raises RuntimeError on a time-out."""
        self._process, self._pipe = start(self._share)
        deadline_s = time.monotonic() + _BEGINS_S
        while not (self._ledger.exists() and self._ledger.stat().st_size):
            if time.monotonic() > deadline_s or not self._process.is_alive():
                raise RuntimeError("the producer of durable requests has not begun")
            await asyncio.sleep(_LOOK_S)

    async def end(self, others: int = 0, patience_s: float = 120.0) -> Findings:
        """Sends no more; what became of all that was sent, once the queue is empty, or after `patience_s`.

        `others` are records of requests that are not its own.
        """
        try:
            self._pipe.send(True)
            deadline_s = time.monotonic() + patience_s
            await self._hear(deadline_s)
            await self._until_empty(deadline_s)
            self._pipe.send(True)
            self.told = await self._hear(deadline_s) or self.told
            self.verdict = await check(self._url, [self._ledger])
        finally:
            self._process.kill()
            self._process.join()
        return self._findings(others)

    def _findings(self, others: int) -> Findings:
        verdict, reply = self.verdict, self.told
        findings = Findings(
            requests=verdict.promised,
            lost=verdict.lost,
            duplicated=verdict.answered_twice + reply.contradicting_replies,
            wrong=verdict.wrong + reply.wrong_replies + abs(verdict.unknown - others),
        )
        if findings.wrong:
            findings.notes.append(
                f"durable requests: wrong records {verdict.wrong}, wrong replies {reply.wrong_replies}, "
                f"records of no request {verdict.unknown}, expected {others}"
            )
        findings.errors.update(verdict.errors)
        if verdict.left_in_queue:
            findings.errors["left in the queue"] = verdict.left_in_queue
        return findings

    def note(self) -> str:
        """The figures of these requests."""
        verdict = self.verdict
        waits = sorted(verdict.waits_ms) or [0]
        return (
            f"durable {verdict.promised}, of them begun again {verdict.begun_again}, stored twice {self.told.duplicates}, "
            f"p99 {waits[len(waits) * 99 // 100] / 1000:.2f} s"
        )

    async def _hear(self, deadline_s: float) -> Told | None:
        while time.monotonic() < deadline_s:
            if self._pipe.poll():
                received = self._pipe.recv()
                return received if isinstance(received, Told) else None
            if not self._process.is_alive():
                break
            await asyncio.sleep(_LOOK_S)
        print("the producer did not get everything stored", file=sys.stderr, flush=True)
        return None

    async def _until_empty(self, deadline_s: float) -> None:
        client = await _connect(self._url)
        try:
            while time.monotonic() < deadline_s:
                try:
                    if (await client.jetstream(timeout=1).stream_info(QUEUE_STREAM)).state.messages == 0:
                        return
                except (NatsError, TimeoutError, OSError):
                    pass
                await asyncio.sleep(_LOOK_S)
        finally:
            await client.close()


async def _connect(url: str) -> Client:
    async def ignore(error: Exception) -> None:
        pass

    return await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=ignore)  # type: ignore[arg-type]

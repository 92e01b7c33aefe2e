"""`SequenceLoad`: clients of sequences, who notice a state that was mixed up, went back or was begun anew unasked."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time

from tests.faults.account import Findings
from tests.faults.loads.http_caller import HttpCaller
from tests.faults.models import TOTAL, int64_request

_STEPS = 20
_AGAIN_S = 0.2
_PATIENCE_S = 60.0


class SequenceLoad:
    """Clients of sequences. After an error or a lost connection a client starts a new sequence."""

    def __init__(self, seed: int, addresses: list[tuple[str, int]], clients: int = 4, pause_s: float = 0.05) -> None:
        self._draw = random.Random(seed)
        self._callers = [HttpCaller(addresses[number % len(addresses)]) for number in range(clients)]
        self._pause_s = pause_s
        self._ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self.findings = Findings()
        self.ended = self.begun_anew = 0
        """Sequences that came to their end, and such that did not."""

    def start(self) -> None:
        """Start sending."""
        self._tasks = [asyncio.create_task(self._send(caller)) for caller in self._callers]

    async def end(self) -> Findings:
        """Sends no more; what was found. Errors are no part of it: that a sequence ends with one is what is promised."""
        self._is_over = True
        for task in self._tasks:
            await task
        for caller in self._callers:
            caller.close()
            self.findings.duplicated += caller.unasked > 0
        return self.findings

    async def _send(self, caller: HttpCaller) -> None:
        while not self._is_over:
            if await self._sequence(caller, next(self._ids)):
                self.ended += 1
            else:
                self.begun_anew += 1
                await asyncio.sleep(_AGAIN_S)

    async def _sequence(self, caller: HttpCaller, id: int) -> bool:
        total = 0
        for step in range(_STEPS):
            value = self._draw.randrange(1, 1000)
            total += value
            flags = {"sequence_id": id, "sequence_start": step == 0, "sequence_end": step == _STEPS - 1}
            began_s = time.monotonic()
            self.findings.requests += 1
            try:
                body = int64_request(value, **flags)
                answer = await asyncio.wait_for(caller.ask(f"/v2/models/{TOTAL}/infer", body), _PATIENCE_S)
            except TimeoutError:
                self.findings.lost += 1
                return False
            except (OSError, asyncio.IncompleteReadError):
                self.findings.again += 1
                return False
            self.findings.waits_s.append(time.monotonic() - began_s)
            if answer.status != 200:
                return False
            got = json.loads(answer.body)["outputs"][0]["data"]
            self.findings.compare(got, [total], f"sequence {id}, step {step} with {value}")
            await asyncio.sleep(self._pause_s)
        return True

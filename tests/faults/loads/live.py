"""`LiveLoad`: clients that wait for each response; an `Account` records requests and results."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from tests.faults.account import Account, Findings, check
from tests.faults.loads.http_caller import Answer, HttpCaller
from tests.faults.models import DIGEST, bytes_request

_PATIENCE_S = 60.0
"""Time after which a request without a result counts as lost."""

_AGAIN_S = 0.05
_AFTER_ERROR_S = 0.2
_HEX = re.compile(rb"[0-9a-f]{64}")


class LiveLoad:
    """Clients with one connection each, to the gateways in turn, with a pause between requests.

    Who sees its connection end sends the same request again, as clients do. An error is an end, but for a refusal that says
    when to come again while `comes_again`: `put_off` counts those.
    """

    def __init__(
        self, folder: Path, seed: int, addresses: list[tuple[str, int]], clients: int = 8, pause_s: float = 0.03
    ) -> None:
        folder.mkdir()
        self._account = Account(folder, seed)
        self._callers = [HttpCaller(addresses[number % len(addresses)]) for number in range(clients)]
        self._pause_s = pause_s
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self.comes_again = False
        self.put_off = 0
        self._answered: list[tuple[float, float]] = []
        self._news = asyncio.Event()

    @property
    def answers(self) -> int:
        """Number of correct responses so far."""
        return len(self._answered)

    def start(self) -> None:
        """Start sending."""
        self._tasks = [asyncio.create_task(self._send(caller)) for caller in self._callers]

    async def answered_after(self, moment_s: float, timeout_s: float = 60.0) -> float:
        """Seconds from `moment_s` until a request sent after it was answered; `timeout_s` without one."""
        deadline_s = time.monotonic() + timeout_s
        position = max(0, len(self._answered) - 100)
        while time.monotonic() < deadline_s:
            for sent_s, answered_s in self._answered[position:]:
                if sent_s > moment_s:
                    return answered_s - moment_s
            position = len(self._answered)
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), 0.5)
            except TimeoutError:
                continue
        return timeout_s

    async def end(self) -> Findings:
        """Sends no more; what became of all that was sent, once each has its end, or has been waited for long enough."""
        self._is_over = True
        if self._tasks:
            _, open_ones = await asyncio.wait(self._tasks, timeout=_PATIENCE_S + 5)
            for task in open_ones:
                task.cancel()
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]
        for caller in self._callers:
            caller.close()
        self._account.close()
        findings = check(self._account.promised, self._account.sent, self._account.ended)
        findings.duplicated += sum(caller.unasked > 0 for caller in self._callers)
        return findings

    async def _send(self, caller: HttpCaller) -> None:
        while not self._is_over:
            number, payload = self._account.next()
            began_s = time.monotonic()
            again = 0
            while True:
                try:
                    answer = await asyncio.wait_for(self._ask(caller, number, payload), _PATIENCE_S)
                    wait_s = int(answer.headers.get("retry-after", 0))
                    if not (self.comes_again and answer.status == 503 and wait_s):
                        break
                    self.put_off += 1
                    await asyncio.sleep(wait_s)
                except TimeoutError:
                    return  # without an end
                except (OSError, asyncio.IncompleteReadError):
                    again += 1  # whoever finds no gateway for long has lost nothing: it asks until the load is ended
                    await asyncio.sleep(_AGAIN_S)
            ended_s = time.monotonic()
            found = _HEX.search(answer.body) if answer.status == 200 else None
            error = "" if answer.status == 200 else f"{answer.status} {answer.body[:160].decode(errors='replace')}"
            self._account.end(number, found[0].decode() if found else "", error, ended_s - began_s, again)
            if not error:
                self._answered.append((began_s, ended_s))
                self._news.set()
            await asyncio.sleep(_AFTER_ERROR_S if error else self._pause_s)

    async def _ask(self, caller: HttpCaller, number: int, payload: bytes) -> Answer:
        body, headers = bytes_request(payload)
        return await caller.ask(f"/v2/models/{DIGEST}/infer", body, {**headers, "X-Request-Id": str(number)})

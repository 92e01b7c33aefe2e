"""`StreamLoad`: clients of a decoupled model, who notice a response that is missing, repeated or out of order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from tests.faults.account import Findings
from tests.faults.models import COUNTED
from weir.options.api_key import authorization

_INTERRUPTED = ("the rest of the response was lost", "worker was lost while it was streaming")
"""Of the errors with which a response that was interrupted may end. Both say that the request may be sent again."""

_PATIENCE_S = 60.0
_MOST_RESPONSES = 12


class StreamLoad:
    """Clients with one request at a time, each on a stream of its own, to the gateways in turn.

    A request for n responses gets the numbers below n in order. `interrupted` counts the requests that ended with an error
    which says that the rest of their responses was lost.
    """

    def __init__(self, seed: int, addresses: list[str], clients: int = 2, pause_s: float = 0.02) -> None:
        self._draw = random.Random(seed)
        self._addresses = [addresses[number % len(addresses)] for number in range(clients)]
        self._pause_s = pause_s
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self.findings = Findings()
        self.whole = self.interrupted = 0

    def start(self) -> None:
        """Start sending."""
        self._tasks = [asyncio.create_task(self._send(address)) for address in self._addresses]

    async def end(self) -> Findings:
        """Sends no more; what was found."""
        self._is_over = True
        for task in self._tasks:
            await task
        return self.findings

    async def _send(self, address: str) -> None:
        async with triton_aio.InferenceServerClient(address) as client:
            while not self._is_over:
                await self._ask(client, self._draw.randint(1, _MOST_RESPONSES))
                await asyncio.sleep(self._pause_s)

    async def _ask(self, client: Any, wanted: int) -> None:
        tensor = triton.InferInput("N", [1], "INT32")
        tensor.set_data_from_numpy(np.array([wanted], np.int32))
        is_final = asyncio.Event()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": COUNTED, "inputs": [tensor]}
            await is_final.wait()

        findings, numbers = self.findings, []
        shown = {name.lower(): value for name, value in authorization("").items()}
        findings.requests += 1
        ends = 0
        try:
            async with asyncio.timeout(_PATIENCE_S):
                async for result, error in client.stream_infer(requests(), headers=shown):
                    if error is not None:
                        ends += 1
                        if any(text in str(error) for text in _INTERRUPTED):
                            self.interrupted += 1
                        else:
                            findings.errors[str(error)[:160]] += 1
                        is_final.set()
                        continue
                    numbers.append(int(result.as_numpy("NUMBER").item()))
                    if result.get_response().parameters["triton_final_response"].bool_param:
                        ends += 1
                        findings.compare(numbers, list(range(wanted)), "responses of a stream")
                        self.whole += 1
                        is_final.set()
        except TimeoutError:
            findings.lost += 1
            return
        findings.lost += ends == 0
        findings.duplicated += ends > 1
        findings.compare(numbers, list(range(len(numbers))), "responses of a stream, in order")

"""`PythonProbe`: asks the process of a Python model whether its model is ready, whatever else it does."""

from __future__ import annotations

import asyncio
import socket
from itertools import count

from worker.python_stub._weir_lifeline import ANSWER, QUESTION

TIMEOUT_S = 5.0
"""How long a model may take to say whether it is ready, as in Triton; then it is not."""


class PythonProbe:
    """See the module, and `worker.version_health.ReadinessProbe`. `end` is the lifeline of the process, whose it stays."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.setblocking(False)
        self._numbers = count(1)
        self._turn = asyncio.Lock()

    async def ask(self, timeout_s: float = TIMEOUT_S) -> bool:
        """What the model's `is_ready` says; who asks meanwhile waits for his turn, in his own time."""
        number = next(self._numbers) & 0xFFFFFFFF
        try:
            # The process may end, and its lifeline be closed, while this waits for the answer.
            with self._end.dup() as end:
                async with asyncio.timeout(timeout_s), self._turn:
                    return await _answer(end, number)
        except (OSError, TimeoutError):
            return False  # it is gone, or too late


async def _answer(end: socket.socket, number: int) -> bool:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(end, QUESTION.pack(number))
    while packet := await loop.sock_recv(end, ANSWER.size):
        # Those to earlier questions that nobody waits for any more may come first.
        if len(packet) == ANSWER.size and ANSWER.unpack(packet)[0] == number:
            return bool(ANSWER.unpack(packet)[1])
    return False

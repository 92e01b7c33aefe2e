"""`PatientJetStream`: nats-py's JetStream, which waits while a cluster of NATS servers chooses new leaders.

When a server of a cluster is lost, streams and consumers whose leader it was, and JetStream's API if it led that, do not
answer for some seconds (a leader is missed for 4 to 9 s, nats-server says nobody answers, or nothing). What is asked
meanwhile is asked again. It may have been done already, the answer being lost: all that is asked may be done twice.
Source: nats-server's raft (election timeouts), JetStream's errors 503, 10008 and 10023.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.api import PubAck
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

PATIENCE_S = 15.0
"""How long a question is asked again."""

TRY_S = 1.0
"""How long one of a cluster is waited for: a server that leads no more does not answer, and another will."""

_WAIT_S = 0.1

T = TypeVar("T")


def is_passing(error: Exception) -> bool:
    """Whether an error of JetStream's API may be gone in a moment: the cluster is choosing a leader."""
    if isinstance(error, APIError):
        return error.code == 503 or isinstance(error, ServiceUnavailableError)
    return isinstance(error, TimeoutError | NoRespondersError)


async def patiently(is_clustered: bool, ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` returns, which is called again while that may help: in a cluster alone."""
    until_s = time.monotonic() + PATIENCE_S if is_clustered else 0.0
    while True:
        try:
            return await ask()
        except Exception as error:
            if not is_passing(error) or time.monotonic() >= until_s:
                raise
        await asyncio.sleep(_WAIT_S)


class PatientJetStream(JetStreamContext):
    """See the module. `is_clustered` tells whether there are other servers."""

    def __init__(self, client: Any, is_clustered: Callable[[], bool]) -> None:
        self._is_clustered = is_clustered
        super().__init__(client)

    @property
    def _timeout(self) -> float:
        """What nats-py waits for an answer."""
        return TRY_S if self._is_clustered() else self._patience_s

    @_timeout.setter
    def _timeout(self, value: float) -> None:
        self._patience_s = value

    async def _api_request(self, req_subject: str, req: bytes = b"", timeout: float = 5) -> dict[str, Any]:
        clustered = self._is_clustered()
        patience_s = min(timeout, TRY_S) if clustered else timeout
        ask = super()._api_request
        return await patiently(clustered, lambda: ask(req_subject, req, patience_s))

    async def publish(self, subject: str, payload: bytes = b"", *args: Any, **options: Any) -> PubAck:
        """As nats-py's, but that what no stream has taken is published again."""
        until_s = time.monotonic() + PATIENCE_S if self._is_clustered() else 0.0
        while True:
            try:
                return await super().publish(subject, payload, *args, **options)
            except NoStreamResponseError:
                if time.monotonic() >= until_s:
                    raise
            await asyncio.sleep(_WAIT_S)

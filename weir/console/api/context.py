"""`ConsoleContext`: what the routes of the console's API share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from weir.bus.nats.connection import Bus
from weir.bus.nats.replies import ReplyInbox
from weir.bus.streams.dead_letters import DeadLetters
from weir.calls.gateway_api import GatewayApi
from weir.calls.gateway_api import Response as ApiResponse
from weir.cluster.observation.observer import Observation
from weir.console.collection.view import ClusterView
from weir.schemas.core.errors import WeirError

INDEX_INTERVAL_S = 2.0
"""How old the index of the repositories may be that a page is shown."""


@dataclass(kw_only=True)
class ConsoleContext:
    """The collected state, and the ways to act on the cluster. `broker_url` has no credentials."""

    bus: Bus
    view: ClusterView
    replies: ReplyInbox
    dead_letters: DeadLetters
    observation: Observation
    gateway: GatewayApi
    release: str
    broker_url: str
    allows_changes: bool
    _index: Sequence[Mapping[str, Any]] = field(default=(), init=False)
    _indexed_s: float = field(default=float("-inf"), init=False)

    @property
    def max_request_bytes(self) -> int:
        """The largest message that the broker takes."""
        return self.bus.max_payload_bytes

    async def ask_gateway(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> ApiResponse:
        """The response of a gateway to a request of its HTTP API. Raises WeirError if no gateway responds."""
        return await self.gateway.request(method, path, headers or {}, body)

    async def read_gateway(self, path: str) -> Any:
        """The JSON document at `path` of a gateway's HTTP API; None if there is none, or no gateway responds."""
        try:
            response = await self.ask_gateway("GET", path)
            return orjson.loads(response.body) if response.status == 200 else None
        except (WeirError, orjson.JSONDecodeError):
            return None

    async def repository_index(self) -> Sequence[Mapping[str, Any]]:
        """The models in the repositories, loaded or not, at most `INDEX_INTERVAL_S` old; empty without a gateway."""
        if time.monotonic() >= self._indexed_s + INDEX_INTERVAL_S:
            self._indexed_s = time.monotonic()
            try:
                response = await self.ask_gateway("POST", "/v2/repository/index", b"{}")
                self._index = orjson.loads(response.body) if response.status == 200 else ()
            except (WeirError, orjson.JSONDecodeError):
                self._index = ()
        return self._index

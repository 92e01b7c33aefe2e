"""`ConsoleContext`: what the routes of the console's API share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request

from weir.access.gate import Gate
from weir.access.policy.actions import Action
from weir.bus.nats.connection import Bus
from weir.bus.nats.replies import ReplyInbox
from weir.bus.streams.dead_letters import DeadLetters
from weir.calls.gateway_api import TIMEOUT_S, GatewayApi
from weir.calls.gateway_api import Response as ApiResponse
from weir.cluster.observation.observer import Observation
from weir.console.collection.view import ClusterView
from weir.http_server.door import principal_of
from weir.schemas.core.errors import WeirError, unavailable

INDEX_INTERVAL_S = 2.0
"""How old the index of the repositories may be that a page is shown, while a gateway replies."""

INDEX_TIMEOUT_S = 3.0
"""How long the index waits for a gateway, which itself waits for workers."""

AUTHORIZATION: ContextVar[str] = ContextVar("authorization", default="")
"""The `Authorization` header of the request that is being answered: gateways decide by it."""

NO_GATEWAY = "no gateway replies: requests can be sent again once one does"


MAX_ASKERS = 100
"""Principals whose view of the models is kept for a moment."""


@dataclass
class _Index:
    """What a gateway has said of the repositories to one principal, and when it was asked."""

    rows: Sequence[Mapping[str, Any]] = ()
    asked_s: float = float("-inf")


@dataclass(kw_only=True)
class ConsoleContext:
    """The collected state, and the ways to act on the cluster.

    `broker_url` has no credentials. `access_file` is the path of the file with the URL and password of an embedded
    nats-server, "" if another one is used. `gate` decides by the access policy.
    """

    bus: Bus
    view: ClusterView
    replies: ReplyInbox
    dead_letters: DeadLetters
    observation: Observation
    gateway: GatewayApi
    release: str
    broker_url: str
    allows_changes: bool
    access_file: str = ""
    gate: Gate = field(default_factory=partial(Gate, time.time))
    _indexes: dict[str, _Index] = field(default_factory=dict, init=False)

    @property
    def max_request_bytes(self) -> int:
        """The largest message that the broker takes."""
        return self.bus.max_payload_bytes

    async def ask_gateway(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> ApiResponse:
        """The response of a gateway to a request of its HTTP API, in the name of whoever asks the console.

        Raises WeirError if no gateway responds: at once where none has announced itself lately, else after `timeout_s`.
        """
        if not self.view.has_gateway:
            raise unavailable(NO_GATEWAY)
        return await self.gateway.request(method, path, {**(headers or {}), **own_authorization()}, body, timeout_s)

    async def read_gateway(self, path: str) -> Any:
        """The JSON document at `path` of a gateway's HTTP API; None if there is none, or no gateway responds."""
        try:
            response = await self.ask_gateway("GET", path)
            return orjson.loads(response.body) if response.status == 200 else None
        except (WeirError, orjson.JSONDecodeError):
            return None

    async def repository_index(self, request: Request) -> Sequence[Mapping[str, Any]]:
        """The models in the repositories that the sender may see, loaded or not.

        They are as they were last known while no gateway responds.
        """
        if not self.gate.may_any(principal_of(request), Action.METADATA):
            return ()
        asker = AUTHORIZATION.get()
        index = self._indexes.get(asker)
        if index is None:
            if len(self._indexes) >= MAX_ASKERS:
                self._indexes.clear()
            index = self._indexes[asker] = _Index()
        if time.monotonic() >= index.asked_s + INDEX_INTERVAL_S:
            index.asked_s = time.monotonic()
            try:
                response = await self.ask_gateway("POST", "/v2/repository/index", b"{}", timeout_s=INDEX_TIMEOUT_S)
                index.rows = orjson.loads(response.body) if response.status == 200 else ()
            except (WeirError, orjson.JSONDecodeError):
                pass
        return index.rows


def own_authorization() -> dict[str, str]:
    """The header with which a request is sent on in the name of whoever asks the console; empty where it shows nothing."""
    shown = AUTHORIZATION.get()
    return {"authorization": shown} if shown else {}

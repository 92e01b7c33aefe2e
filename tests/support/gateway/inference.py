"""A `RequestDispatcher` on a bus without a broker, with some models, and callers that record their responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from weir.bus.naming.live_queues import LiveLayout
from weir.bus.nats.connection import Message
from weir.calls.cache.config import CacheConfig
from weir.calls.cache.response_cache import ResponseCache
from weir.calls.catalog import ServedModel
from weir.calls.dispatch import DispatchOptions, RequestDispatcher
from weir.calls.in_flight import DirectExecutor, PendingRequest
from weir.calls.payload_store import PayloadStore
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.calls import ANYBODY, Caller, SlotRelease, pack_response, pack_responses, unpack_frame

CONFIG = {"input": [{"name": "IN", "data_type": "TYPE_UINT8", "dims": [1]}]}
ORDERED = {"dynamic_batching": {"preserve_ordering": True}}
STREAMS = {**ORDERED, "model_transaction_policy": {"decoupled": True}}
CACHED = {**ORDERED, "response_cache": {"enable": True}}
SPREAD = {**STREAMS, "dynamic_batching": {}, "parameters": {"weir_partitions": {"string_value": "4"}}}
MODELS = {
    "plain": {},
    "ordered": ORDERED,
    "other": ORDERED,
    "streams": STREAMS,
    "cached": CACHED,
    "spread": SPREAD,
}


class Bench:
    """A bus, a catalog, a registry and payloads for one `RequestDispatcher`. `told` is what callers heard: (name, what)."""

    is_connected = True
    losses = 0
    max_payload_bytes = 1 << 20
    hold, check_size = PayloadStore.hold, PayloadStore.check_size

    def __init__(self, cache: str = "", keeps_references: bool = False, direct: DirectExecutor | None = None) -> None:
        self.live_layout = LiveLayout()
        self.sent: list[int] = []  # keys, in the order in which they left
        self.cancelled: list[str] = []  # the subjects on which requests were cancelled
        self.released: list[tuple[str, int, int]] = []
        self.models = {
            name: ServedModel(name, ModelConfig.model_validate({"name": name, **CONFIG, **more}), [1], {}, {1: "load"})
            for name, more in MODELS.items()
        }
        self.cache = None
        if cache:
            self.cache = ResponseCache(self, "me", self, self, CacheConfig(cache, 1 << 20))  # type: ignore[arg-type]
        options = DispatchOptions(cache=self.cache, keeps_references=keeps_references, direct=direct)
        self.inference = RequestDispatcher(self, "me", self, self, options)  # type: ignore[arg-type]
        self.told: list[tuple[str, Any]] = []
        self.lookups: list[str] = []

    @property
    def cancels(self) -> int:
        return len(self.cancelled)

    def resolve(self, name: str, _version: str) -> ServedModel:
        return self.models[name]

    def served_model(self, name: str) -> ServedModel | None:
        return self.models.get(name)

    def on_model_change(self, _listener: object) -> None:
        pass

    def place_bodies(self, _model: str, _bodies: object) -> None:
        return None

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        if subject.startswith("live."):
            self.sent += [row[0] for row in unpack_frame(data)[1]]
        elif subject.startswith("$JS.API.DIRECT.GET."):
            self.lookups.append(reply)
        elif subject.startswith("cancel."):
            self.cancelled.append(subject)
        elif subject.startswith("release."):
            self.released += SlotRelease.unpack(data).slots

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    def submit(
        self,
        name: str,
        model: str = "ordered",
        content: bytes | PayloadRef = b"x",
        then: Callable[[], Any] = int,
        caller: Caller = ANYBODY,
    ) -> PendingRequest:
        def on_response(outcome: Any, is_final: bool) -> None:
            what = outcome
            if isinstance(outcome, InferResponse):
                what = bytes(outcome.outputs[0].data)  # type: ignore[arg-type]
            self.told.append((name, what if not isinstance(outcome, WeirError) else "error"))
            then()

        request = InferRequest(model, id=name, inputs=[Tensor("IN", "UINT8", [1], content)])
        return self.inference.submit(request, on_response, caller=caller)

    def answer(self, pending: PendingRequest, content: bytes = b"y", final: bool = True, run: Any = None) -> None:
        row = pack_response(pending.key, [Tensor("OUT", "UINT8", [len(content)], content)], None, final, None, run)
        self.hear(row)

    def hear(self, *rows: Any) -> None:
        self.inference._on_responses(Message("reply.me", "", pack_responses(1, rows), ""))

    def names(self) -> list[str]:
        return [name for name, _ in self.told]

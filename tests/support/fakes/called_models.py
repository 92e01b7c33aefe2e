"""`CalledModels` stands in for `weir.worker.backend_api.inference_client`: models that respond as a test decides."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from weir.calls.in_flight import OnResponse
from weir.schemas.core.errors import WeirError, not_found
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.worker.backends.python.calls import ProcessCallServer


def outputs(*tensors: Tensor) -> InferResponse:
    return InferResponse("m", "1", "", list(tensors))


class ModelCall:
    """A request that was submitted, with a copy of its tensors."""

    def __init__(self, request: InferRequest, on_response: OnResponse) -> None:
        self.request = request
        self.contents = [bytes(tensor.data) for tensor in request.inputs]
        self.on_response = on_response


class CalledModels:
    """The models that processes call through `calls`. `react` is called with each call in the event loop.

    `react_to_cancel` is called with each call that is cancelled and listened to on (`cancelled_heard`).

    Model `decoupled` is decoupled, `nope` is unknown. Loads and unloads are recorded in `operations`; those of `nope` fail.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.is_open = False
        self.received: list[ModelCall] = []
        self.cancelled: list[ModelCall] = []
        self.cancelled_heard: list[ModelCall] = []
        self.released: list[PayloadRef] = []
        self.operations: list[tuple[Any, ...]] = []
        self.react: Callable[[ModelCall], None] = lambda call: None
        self.react_to_cancel: Callable[[ModelCall], None] = lambda call: None
        self.catalog = SimpleNamespace(resolve=self._resolve)
        self.readiness = SimpleNamespace(is_ready=self._is_ready)
        self.calls = self.run(self._made())

    async def _made(self) -> ProcessCallServer:
        return ProcessCallServer(self, SimpleNamespace(load=self._load, unload=self._unload))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _is_ready(self, name: str, version: str) -> bool:
        return name != "nope"

    async def open(self) -> None:
        self.is_open = True

    def submit(self, request: InferRequest, on_response: OnResponse) -> ModelCall:
        call = ModelCall(request, on_response)
        self.received.append(call)
        self.loop.call_soon(self.react, call)
        return call

    def cancel(self, call: ModelCall) -> None:
        self.cancelled.append(call)

    def cancel_and_listen(self, call: ModelCall) -> None:
        self.cancelled_heard.append(call)
        self.react_to_cancel(call)

    def release(self, ref: PayloadRef) -> None:
        self.released.append(ref)

    def _resolve(self, name: str, version: str) -> Any:
        if name == "nope":
            raise not_found("unknown")
        return SimpleNamespace(config=SimpleNamespace(is_decoupled=name == "decoupled"))

    async def _load(self, name: str, config: str | None, files: dict[str, bytes]) -> None:
        self._operated("load", name, config, files)

    async def _unload(self, name: str, with_dependents: bool) -> None:
        self._operated("unload", name, with_dependents)

    def _operated(self, *what: Any) -> None:
        self.operations.append(what)
        if what[1] == "nope":
            raise not_found("no such model")


def respond(call: ModelCall, *responses: InferResponse | WeirError | None) -> None:
    """Responds with `responses`, of which the last is final."""
    for place, given in enumerate(responses, 1):
        call.on_response(given, place == len(responses))


@pytest.fixture
def called() -> Iterator[CalledModels]:
    made = CalledModels()
    yield made
    made.close()

"""Models that answer calls as a test says, in place of the bus: `AskedModels` stands where `worker.inner_calls` does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from calls.pending import OnAnswer
from schemas.errors import WeirError, not_found
from schemas.requests import InferRequest, InferResponse
from schemas.tensors import PayloadRef, Tensor
from worker.backends.python_calls import PythonCalls


def outputs(*tensors: Tensor) -> InferResponse:
    return InferResponse("m", "1", "", list(tensors))


class Question:
    """A request that was submitted, its tensors copied."""

    def __init__(self, request: InferRequest, on_answer: OnAnswer) -> None:
        self.request = request
        self.contents = [bytes(tensor.data) for tensor in request.inputs]
        self.on_answer = on_answer


class AskedModels:
    """What asks it is `calls`. `react` is called with each question in the event loop; without it nobody answers.

    Model `decoupled` is decoupled, `nope` is unknown. Loads and unloads are kept in `operations`, those of `nope` fail.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.is_open = False
        self.questions: list[Question] = []
        self.abandoned: list[Question] = []
        self.released: list[PayloadRef] = []
        self.operations: list[tuple[Any, ...]] = []
        self.react: Callable[[Question], None] = lambda question: None
        self.catalog = SimpleNamespace(resolve=self._resolve)
        self.readiness = SimpleNamespace(is_ready=self._is_ready)
        self.calls = self.run(self._made())

    async def _made(self) -> PythonCalls:
        return PythonCalls(self, SimpleNamespace(load=self._load, unload=self._unload))

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

    def submit(self, request: InferRequest, on_answer: OnAnswer) -> Question:
        question = Question(request, on_answer)
        self.questions.append(question)
        self.loop.call_soon(self.react, question)
        return question

    def abandon(self, question: Question) -> None:
        self.abandoned.append(question)

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


def answer(question: Question, *answers: InferResponse | WeirError | None) -> None:
    """Gives these answers, the last of them as such."""
    for place, given in enumerate(answers, 1):
        question.on_answer(given, place == len(answers))


@pytest.fixture
def asked() -> Iterator[AskedModels]:
    made = AskedModels()
    yield made
    made.close()

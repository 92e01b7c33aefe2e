"""`Calls`: what a model asks of its worker and waits for: other models' answers, changes of the repository.

Any thread of the model, and any of its coroutines, may have calls under way. One thread, started with the first call,
takes what the worker answers to whoever waits. Large tensors of a request lie in memory shared with the worker until it
says that it has them; large tensors of a response are copied out of the memory of the worker that made them before
anybody sees them, so they are the model's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np
from _weir_channel import INLINE_LIMIT, Channel, Kind
from _weir_errors import TritonError, TritonModelException
from _weir_logger import log_exception
from _weir_memory import MemoryWriter
from _weir_response import InferenceResponse
from _weir_segments import Segments
from _weir_tensor import Tensor

OnResponse = Callable[[InferenceResponse, bool], None]
"""Told of a response and whether it is the last, in the thread that reads."""


class Calls:
    """See the module. `is_allowed` says that models may be asked: while the model can be executed. `controls_models` says
    that the repository may be changed: from `initialize` on.

    `current` are those of this process, once the stub has made them.
    """

    current: ClassVar[Calls | None] = None

    def __init__(self, channel: Channel, memory: MemoryWriter) -> None:
        self._channel = channel
        self._memory = memory
        self._segments = Segments()
        self._sending = threading.Lock()
        self._placing = threading.Lock()  # taken before the other one
        self._taken: SimpleQueue[None] = SimpleQueue()
        self._numbers = count(1)
        self._listeners: dict[int, OnResponse] = {}
        self._asked: dict[int, SimpleQueue[tuple[Kind, Any]]] = {}
        self._reader: threading.Thread | None = None
        self._is_lost = False
        self.is_allowed = False
        self.controls_models = False

    def start(self, facts: Sequence[Any], inputs: Sequence[Tensor], is_decoupled: bool, on_response: OnResponse) -> int:
        """Asks a model; the number of the call. `facts` are the request's but for its inputs, as they travel.

        Raises TritonModelException while models may not be asked, for what can't be sent, and without a worker.
        """
        if not self.is_allowed:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        contents = [tensor.content(INLINE_LIMIT) for tensor in inputs]
        number = next(self._numbers)
        self._listeners[number] = on_response
        try:
            if any(len(content) > INLINE_LIMIT for content in contents):
                self._send_large(number, is_decoupled, facts, inputs, contents)
            else:
                self._send(Kind.CALL, number, is_decoupled, (*facts, _packed(inputs, contents)))
        except BaseException:
            self._listeners.pop(number, None)
            raise
        return number

    def give_up(self, number: int) -> None:
        """Nobody waits for the call's responses any more, and what has not run yet need not run."""
        if self._listeners.pop(number, None) is not None and not self._is_lost:
            self._send(Kind.GIVE_UP, number)

    def ignore(self, number: int) -> None:
        """Nobody looks at the call's responses any more; it goes on all the same."""
        self._listeners.pop(number, None)

    def ask(self, kind: Kind, *arguments: Any) -> Any:
        """The worker's answer to a question that is no request. Raises TritonModelException with its refusal."""
        number = next(self._numbers)
        answers = self._asked[number] = SimpleQueue()
        try:
            self._send(kind, number, *arguments)
            answer, value = answers.get()
        finally:
            self._asked.pop(number, None)
        if answer == Kind.FAILED:
            raise TritonModelException(value)
        return value

    def tell(self, kind: Kind, *arguments: Any) -> None:
        """Tells the worker something that has no answer; nothing, once it is gone."""
        try:
            self._send(kind, *arguments)
        except TritonModelException:
            pass

    def _send_large(
        self,
        number: int,
        is_decoupled: bool,
        facts: Sequence[Any],
        inputs: Sequence[Tensor],
        contents: Sequence[bytes | np.ndarray],
    ) -> None:
        # One at a time: the worker has copied one request's tensors before another's take their place.
        with self._placing:
            self._memory.rewind()
            placed = [self._memory.place(content) if len(content) > INLINE_LIMIT else content for content in contents]
            self._send(Kind.CALL, number, is_decoupled, (*facts, _packed(inputs, placed)))
            self._taken.get()

    def _send(self, kind: Kind, *arguments: Any) -> None:
        with self._sending:
            if self._is_lost:
                raise TritonModelException("the worker is gone")
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="calls", daemon=True)
                self._reader.start()
            try:
                self._channel.send(kind, *arguments)
            except OSError as error:
                raise TritonModelException(f"the worker is gone: {error}") from error
            except (TypeError, ValueError, OverflowError) as error:
                raise TritonModelException(f"the request can't be sent: {error}") from error

    def _read(self) -> None:
        try:
            while True:
                kind, number, *arguments = self._channel.receive()
                if kind == Kind.TAKEN:
                    self._taken.put(None)
                elif kind == Kind.ANSWER:
                    self._answer(number, *arguments)
                elif (answers := self._asked.get(number)) is not None:
                    answers.put((kind, *arguments))
        except (EOFError, OSError):
            pass  # the worker has ended, and this process will
        except BaseException as error:  # noqa: BLE001  # whoever waits would wait for ever
            log_exception("what the worker answered can't be read", error)
        with self._sending:
            self._is_lost = True
        for answers in list(self._asked.values()):
            answers.put((Kind.FAILED, "the worker is gone"))
        lost = InferenceResponse(error=TritonError("the worker is gone", TritonError.UNAVAILABLE))
        for number in list(self._listeners):
            on_response = self._listeners.pop(number, None)
            if on_response is not None:
                on_response(lost, True)
        self._taken.put(None)

    def _answer(self, number: int, packed: tuple[Any, Any], is_final: bool) -> None:
        first, second = packed
        try:
            if isinstance(first, int):
                response = InferenceResponse(error=TritonError(second, first))
            else:
                response = self._response(first, second, number in self._listeners)
        except Exception as error:  # noqa: BLE001  # this call fails, the others go on
            log_exception("a response of another model can't be read", error)
            response = InferenceResponse(error=TritonError(f"the response can't be read: {error}"))
        on_response = self._listeners.pop(number, None) if is_final else self._listeners.get(number)
        if on_response is not None:
            on_response(response, is_final)

    def _response(self, rows: Sequence[Any], parameters: dict[str, Any] | None, is_wanted: bool) -> InferenceResponse:
        outputs: list[Tensor] = []
        read: list[tuple[str, int, int]] = []
        failure = None
        for name, datatype, shape, content in rows:
            if not isinstance(content, bytes):
                read.append(content[:3])
                try:
                    content = self._segments.copy(*content) if is_wanted else b""
                except (OSError, ValueError):
                    # Its worker has ended, or has waited for too long.
                    failure = TritonError("the response was lost before it could be read", TritonError.INTERNAL)
                    content = b""
            outputs.append(Tensor.received(name, datatype, shape, content))
        if read:
            self._send(Kind.RELEASE, read)
        return InferenceResponse(error=failure) if failure else InferenceResponse.received(outputs, parameters)


def _packed(tensors: Sequence[Tensor], contents: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [
        (tensor.name(), tensor.datatype(), tensor.shape(), content)
        for tensor, content in zip(tensors, contents, strict=True)
    ]


def current_calls() -> Calls:
    """The calls of this process. Raises TritonModelException outside of a server."""
    if Calls.current is None:
        raise TritonModelException("there is no server to ask")
    return Calls.current

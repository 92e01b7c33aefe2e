"""What a model asks of its worker: inference by other models, and changes of the model repository.

Any thread of the model, and any of its coroutines, may have calls open. One thread, started with the first call, passes
what the worker sends to those who wait for it. Large tensors of a request lie in memory shared with the worker until it
has copied them; large tensors of a response are copied out of the memory of the worker that made them before the model
gets them, so they belong to the model.
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
from _weir_shared_memory import Segments
from _weir_tensor import Tensor

MAX_UNREAD_BYTES = 256 * 1024 * 1024
"""Responses of one call that the model has not read yet; a call that exceeds this is cancelled."""

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Responses of one call that are kept for another iteration; if there are more, there is none."""

MAX_FILES_BYTES = 128 * 1024 * 1024
"""All files of one `load_model`."""


OnResponse = Callable[[InferenceResponse, bool], None]
"""Called with a response and whether it is final, in the thread that reads."""


class Calls:
    """The calls of this process.

    `is_allowed`: requests may be sent to other models, which holds while the model can be executed. `controls_models`: the
    repository may be changed, from `initialize` on. `current` is the one object of this process, which the stub creates.
    """

    current: ClassVar[Calls | None] = None

    def __init__(self, channel: Channel, memory: MemoryWriter) -> None:
        self._channel = channel
        self._memory = memory
        self._segments = Segments()
        self._sending = threading.Lock()
        self._placing = threading.Lock()  # acquired before `_sending`
        self._taken: SimpleQueue[None] = SimpleQueue()
        self._numbers = count(1)
        self._on_response: dict[int, OnResponse] = {}
        self._waiting: dict[int, SimpleQueue[tuple[Kind, Any]]] = {}
        self._reader: threading.Thread | None = None
        self._is_lost = False
        self.is_allowed = False
        self.controls_models = False

    def start(self, facts: Sequence[Any], inputs: Sequence[Tensor], is_decoupled: bool, on_response: OnResponse) -> int:
        """Sends a request to a model; returns the number of the call. `facts` is the packed request without its inputs.

        Raises TritonModelException while requests are not allowed, for values that can't be sent, and without a worker.
        """
        if not self.is_allowed:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        contents = [tensor.content(INLINE_LIMIT) for tensor in inputs]
        number = next(self._numbers)
        self._on_response[number] = on_response
        try:
            if any(len(content) > INLINE_LIMIT for content in contents):
                self._send_large(number, is_decoupled, facts, inputs, contents)
            else:
                self._send(Kind.CALL, number, is_decoupled, (*facts, _packed(inputs, contents)))
        except BaseException:
            self._on_response.pop(number, None)
            raise
        return number

    def cancel(self, number: int) -> None:
        """Cancels the call: its responses are dropped, and the model need not run it any more."""
        if self._on_response.pop(number, None) is not None and not self._is_lost:
            self._send(Kind.CANCEL_CALL, number, False)

    def cancel_and_listen(self, number: int) -> None:
        """Cancels the call, whose responses still arrive up to the final one. Does nothing once that has arrived."""
        if number in self._on_response and not self._is_lost:
            self._send(Kind.CANCEL_CALL, number, True)

    def ignore(self, number: int) -> None:
        """Drops the responses of the call, which continues."""
        self._on_response.pop(number, None)

    def ask(self, kind: Kind, *arguments: Any) -> Any:
        """The worker's reply to any other message. Raises TritonModelException with the reason of a failure."""
        number = next(self._numbers)
        replies: SimpleQueue[tuple[Kind, Any]] = SimpleQueue()
        self._waiting[number] = replies
        try:
            self._send(kind, number, *arguments)
            status, value = replies.get()
        finally:
            self._waiting.pop(number, None)
        if status == Kind.FAILED:
            raise TritonModelException(value)
        return value

    def notify(self, kind: Kind, *arguments: Any) -> None:
        """Sends the worker a message that has no reply; does nothing once the worker has ended."""
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
        # One at a time: the worker must have copied one request's tensors before the next overwrites them.
        with self._placing:
            self._memory.rewind()
            placed = [self._memory.place(content) if len(content) > INLINE_LIMIT else content for content in contents]
            self._send(Kind.CALL, number, is_decoupled, (*facts, _packed(inputs, placed)))
            self._taken.get()

    def _send(self, kind: Kind, *arguments: Any) -> None:
        with self._sending:
            if self._is_lost:
                raise TritonModelException("the worker has ended")
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="calls", daemon=True)
                self._reader.start()
            try:
                self._channel.send(kind, *arguments)
            except OSError as error:
                raise TritonModelException(f"the worker has ended: {error}") from error
            except (TypeError, ValueError, OverflowError) as error:
                raise TritonModelException(f"the request can't be sent: {error}") from error

    def _read(self) -> None:
        try:
            while True:
                kind, number, *arguments = self._channel.receive()
                if kind == Kind.TENSORS_COPIED:
                    self._taken.put(None)
                elif kind == Kind.CALL_RESPONSE:
                    self._receive(number, *arguments)
                elif (replies := self._waiting.get(number)) is not None:
                    replies.put((kind, *arguments))
        except (EOFError, OSError):
            pass  # the worker has ended, and this process will
        except BaseException as error:  # noqa: BLE001  # otherwise the waiting calls would never return
            log_exception("a message of the worker can't be read", error)
        with self._sending:
            self._is_lost = True
        for replies in list(self._waiting.values()):
            replies.put((Kind.FAILED, "the worker has ended"))
        lost = InferenceResponse(error=TritonError("the worker has ended", TritonError.UNAVAILABLE))
        for number in list(self._on_response):
            on_response = self._on_response.pop(number, None)
            if on_response is not None:
                on_response(lost, True)
        self._taken.put(None)

    def _receive(self, number: int, packed: tuple[Any, Any], is_final: bool) -> None:
        first, second = packed
        try:
            if isinstance(first, int):
                response = InferenceResponse(error=TritonError(second, first))
            else:
                response = self._response(first, second, number in self._on_response)
        except Exception as error:  # noqa: BLE001  # only this call fails
            log_exception("a response of another model can't be read", error)
            response = InferenceResponse(error=TritonError(f"the response can't be read: {error}"))
        on_response = self._on_response.pop(number, None) if is_final else self._on_response.get(number)
        if on_response is not None:
            on_response(response, is_final)

    def _response(self, rows: Sequence[Any], parameters: dict[str, Any] | None, is_needed: bool) -> InferenceResponse:
        outputs: list[Tensor] = []
        read: list[tuple[str, int, int]] = []
        failure = None
        for name, datatype, shape, content in rows:
            if not isinstance(content, bytes):
                read.append(content[:3])
                try:
                    content = self._segments.copy(*content) if is_needed else b""
                except (OSError, ValueError):
                    # The worker that holds it has ended, or has released it after its time limit.
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
        raise TritonModelException("this process runs outside of a server")
    return Calls.current


_FILE = "file:"


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Loads or reloads a model, and returns when it is ready; for servers in explicit mode.

    `config` is a configuration in JSON that replaces the one on disk. `files` replace the model's folder; each key is
    "file:" and the path in the folder. Raises TritonModelException with the server's reason.
    """
    _check_strings(
        "load_model", "(model_name: str, config: str = '', files: object = None) -> None", model_name, config
    )
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    contents: dict[str, bytes] = {}
    for name, content in (files or {}).items():
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise TypeError(f"files must be bytes by path, found {type(content)} by {type(name)}")
        if not name.startswith(_FILE):
            raise TritonModelException(
                f"Failed to load model: failed to load '{model_name}', the name of file '{name}' does not begin with "
                f"'{_FILE}'"
            )
        contents[name.removeprefix(_FILE)] = content
    size_bytes = sum(map(len, contents.values()))
    if size_bytes > MAX_FILES_BYTES:
        raise TritonModelException(
            f"Failed to load model: failed to load '{model_name}', files of {size_bytes} bytes are more than "
            f"{MAX_FILES_BYTES}"
        )
    _control("load model", Kind.LOAD, model_name, config or None, contents)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unloads a model, and returns when no version of it accepts requests; for servers in explicit mode.

    With `unload_dependents` this also unloads the models that were loaded only because this one needs them. Raises
    TritonModelException with the server's reason.
    """
    _check_strings("unload_model", "(model_name: str, unload_dependents: bool = False) -> None", model_name)
    _control("unload model", Kind.UNLOAD, model_name, bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a version of a model ("" for any) is ready. Raises TritonModelException for an invalid version."""
    _check_strings("is_model_ready", "(model_name: str, model_version: str = '') -> bool", model_name, model_version)
    return bool(_control("check model readiness", Kind.IS_MODEL_READY, model_name, model_version))


def _check_strings(function: str, signature: str, *texts: Any) -> None:
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(
            f"{function}(): incompatible function arguments. The following argument types are supported:\n"
            f"    1. {signature}\n\nInvoked with: {', '.join(map(repr, texts))}"
        )


def _control(what: str, kind: Kind, *arguments: Any) -> Any:
    calls = current_calls()
    if not calls.controls_models:
        raise TritonModelException(f"Failed to {what}: this is possible only in 'initialize' and 'execute'")
    try:
        return calls.ask(kind, *arguments)
    except TritonModelException as error:
        raise TritonModelException(f"Failed to {what}: {error}") from None

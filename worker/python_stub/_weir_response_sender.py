"""`InferenceResponseSender` of `triton_python_backend_utils`, and the way of its responses to the worker."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from _weir_channel import INLINE_LIMIT, Channel, Kind
from _weir_errors import TritonModelException
from _weir_memory import MemoryWriter
from _weir_response import InferenceResponse
from _weir_tensor import Tensor

FINAL = 1
"""`TRITONSERVER_RESPONSE_COMPLETE_FINAL`."""


class ResponsePacker:
    """Makes of responses what travels, large tensors in `memory`."""

    def __init__(self, memory: MemoryWriter) -> None:
        self._memory = memory

    def rewind(self) -> None:
        """What was packed before has been read."""
        self._memory.rewind()

    def packed(self, response: InferenceResponse, wanted: list[str]) -> tuple[Any, Any]:
        """(outputs, parameters), or (number of the error, text); only `wanted` outputs, all if that is empty."""
        error = response.error()
        if error is not None:
            return error.code(), error.message()
        outputs = [
            (tensor.name(), tensor.datatype(), tensor.shape(), self._content(tensor))
            for tensor in response.output_tensors()
            if not wanted or tensor.name() in wanted
        ]
        return outputs, response.packed_parameters()

    def _content(self, tensor: Tensor) -> bytes | tuple[int, int]:
        content = tensor.content(INLINE_LIMIT)
        return self._memory.place(content) if len(content) > INLINE_LIMIT else content


class ResponseChannel:
    """The channel on which a model's threads ask the worker, one at a time.

    `is_decoupled` says that a request may have any number of responses; else it has exactly one.
    """

    def __init__(self, channel: Channel, memory: MemoryWriter) -> None:
        self._channel = channel
        self._packer = ResponsePacker(memory)
        self._lock = threading.Lock()
        self._dropped: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._reports_drops = False
        self.is_decoupled = False

    def start_reporting_drops(self) -> None:
        """From now on a thread reports to the worker what `drop` is called with."""
        with self._lock:
            if self._reports_drops:
                return
            self._reports_drops = True
        threading.Thread(target=self._report_drops, name="dropped requests", daemon=True).start()

    def drop(self, place: tuple[int, int]) -> None:
        """The model has dropped the request at `place` without a final response: the worker ends it with an error.

        For finalizers, which run in any thread at any time, also while that thread holds the lock: this never blocks.
        """
        self._dropped.put(place)

    def _report_drops(self) -> None:
        while True:
            place = self._dropped.get()
            try:
                self.ask(Kind.DROPPED, *place)
            except TritonModelException:
                return  # the worker is gone, and this process will end

    def ask(self, kind: Kind, *arguments: Any) -> Any:
        """The worker's answer. Raises TritonModelException when it says that it can't, or is gone."""
        with self._lock:
            return self._ask(kind, *arguments)

    def send(self, sender: InferenceResponseSender, response: InferenceResponse | None, is_final: bool) -> None:
        """Sends what `sender` may send now; returns when the worker has taken it."""
        with self._lock:
            sender.check(response is not None)
            if response is not None:
                self._packer.rewind()
                packed = self._packer.packed(response, sender.wanted)
                self._ask(Kind.RESPONSE, *sender.place, packed, is_final or not self.is_decoupled)
            elif self.is_decoupled:  # else the one response was the last already
                self._ask(Kind.RESPONSE, *sender.place, None, True)
            sender.sent(response is not None, is_final)

    def _ask(self, kind: Kind, *arguments: Any) -> Any:
        try:
            self._channel.send(kind, *arguments)
            answer, value = self._channel.receive()
        except (EOFError, OSError) as error:
            raise TritonModelException(f"the worker is gone: {error}") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise TritonModelException(f"the response can't be sent: {error}") from error
        if answer == Kind.FAILED:
            raise TritonModelException(value)
        return value


class InferenceResponseSender:
    """Sends the responses of one request, during `execute` or after it, from any thread.

    Models get it from `InferenceRequest.get_response_sender`. `place` is where the worker finds the request, `wanted`
    are the outputs its caller asked for.
    """

    __slots__ = ("_channel", "_is_closed", "_responses", "place", "wanted")

    def __init__(self, channel: ResponseChannel, place: tuple[int, int], wanted: list[str]) -> None:
        self._channel = channel
        self.place = place
        self.wanted = wanted
        self._responses = 0
        self._is_closed = False

    def __del__(self) -> None:
        # Neither `execute` nor a thread of the model can answer the request any more.
        if not self.has_ended():
            self._channel.drop(self.place)

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends a response, or with TRITONSERVER_RESPONSE_COMPLETE_FINAL the last one, or that alone.

        Raises TritonModelException when neither is given, for unknown flags, after the last response, and in a model
        that is not decoupled for a second response or an end without one; TypeError for other types.
        """
        if not (response is None or isinstance(response, InferenceResponse)) or not isinstance(flags, int):
            raise TypeError(
                "send(): incompatible function arguments. The following argument types are supported:\n"
                "    1. (response: InferenceResponse = None, flags: int = 0) -> None\n\n"
                f"Invoked with: response={response!r}, flags={flags!r}"
            )
        if flags not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        self._channel.send(self, response, flags == FINAL)

    def is_cancelled(self) -> bool:
        """Whether the caller has given up; not told any more once the last response was sent."""
        return not self._is_closed and bool(self._channel.ask(Kind.IS_CANCELLED, *self.place))

    def returned(self) -> None:
        """`execute` returned the one response. Raises TritonModelException when it was sent before."""
        self.check(is_response=True)
        self.sent(is_response=True, is_final=True)

    def check(self, is_response: bool) -> None:
        """Raises TritonModelException when a response, or the end alone, may not be sent now."""
        if not self._channel.is_decoupled:
            if is_response and self._responses:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if not is_response and not self._responses and not self._is_closed:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
        if self._is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def sent(self, is_response: bool, is_final: bool) -> None:
        """A response was sent, or the end alone, or both."""
        self._responses += is_response
        self._is_closed = is_final

    def has_ended(self) -> bool:
        """Whether the last response was sent."""
        return self._is_closed or (self._responses > 0 and not self._channel.is_decoupled)

    def close(self) -> None:
        """The request is over."""
        self._is_closed = True

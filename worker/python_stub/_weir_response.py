"""`InferenceResponse` and `InferenceResponseSender` of `triton_python_backend_utils`, and the channel to the worker."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from _weir_channel import INLINE_LIMIT, Channel, Kind
from _weir_errors import TritonError, TritonModelException
from _weir_memory import MemoryWriter
from _weir_tensor import Tensor

Parameters = dict[str, Any]


class InferenceResponse:
    """A model's response to one request: output tensors, or an error, with which outputs are ignored.

    The client gets `parameters`, whose values are bool, int or str. Raises TypeError for arguments of other types,
    TritonModelException for parameters of other types and for None among the outputs.
    """

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        if not (
            isinstance(output_tensors, (list, Sequence))
            and all([isinstance(tensor, (Tensor, type(None))) for tensor in output_tensors])  # noqa: C419 - faster
            and (error is None or isinstance(error, TritonError))
        ):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
                "    1. InferenceResponse(output_tensors: List[Tensor] = [], error: TritonError = None, "
                f"parameters: object = None)\n\nInvoked with: {output_tensors!r}, {error!r}"
            )
        outputs = list(output_tensors)
        if None in outputs:
            raise TritonModelException("Output tensor for inference response should not be empty.")
        if parameters is not None:
            check_parameters(parameters)
        self._outputs = outputs
        self._error = error
        self._parameters = parameters

    @classmethod
    def received(cls, outputs: list[Tensor], parameters: Parameters | None) -> InferenceResponse:
        """A response of another model, whose parameters may also be floats."""
        response = cls(outputs)
        response._parameters = parameters
        return response

    def output_tensors(self) -> list[Tensor]:
        """The output tensors."""
        return self._outputs

    def has_error(self) -> bool:
        """Whether this response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, None if this response is not one."""
        return self._error

    def parameters(self) -> str:
        """The response parameters as JSON."""
        return json.dumps(self._parameters or {})

    def size_bytes(self) -> int:
        """Bytes of the outputs' content."""
        return sum(tensor.size_bytes() for tensor in self._outputs)

    def packed_parameters(self) -> Parameters | None:
        """The response parameters as they are sent."""
        return self._parameters


def check_parameters(parameters: Parameters | None) -> None:
    """Raises TritonModelException unless `parameters` maps str keys to bool, int (of 64 bits) or str values."""
    if parameters is not None and not isinstance(parameters, dict):
        raise TritonModelException(f"Expect parameters to have type dict, got {type(parameters)}")
    for key, value in (parameters or {}).items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise TritonModelException(f"Expect parameters values of type int to have 64 bits, found {value}")


FINAL = 1
"""`TRITONSERVER_RESPONSE_COMPLETE_FINAL`."""


class ResponsePacker:
    """Packs responses for the channel, with large tensors in `memory`."""

    def __init__(self, memory: MemoryWriter) -> None:
        self._memory = memory

    def rewind(self) -> None:
        """Reuses the memory of the responses packed before, which have been read."""
        self._memory.rewind()

    @property
    def used_bytes(self) -> int:
        """Bytes of the large tensors that were packed since the last `rewind`."""
        return self._memory.used_bytes

    def pack(self, response: InferenceResponse, wanted: list[str]) -> tuple[Any, Any]:
        """(outputs, parameters), or (error code, message). Only the `wanted` outputs, all of them if that is empty."""
        error = response.error()
        if error is not None:
            return error.code(), error.message()
        outputs: list[Any] = []
        for tensor in response.output_tensors():
            header = tensor.header()
            if not wanted or header[0] in wanted:
                outputs.append((*header, self._content(tensor)))
        return outputs, response.packed_parameters()

    def _content(self, tensor: Tensor) -> bytes | tuple[int, int]:
        content = tensor.content(INLINE_LIMIT)
        return self._memory.place(content) if len(content) > INLINE_LIMIT else content


class ResponseChannel:
    """The channel on which the model's threads send responses and queries, one at a time.

    `is_decoupled`: a request may have any number of responses; otherwise it has exactly one.
    """

    def __init__(self, channel: Channel, memory: MemoryWriter) -> None:
        self._channel = channel
        self._packer = ResponsePacker(memory)
        self._lock = threading.Lock()
        self._dropped: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._reports_drops = False
        self.is_decoupled = False

    def start_reporting_drops(self) -> None:
        """Starts a thread that reports the calls of `drop` to the worker, if there is none yet."""
        with self._lock:
            if self._reports_drops:
                return
            self._reports_drops = True
        threading.Thread(target=self._report_drops, name="dropped requests", daemon=True).start()

    def drop(self, place: tuple[int, int]) -> None:
        """Reports that the model has deleted the request at `place` without a final response, which fails it.

        This never blocks: finalizers call it, which may run in any thread, also while that thread holds the lock.
        """
        self._dropped.put(place)

    def _report_drops(self) -> None:
        while True:
            place = self._dropped.get()
            try:
                self.ask(Kind.DROPPED, *place)
            except TritonModelException:
                return  # the worker has ended, and so will this process

    def ask(self, kind: Kind, *arguments: Any) -> Any:
        """The worker's reply. Raises TritonModelException with the reason of a failure, or when the worker has ended."""
        with self._lock:
            return self._ask(kind, *arguments)

    def send(self, sender: InferenceResponseSender, response: InferenceResponse | None, is_final: bool) -> None:
        """Sends a response of `sender`, if it may send one now; returns when the worker has accepted it."""
        with self._lock:
            sender.check(response is not None)
            if response is not None:
                self._packer.rewind()
                packed = self._packer.pack(response, sender.wanted)
                self._ask(Kind.RESPONSE, *sender.place, packed, is_final or not self.is_decoupled)
            elif self.is_decoupled:  # otherwise the one response was final
                self._ask(Kind.RESPONSE, *sender.place, None, True)
            sender.sent(response is not None, is_final)

    def _ask(self, kind: Kind, *arguments: Any) -> Any:
        try:
            self._channel.send(kind, *arguments)
            status, value = self._channel.receive()
        except (EOFError, OSError) as error:
            raise TritonModelException(f"the worker has ended: {error}") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise TritonModelException(f"the response can't be sent: {error}") from error
        if status == Kind.FAILED:
            raise TritonModelException(value)
        return value


class InferenceResponseSender:
    """Sends the responses of one request, during `execute` or after it, from any thread.

    Models get it from `InferenceRequest.get_response_sender`. `place` is (number of the run, position of the request in
    it), `wanted` are the outputs that its client requested.
    """

    __slots__ = ("_channel", "_is_closed", "_responses", "place", "wanted")

    def __init__(self, channel: ResponseChannel, place: tuple[int, int], wanted: list[str]) -> None:
        self._channel = channel
        self.place = place
        self.wanted = wanted
        self._responses = 0
        self._is_closed = False

    def __del__(self) -> None:
        # Neither `execute` nor a thread of the model can respond to the request any more.
        if not self.has_ended():
            self._channel.drop(self.place)

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends a response, which TRITONSERVER_RESPONSE_COMPLETE_FINAL marks as final, or this mark without a response.

        Raises TritonModelException without both, for unknown flags, and after the final response. In a model that is not
        decoupled it also raises for a second response, and for a final mark before the response. Raises TypeError for
        arguments of other types.
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
        """Whether the client has cancelled the request; False once the final response was sent."""
        return not self._is_closed and bool(self._channel.ask(Kind.IS_CANCELLED, *self.place))

    def returned(self) -> None:
        """Records that `execute` returned the one response. Raises TritonModelException if it was sent before."""
        self.check(is_response=True)
        self.sent(is_response=True, is_final=True)

    def check(self, is_response: bool) -> None:
        """Raises TritonModelException if a response, or the final mark without one, may not be sent now."""
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
        """Records that a response, the final mark, or both were sent."""
        self._responses += is_response
        self._is_closed = is_final

    def has_ended(self) -> bool:
        """Whether the final response was sent."""
        return self._is_closed or (self._responses > 0 and not self._channel.is_decoupled)

    def close(self) -> None:
        """Ends the request: nothing can be sent any more."""
        self._is_closed = True

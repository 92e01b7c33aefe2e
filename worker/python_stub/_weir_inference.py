"""`InferenceRequest` of `triton_python_backend_utils`."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from queue import SimpleQueue
from typing import Any

from _weir_calls import OnResponse, current_calls
from _weir_channel import Kind
from _weir_errors import TritonModelException
from _weir_preferred_memory import PreferredMemory
from _weir_response import InferenceResponse, Parameters, check_parameters
from _weir_response_iterator import ResponseIterator
from _weir_response_sender import InferenceResponseSender, ResponseChannel
from _weir_tensor import Tensor
from _weir_trace import InferenceTrace

RELEASE_RESCHEDULE = 2
"""`TRITONSERVER_REQUEST_RELEASE_RESCHEDULE`."""


class InferenceRequest:
    """A request handed to a model's `execute`, or one that a model makes for another model.

    `requested_output_names` empty are all outputs, `model_version` -1 the latest, `timeout` microseconds. The responses'
    tensors lie in host memory whatever memory is preferred. Names and ids may be `bytes` too, as elements of BYTES tensors
    are. With `trace=request.trace()` the asked model's request
    continues the trace. Raises TypeError for arguments of other types, TritonModelException for a correlation id that is
    neither int nor str and for parameters that are not bool, int or str.
    """

    __slots__ = (
        "_channel",
        "_correlation_id",
        "_flags",
        "_id",
        "_inputs",
        "_outputs",
        "_parameters",
        "_place",
        "_release_flags",
        "_sender",
        "_timeout",
        "_trace",
        "model_name",
        "model_version",
    )

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        trace = InferenceTrace() if trace is None else trace
        request_id, model_name = _text(request_id), _text(model_name)
        if isinstance(requested_output_names, (Sequence, Set)):
            requested_output_names = [_text(name) for name in requested_output_names]
        if not (
            isinstance(request_id, str)
            and isinstance(inputs, Sequence)
            and all(tensor is None or isinstance(tensor, Tensor) for tensor in inputs)
            and isinstance(requested_output_names, list)
            and all(isinstance(name, str) for name in requested_output_names)
            and isinstance(model_name, str)
            and isinstance(model_version, int)
            and _is_number(flags, 32)
            and _is_number(timeout, 64)
            and (preferred_memory is None or isinstance(preferred_memory, PreferredMemory))
            and isinstance(trace, InferenceTrace)
        ):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
                "    1. InferenceRequest(request_id: str = '', correlation_id: object = 0, inputs: List[Tensor], "
                "requested_output_names: List[str], model_name: str, model_version: int = -1, flags: int = 0, "
                "timeout: int = 0, preferred_memory: PreferredMemory, trace: InferenceTrace, parameters: object = None)"
            )
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        if isinstance(correlation_id, int) and not _is_number(correlation_id, 64):
            raise TritonModelException("Correlation ID must be an integer of 64 bits without a sign, or a string")
        if None in inputs:
            raise TritonModelException(
                f"Input tensor for request with id '{request_id}' and model name '{model_name}' should not be empty."
            )
        check_parameters(parameters)
        self._id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._outputs = list(dict.fromkeys(requested_output_names))
        self._flags = flags
        self._timeout = timeout
        self._parameters = parameters or {}
        self._release_flags = 0
        self._channel: ResponseChannel | None = None
        self._sender: InferenceResponseSender | None = None
        self._trace = trace
        self.model_name = model_name
        self.model_version = model_version

    @classmethod
    def received(
        cls,
        request_id: str,
        correlation_id: int | str,
        flags: int,
        timeout: int,
        parameters: Parameters,
        trace: str,
        outputs: Sequence[str],
        inputs: list[Tensor],
        channel: ResponseChannel,
        place: tuple[int, int],
    ) -> InferenceRequest:
        """A request as it came from a client, already checked; at `place` the other end of `channel` knows it."""
        request = cls.__new__(cls)
        request._id = request_id
        request._correlation_id = correlation_id
        request._flags = flags
        request._timeout = timeout
        request._parameters = parameters
        request._trace = InferenceTrace(trace)
        request._outputs = list(outputs)
        request._inputs = inputs
        request._channel = channel
        request._place = place
        request._sender = None
        request._release_flags = 0
        return request

    def inputs(self) -> list[Tensor]:
        """The input tensors."""
        return self._inputs

    def requested_output_names(self) -> list[str]:
        """The outputs the caller wants: those it named, else all of the model's configuration."""
        return self._outputs

    def request_id(self) -> str:
        """The caller's own id, or ""."""
        return self._id

    def correlation_id(self) -> int | str:
        """The sequence the request belongs to; 0 for none."""
        return self._correlation_id

    def flags(self) -> int:
        """The `TRITONSERVER_REQUEST_FLAG_*` bits: start and end of a sequence."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Sets what `flags` returns."""
        self._flags = flags

    def timeout(self) -> int:
        """The caller's time limit in microseconds; 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """The caller's parameters as JSON."""
        return json.dumps(self._parameters)

    def is_cancelled(self) -> bool:
        """Whether the caller has given up; never for a request that the model made itself."""
        if self._sender is not None:
            return self._sender.is_cancelled()
        return self._channel is not None and bool(self._channel.ask(Kind.IS_CANCELLED, *self._place))

    def trace(self) -> InferenceTrace:
        """The trace the request belongs to; there is one also where it is not traced."""
        return self._trace

    def get_response_sender(self) -> InferenceResponseSender:
        """What sends this request's responses, always the same one.

        Raises TritonModelException for a request that the model made itself.
        """
        if self._channel is None:
            raise TritonModelException("a request made by a model has no response sender")
        if self._sender is None:
            self._channel.start_reporting_drops()
            self._sender = InferenceResponseSender(self._channel, self._place, self._outputs)
        return self._sender

    def __del__(self) -> None:
        # A decoupled model need not have taken the sender: without it nobody can answer the request any more.
        channel = getattr(self, "_channel", None)
        if channel is not None and channel.is_decoupled and self._sender is None:
            channel.drop(self._place)

    def has_sender(self) -> bool:
        """Whether somebody has the response sender, and may have used it."""
        return self._sender is not None

    def returned(self) -> None:
        """`execute` returned the response. Raises TritonModelException when that is one too many."""
        if self._sender is not None:
            self._sender.returned()

    def close(self) -> None:
        """The request is over: its response sender sends nothing any more."""
        if self._channel is not None:
            self.get_response_sender().close()

    def set_release_flags(self, flags: int) -> None:
        """With TRITONSERVER_REQUEST_RELEASE_RESCHEDULE the request runs again, if its model's sequences are iterative."""
        self._release_flags = flags

    def is_rescheduled(self) -> bool:
        """Whether the request is to run again: not one that has its last response."""
        return bool(self._release_flags & RELEASE_RESCHEDULE) and not (self._sender and self._sender.has_ended())

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Asks the model for a response and waits for it; with `decoupled` returns the iterator of its responses.

        What goes wrong with the request is told by a response that is an error. Raises TritonModelException outside of
        `execute`, from `initialize` and `finalize`, and for what can't be sent.
        """
        if decoupled:
            return self._started_iterator()
        answered: SimpleQueue[InferenceResponse] = SimpleQueue()
        self._start(False, lambda response, _is_final: answered.put(response))
        return answered.get()

    def async_exec(self, decoupled: bool = False) -> Any:
        """As `exec`, as an awaitable; cancelling it gives the request up. With `decoupled` it waits for the first response.

        To be called in a coroutine: raises RuntimeError where no event loop runs.
        """
        import asyncio  # a third of the start-up time, which few models need

        loop = asyncio.get_running_loop()
        if decoupled:
            return loop.create_task(self._started_iterator().begun())
        future = loop.create_future()

        def settle(response: InferenceResponse) -> None:
            if not future.done():
                future.set_result(response)

        def on_response(response: InferenceResponse, _is_final: bool) -> None:
            try:
                loop.call_soon_threadsafe(settle, response)
            except RuntimeError:
                pass  # the loop has ended, and nobody waits in it

        number = self._start(False, on_response)
        future.add_done_callback(lambda done: done.cancelled() and current_calls().give_up(number))
        return future

    def _started_iterator(self) -> ResponseIterator:
        responses = ResponseIterator()
        responses.started(self._start(True, responses.receiver()))
        return responses

    def _start(self, is_decoupled: bool, on_response: OnResponse) -> int:
        if self._channel is not None:
            raise TritonModelException("a request that was received can't be executed: make a new one of its inputs")
        facts = (
            self.model_name,
            self.model_version,
            self._id,
            self._correlation_id,
            self._flags,
            self._timeout,
            self._parameters,
            self._outputs,
            self._trace.get_context() or "",
        )
        return current_calls().start(facts, self._inputs, is_decoupled, on_response)


def _text(value: Any) -> Any:
    """`bytes` as text, where they are UTF-8; anything else as it is."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


def _is_number(value: Any, bits: int) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << bits

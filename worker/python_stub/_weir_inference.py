"""`InferenceRequest`, `InferenceTrace` and `PreferredMemory` of `triton_python_backend_utils`."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from queue import SimpleQueue
from typing import Any

from _weir_calls import OnResponse, current_calls
from _weir_channel import Kind
from _weir_errors import TritonModelException
from _weir_response import InferenceResponse, InferenceResponseSender, Parameters, ResponseChannel, check_parameters
from _weir_response_iterator import ResponseIterator
from _weir_tensor import Tensor


class InferenceTrace:
    """The trace of a request. `context` is JSON, "" where the request is not traced."""

    __slots__ = ("_context",)

    def __init__(self, context: str = "") -> None:
        self._context = context

    def get_context(self) -> str | None:
        """The trace context for spans of the model's own: JSON with W3C's `traceparent`, and `tracestate` if any.

        None unless traces are exported by OpenTelemetry and this request is traced.
        """
        return self._context or None


_NO_TRACE = InferenceTrace()

TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2


class PreferredMemory:
    """Where a model would like the responses of others to lie. Today they always lie in host memory."""

    __slots__ = ("_device_id", "_kind")

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        kinds = (TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU)
        if preferred_memory_type not in kinds or not isinstance(preferred_device_id, int):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
                "    1. PreferredMemory(preferred_memory_type: MemoryType, preferred_device_id: int = 0)"
            )
        self._kind = preferred_memory_type
        self._device_id = preferred_device_id


RELEASE_RESCHEDULE = 2
"""`TRITONSERVER_REQUEST_RELEASE_RESCHEDULE`."""


class InferenceRequest:
    """A request that a model's `execute` receives, or that a model creates for another model.

    An empty `requested_output_names` requests all outputs; `model_version` -1 is the latest; `timeout` is in microseconds.
    The tensors of responses lie in host memory whatever memory is preferred. Names and ids may also be `bytes`, as elements
    of BYTES tensors are. With `trace=request.trace()` the new request continues the trace. Raises TypeError for
    arguments of other types, TritonModelException for a correlation id that is neither int nor str and for parameters
    that are not bool, int or str.
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

    def __init__(  # noqa: PLR0913 - Triton's signature
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
        facts: Sequence[Any],
        outputs: Sequence[str],
        inputs: list[Tensor],
        channel: ResponseChannel,
        place: tuple[int, int],
    ) -> InferenceRequest:
        """A checked request of a client, of which `facts` are the other fields of its message.

        `place` is (number of the run, position of the request in it).
        """
        request = cls.__new__(cls)
        request._id, request._correlation_id, request._flags, request._timeout, request._parameters, trace = facts
        request._trace = InferenceTrace(trace) if trace else _NO_TRACE
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
        """The outputs that the client requested, by default all of the model's configuration."""
        return self._outputs

    def request_id(self) -> str:
        """The client's id of the request, or ""."""
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
        """The client's timeout in microseconds; 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """The client's parameters as JSON."""
        return json.dumps(self._parameters)

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the request; always False for one that the model created."""
        if self._sender is not None:
            return self._sender.is_cancelled()
        return self._channel is not None and bool(self._channel.ask(Kind.IS_CANCELLED, *self._place))

    def trace(self) -> InferenceTrace:
        """The trace of the request; an empty one where it is not traced."""
        return self._trace

    def get_response_sender(self) -> InferenceResponseSender:
        """The object that sends this request's responses, the same for every call.

        Raises TritonModelException for a request that the model created.
        """
        if self._channel is None:
            raise TritonModelException("a request made by a model has no response sender")
        if self._sender is None:
            self._channel.start_reporting_drops()
            self._sender = InferenceResponseSender(self._channel, self._place, self._outputs)
        return self._sender

    def __del__(self) -> None:
        # A decoupled model that never took the sender can't respond to the request any more.
        channel = getattr(self, "_channel", None)
        if channel is not None and channel.is_decoupled and self._sender is None:
            channel.drop(self._place)

    def has_sender(self) -> bool:
        """Whether the model has taken the response sender, and may have used it."""
        return self._sender is not None

    def returned(self) -> None:
        """Records that `execute` returned the response. Raises TritonModelException if another was sent before."""
        if self._sender is not None:
            self._sender.returned()

    def close(self) -> None:
        """Ends the request: its response sender can't send anything any more."""
        if self._channel is not None:
            self.get_response_sender().close()

    def set_release_flags(self, flags: int) -> None:
        """TRITONSERVER_REQUEST_RELEASE_RESCHEDULE runs the request again, if the model's sequences are iterative."""
        self._release_flags = flags

    def is_rescheduled(self) -> bool:
        """Whether the request is to run again; False for one that has its final response."""
        return bool(self._release_flags & RELEASE_RESCHEDULE) and not (self._sender and self._sender.has_ended())

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Sends the request to the model and waits for the response; with `decoupled` returns an iterator of responses.

        A request that fails has a response that is an error. Raises TritonModelException outside of `execute` (in
        `initialize` and `finalize`), and for values that can't be sent.
        """
        if decoupled:
            return self._started_iterator()
        responses: SimpleQueue[InferenceResponse] = SimpleQueue()
        self._start(False, lambda response, _is_final: responses.put(response))
        return responses.get()

    def async_exec(self, decoupled: bool = False) -> Any:
        """As `exec`, as an awaitable; cancelling it cancels the request. With `decoupled` it waits for the first response.

        Call it in a coroutine: it raises RuntimeError where no event loop runs.
        """
        import asyncio  # a third of the start-up time, which few models need

        loop = asyncio.get_running_loop()
        if decoupled:
            return loop.create_task(self._started_iterator().first_response())
        future = loop.create_future()

        def set_result(response: InferenceResponse) -> None:
            if not future.done():
                future.set_result(response)

        def on_response(response: InferenceResponse, _is_final: bool) -> None:
            try:
                loop.call_soon_threadsafe(set_result, response)
            except RuntimeError:
                pass  # the loop has ended, so nothing waits in it

        number = self._start(False, on_response)
        future.add_done_callback(lambda done: done.cancelled() and current_calls().cancel(number))
        return future

    def _started_iterator(self) -> ResponseIterator:
        responses = ResponseIterator()
        responses.started(self._start(True, responses.receiver()))
        return responses

    def _start(self, is_decoupled: bool, on_response: OnResponse) -> int:
        if self._channel is not None:
            raise TritonModelException("a received request can't be executed: create a new one from its inputs")
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
    """`bytes` in UTF-8 as a str; anything else unchanged."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


def _is_number(value: Any, bits: int) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << bits

"""`InferenceRequest` of `triton_python_backend_utils`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from _weir_channel import Kind
from _weir_errors import TritonModelException
from _weir_response import Parameters, check_parameters
from _weir_response_sender import InferenceResponseSender, ResponseChannel
from _weir_tensor import Tensor
from _weir_trace import InferenceTrace


class InferenceRequest:
    """A request handed to a model's `execute`, or one that a model makes for another model.

    Raises TritonModelException for a correlation id that is neither int nor str and for parameters that are not
    bool, int or str.
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
        preferred_memory: Any = None,
        trace: Any = None,
        parameters: Parameters | None = None,
    ) -> None:
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        check_parameters(parameters, (bool, int, str))
        self._id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._outputs = list(requested_output_names)
        self._flags = flags
        self._timeout = timeout
        self._parameters = parameters or {}
        self._channel: ResponseChannel | None = None
        self._sender: InferenceResponseSender | None = None
        self._trace = trace if isinstance(trace, InferenceTrace) else InferenceTrace()
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
            self._sender = InferenceResponseSender(self._channel, self._place, self._outputs)
        return self._sender

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

    def set_release_flags(self, flags: int) -> NoReturn:
        """Rescheduling is not supported yet."""
        _not_yet("request rescheduling is")

    def exec(self, decoupled: bool = False) -> NoReturn:
        """Calls to other models are not supported yet."""
        _not_yet("calls to other models are")

    def async_exec(self, decoupled: bool = False) -> NoReturn:
        """Calls to other models are not supported yet."""
        _not_yet("calls to other models are")


def _not_yet(what: str) -> NoReturn:
    raise TritonModelException(f"{what} not supported yet")

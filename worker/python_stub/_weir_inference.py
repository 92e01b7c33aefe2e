"""`InferenceRequest` and `InferenceResponse` of `triton_python_backend_utils`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from _weir_errors import TritonError, TritonModelException
from _weir_tensor import Tensor

Parameters = dict[str, Any]


class InferenceRequest:
    """A request handed to a model's `execute`, or one that a model makes for another model.

    Raises TritonModelException for a correlation id that is neither int nor str and for parameters that are not
    bool, int or str.
    """

    __slots__ = (
        "_correlation_id",
        "_flags",
        "_id",
        "_inputs",
        "_outputs",
        "_parameters",
        "_timeout",
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
        _check_parameters(parameters, (bool, int, str))
        self._id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._outputs = list(requested_output_names)
        self._flags = flags
        self._timeout = timeout
        self._parameters = parameters or {}
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
        outputs: Sequence[str],
        inputs: list[Tensor],
    ) -> InferenceRequest:
        """A request as it came from a client, already checked."""
        request = cls.__new__(cls)
        request._id = request_id
        request._correlation_id = correlation_id
        request._flags = flags
        request._timeout = timeout
        request._parameters = parameters
        request._outputs = list(outputs)
        request._inputs = inputs
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
        """Whether the caller has given up: not known here yet, so never."""
        return False

    def trace(self) -> NoReturn:
        """Traces are not supported yet."""
        _not_yet("request traces are")

    def get_response_sender(self) -> NoReturn:
        """Response senders are not supported yet."""
        _not_yet("response senders are")

    def set_release_flags(self, flags: int) -> NoReturn:
        """Rescheduling is not supported yet."""
        _not_yet("request rescheduling is")

    def exec(self, decoupled: bool = False) -> NoReturn:
        """Calls to other models are not supported yet."""
        _not_yet("calls to other models are")

    def async_exec(self, decoupled: bool = False) -> NoReturn:
        """Calls to other models are not supported yet."""
        _not_yet("calls to other models are")


class InferenceResponse:
    """A model's answer to one request: output tensors, or an error, beside which outputs are ignored.

    `parameters` are given to the client: bool, int, float or str values. Raises TritonModelException for other types.
    """

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] | None = None,
        error: TritonError | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        outputs = [] if output_tensors is None else list(output_tensors)
        for tensor in outputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"Expected an output tensor of type 'Tensor', found type '{type(tensor)}'.")
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(f"Expected an error of type 'TritonError', found type '{type(error)}'.")
        _check_parameters(parameters, (bool, int, float, str))
        self._outputs = outputs
        self._error = error
        self._parameters = parameters

    def output_tensors(self) -> list[Tensor]:
        """The output tensors."""
        return self._outputs

    def has_error(self) -> bool:
        """Whether this answer is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if this answer is one."""
        return self._error

    def parameters(self) -> str:
        """The response parameters as JSON."""
        return json.dumps(self._parameters or {})

    def packed_parameters(self) -> Parameters | None:
        """The response parameters as they travel."""
        return self._parameters


def _check_parameters(parameters: Parameters | None, types: tuple[type, ...]) -> None:
    for key, value in (parameters or {}).items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, types):
            names = "/".join(known.__name__ for known in types)
            raise TritonModelException(f"Expect parameters values to have type {names}, found type {type(value)}")


def _not_yet(what: str) -> NoReturn:
    raise TritonModelException(f"{what} not supported yet")

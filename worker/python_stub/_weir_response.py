"""`InferenceResponse` of `triton_python_backend_utils`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from _weir_errors import TritonError, TritonModelException
from _weir_tensor import Tensor

Parameters = dict[str, Any]


class InferenceResponse:
    """A model's answer to one request: output tensors, or an error, beside which outputs are ignored.

    `parameters` are given to the client: bool, int or str values. Raises TypeError for arguments of other types,
    TritonModelException for parameters of others and for None among the outputs.
    """

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] | None = None,
        error: TritonError | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        if not (
            isinstance(output_tensors, (Sequence, type(None)))
            and all(isinstance(tensor, (Tensor, type(None))) for tensor in output_tensors or ())
            and isinstance(error, (TritonError, type(None)))
        ):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
                "    1. InferenceResponse(output_tensors: List[Tensor] = [], error: TritonError = None, "
                f"parameters: object = None)\n\nInvoked with: {output_tensors!r}, {error!r}"
            )
        outputs = [] if output_tensors is None else list(output_tensors)
        if None in outputs:
            raise TritonModelException("Output tensor for inference response should not be empty.")
        check_parameters(parameters)
        self._outputs = outputs
        self._error = error
        self._parameters = parameters

    @classmethod
    def received(cls, outputs: list[Tensor], parameters: Parameters | None) -> InferenceResponse:
        """The response of another model as it came, whose parameters may be floats too."""
        response = cls(outputs)
        response._parameters = parameters
        return response

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

    def size_bytes(self) -> int:
        """Bytes of the outputs' content."""
        return sum(tensor.size_bytes() for tensor in self._outputs)

    def packed_parameters(self) -> Parameters | None:
        """The response parameters as they travel."""
        return self._parameters


def check_parameters(parameters: Parameters | None) -> None:
    """Raises TritonModelException for what is no dictionary of bool, int (of 64 bits) and str values by str keys."""
    if parameters is not None and not isinstance(parameters, dict):
        raise TritonModelException(f"Expect parameters to have type dict, got {type(parameters)}")
    for key, value in (parameters or {}).items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise TritonModelException(f"Expect parameters values of type int to have 64 bits, found {value}")

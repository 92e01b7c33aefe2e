"""KServe parameters as protobuf `InferParameter` maps: reserved ones, a caller's own ones, and those of responses.

Source of semantics: Triton's gRPC front end, which names the field each reserved parameter must be given in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from schemas.errors import invalid
from schemas.regions import FindRegion, place_parameters
from schemas.request_errors import long_correlation_id
from schemas.request_limits import RequestLimits
from schemas.requests import SEQUENCE_END, SEQUENCE_START, InferRequest, Parameters
from schemas.tensors import ClientRef

_EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"


def read_parameters(parameters: Mapping[str, Any], request: InferRequest, limits: RequestLimits) -> None:
    """Puts a message's parameters into `request`: reserved ones into its attributes, the others into `parameters`.

    Raises WeirError (INVALID_ARG) with Triton's messages for a parameter given in the wrong field and for reserved
    names, and for what exceeds `limits`.
    """
    if len(parameters) > limits.parameters:
        raise invalid(f"request holds more than {limits.parameters} parameters")
    own: Parameters = {}
    for name, parameter in parameters.items():
        read_reserved = _RESERVED.get(name)
        if read_reserved is not None:
            read_reserved(parameter, request)
        elif name.startswith("triton_"):
            raise invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {_EMPTY_FINAL_RESPONSE}"
            )
        else:
            own[name] = _own_value(name, parameter)
    request.parameters = own or None
    if isinstance(request.correlation_id, str) and len(request.correlation_id) > limits.correlation_id_length:
        raise long_correlation_id(limits)


def write_parameters(parameters: Parameters, target: Any) -> None:
    """Puts response parameters (str, bool, int of 64 bits, float) into `target`, a map of InferParameter."""
    for name, value in parameters.items():
        parameter = target[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            field = "int64_param" if value < 2**63 else "uint64_param"
            setattr(parameter, field, value)
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = value


def read_place(
    parameters: Mapping[str, Any], tensor: str, request: InferRequest, find_region: FindRegion
) -> tuple[ClientRef, Parameters] | None:
    """(the place in a client's shared memory that a tensor's parameters name, those parameters); None if they name none.

    `request` remembers the region. Raises WeirError: INVALID_ARG with Triton's messages for parameters that don't go
    together, else as `find_region`.
    """
    if "shared_memory_region" not in parameters:
        for name in ("shared_memory_offset", "shared_memory_byte_size"):
            if name in parameters:
                raise invalid(
                    f"'{name}' can not be specified without 'shared_memory_region' parameter for tensor '{tensor}'"
                )
        return None
    region_name = _expect_for(tensor, parameters, "shared_memory_region", "string_param")
    offset = 0
    if "shared_memory_offset" in parameters:
        offset = _expect_for(tensor, parameters, "shared_memory_offset", "int64_param")
    if "shared_memory_byte_size" not in parameters:
        raise invalid(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
            f"'{tensor}'"
        )
    size = _expect_for(tensor, parameters, "shared_memory_byte_size", "int64_param")
    # Both are unsigned: Triton takes a negative one for the same 64 bits.
    place = find_region(region_name, offset % 2**64, size % 2**64)
    request.regions += (region_name,)
    return place, place_parameters(region_name, offset, size)


def _expect_for(tensor: str, parameters: Mapping[str, Any], name: str, kind: str) -> Any:
    parameter = parameters[name]
    if parameter.WhichOneof("parameter_choice") != kind:
        raise invalid(f"invalid value type for '{name}' parameter for tensor '{tensor}', expected {kind}.")
    return getattr(parameter, kind)


def _expect(parameter: Any, name: str, *kinds: str) -> Any:
    """The value of the reserved parameter `name`, which must be given in one of the fields `kinds`."""
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in kinds:
        raise invalid(f"invalid value type for '{name}' parameter, expected {' or '.join(kinds)}.")
    return getattr(parameter, kind)


def _sequence_id(parameter: Any, request: InferRequest) -> None:
    value = _expect(parameter, "sequence_id", "int64_param", "string_param")
    # Correlation ids are unsigned: Triton takes a negative one for the same 64 bits.
    request.correlation_id = value % 2**64 if isinstance(value, int) else value or 0


def _sequence_start(parameter: Any, request: InferRequest) -> None:
    if _expect(parameter, "sequence_start", "bool_param"):
        request.sequence_flags |= SEQUENCE_START


def _sequence_end(parameter: Any, request: InferRequest) -> None:
    if _expect(parameter, "sequence_end", "bool_param"):
        request.sequence_flags |= SEQUENCE_END


def _priority(parameter: Any, request: InferRequest) -> None:
    request.priority = _expect(parameter, "priority", "int64_param", "uint64_param")
    if request.priority < 0:
        raise invalid("invalid value for 'priority', expected value >= 0.")


def _timeout(parameter: Any, request: InferRequest) -> None:
    # Triton takes a negative timeout for a huge unsigned one, which never overrides a smaller default: none at all.
    request.timeout_us = max(0, _expect(parameter, "timeout", "int64_param"))


def _empty_final_response(parameter: Any, request: InferRequest) -> None:
    request.wants_empty_final = _expect(parameter, _EMPTY_FINAL_RESPONSE, "bool_param")


_RESERVED: dict[str, Callable[[Any, InferRequest], None]] = {
    "sequence_id": _sequence_id,
    "sequence_start": _sequence_start,
    "sequence_end": _sequence_end,
    "priority": _priority,
    "timeout": _timeout,
    _EMPTY_FINAL_RESPONSE: _empty_final_response,
}


def _own_value(name: str, parameter: Any) -> str | int | bool | float:
    field = parameter.WhichOneof("parameter_choice")
    if field is None or field == "uint64_param":
        raise invalid(f"invalid value type for '{name}' parameter, expected int64_param, bool_param, or string_param.")
    value: str | int | bool | float = getattr(parameter, field)
    return value

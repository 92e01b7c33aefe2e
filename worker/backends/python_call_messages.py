"""Requests of Python models to other models, and the responses to them, as they travel between a process and its worker.

Texts of refusals are those of Triton's Python backend ("BLS").
"""

from __future__ import annotations

from typing import Any

from calls.catalog import Catalog
from schemas import request_errors
from schemas.datatypes import DATATYPES
from schemas.errors import ErrorCode, WeirError
from schemas.requests import InferRequest, InferResponse, RequestedOutput
from schemas.tensors import PayloadRef, Tensor
from telemetry.trace_context import context_of
from worker.python_stub._weir_memory import MemoryReader

_LATEST = -1
_SEQUENCE_FLAGS = 3


def unpack_request(row: tuple[Any, ...], memory: MemoryReader) -> tuple[InferRequest, bool]:
    """The request, and whether tensors of it lie in `memory`, where they stay as they are until it says so.

    Raises ValueError or TypeError for what no stub would send.
    """
    name, version, request_id, correlation_id, flags, timeout_us, parameters, outputs, trace, inputs = row
    texts = (name, request_id, trace, *outputs)
    if not all(type(text) is str for text in texts) or not all(type(n) is int for n in (version, flags, timeout_us)):
        raise TypeError("a request of other types")
    if type(correlation_id) not in (int, str) or not all(type(key) is str for key in parameters):
        raise TypeError("a request of other types")
    if not all(isinstance(value, (bool, int, str)) for value in parameters.values()):
        raise TypeError("parameters of other types")
    lies_in_memory = False
    tensors: list[Tensor] = []
    for tensor_name, datatype, shape, content in inputs:
        if type(tensor_name) is not str or datatype not in DATATYPES or not all(type(size) is int for size in shape):
            raise TypeError("a tensor of other types")
        if type(content) is not bytes:
            content = memory.view(*content)
            lies_in_memory = True
        tensors.append(Tensor(tensor_name, datatype, list(shape), content))
    request = InferRequest(
        name,
        "" if version == _LATEST else str(version),
        request_id,
        tensors,
        [RequestedOutput(output, binary=True) for output in outputs],
        parameters or None,
    )
    request.correlation_id = correlation_id % 2**64 if isinstance(correlation_id, int) else correlation_id
    request.sequence_flags = flags & _SEQUENCE_FLAGS
    request.timeout_us = max(0, timeout_us)
    request.traceparent, request.tracestate = context_of(trace)
    return request, lies_in_memory


def check_call(catalog: Catalog, request: InferRequest, is_decoupled: bool) -> None:
    """Raises WeirError for a model that is not ready, or is decoupled and was not asked as such; and for an input that is
    given twice, which is found here before the model is looked at.
    """
    name = request.model_name
    try:
        model = catalog.resolve(name, request.model_version)
    except WeirError as error:
        text = f"Failed for execute the inference request. Model '{name}' is not ready."
        raise WeirError(error.code, text) from error
    if model.config.is_decoupled and not is_decoupled:
        raise WeirError(
            ErrorCode.UNSUPPORTED,
            f"Model {name} is using the decoupled. The current BLS request call doesn't support models using the "
            "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
            "decoupled models.'",
        )
    names: set[str] = set()
    for tensor in request.inputs:
        if tensor.name in names:
            raise request_errors.refused(request.id, f"input '{tensor.name}' already exists in request")
        names.add(tensor.name)


def refused(model: str, error: WeirError) -> WeirError:
    """What a model is told of a request that was refused before it was put into the queue."""
    return WeirError(error.code, f"Model {model} - Error when running inference: {error.message}")


def pack_error(error: WeirError) -> tuple[int, str]:
    """An error as it travels."""
    return error.code.number, error.message


def pack_response(response: InferResponse | None) -> tuple[tuple[Any, Any], list[PayloadRef]]:
    """A response as it travels, and the references in it; None is the end of a stream, without outputs."""
    if response is None:
        return ((), None), []
    rows = [(tensor.name, tensor.datatype, tuple(tensor.shape), tensor.data) for tensor in response.outputs]
    return (rows, response.parameters), [row[3] for row in rows if isinstance(row[3], PayloadRef)]

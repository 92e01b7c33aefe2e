"""Generate requests: one flat JSON object instead of tensors, for models that take and make text.

A member with the name of an input becomes that input, any other a parameter of the request; the response is an object of
the response's outputs and parameters. Source: Triton's generate extension, texts compared with a running Triton 2.51.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import orjson

from weir.schemas.config.model_config import ModelConfig, ModelInput
from weir.schemas.core.errors import WeirError, internal, invalid
from weir.schemas.core.request_limits import DEFAULT_LIMITS, RequestLimits, invalid_request
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import BY_CONFIG_NAME, Reference, Tensor, element_count
from weir.schemas.kserve.json_documents import load_json, parameter_value, string
from weir.schemas.kserve.json_tensors import json_data, json_scalar, pack_json_data
from weir.schemas.kserve.request import check_json_size

_NESTED = "parameters"


def parse_generate_request(
    model_name: str,
    model_version: str,
    body: bytes | memoryview,
    config: ModelConfig,
    limits: RequestLimits = DEFAULT_LIMITS,
) -> InferRequest:
    """The request that `body` describes, for a model with this configuration.

    Parameters that are reserved elsewhere (`sequence_id`, `priority`, `timeout` ...) are plain ones here. Raises
    WeirError: INTERNAL for wrong JSON types, INVALID_ARG for the rest.
    """
    check_json_size(body, limits)
    document = load_json(body)
    if type(document) is not dict:
        raise internal("attempt to get members for non-object")
    request = InferRequest(model_name, model_version)
    if "id" in document:
        request.id = string(document["id"], "id")
        if len(request.id) > limits.id_length:
            raise invalid(f"request 'id' cannot be longer than {limits.id_length} characters")
    reader = _Reader(request, config, limits)
    _refuse_repeated_inputs(request.id, bytes(body), reader.inputs)
    for name, value in document.items():
        if name == _NESTED and name not in reader.inputs:
            reader.read_nested(value)
        else:
            reader.read(name, value)
    return request


def _refuse_repeated_inputs(id: str, body: bytes, inputs: Iterable[str]) -> None:
    """Refuses an object that names an input twice, of which `load_json` keeps the last one.

    Raises WeirError (INVALID_ARG) with the first name that comes again, as in Triton.
    """
    suspects = [name for name in inputs if body.count(orjson.dumps(name)) > 1]
    if not suspects:
        return
    try:
        members = json.loads(body, object_pairs_hook=list)
    except ValueError:
        return  # in a dialect that only `load_json` reads
    seen: set[str] = set()
    for name, _ in members:
        if name in suspects and name in seen:
            raise invalid_request(id, f"input '{name}' already exists in request")
        seen.add(name)


def build_generate_response(response: InferResponse) -> bytes:
    """The JSON object of one response: its members in the order of their names, as in Triton.

    Outputs are flat arrays, those of one element scalars. Raises WeirError for an output that can't travel as JSON, and
    TypeError for content that is still a reference. Content of megabytes takes long: see `weir.schemas.kserve.offloaded`.
    """
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    document.update(response.parameters or {})
    for tensor in response.outputs:
        if isinstance(tensor.data, Reference):
            raise TypeError(f"the content of output '{tensor.name}' has not been fetched")
        write = json_scalar if element_count(tensor.shape) == 1 else json_data
        document[tensor.name] = write(tensor.name, tensor.datatype, tensor.shape, tensor.data)
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)


class _Reader:
    """Puts members into `request`; `inputs` are those that the model declares, by name."""

    __slots__ = ("_batch", "_limits", "_names", "_request", "inputs")

    def __init__(self, request: InferRequest, config: ModelConfig, limits: RequestLimits) -> None:
        self._batch = [-1] if config.max_batch_size > 0 else []
        self._limits = limits
        self._names: set[str] = set()
        self._request = request
        self.inputs = {declared.name: declared for declared in config.input}

    def read(self, name: str, value: Any) -> None:
        declared = self.inputs.get(name)
        if declared is not None:
            self._read_input(declared, value)
        elif isinstance(value, (str, int, float)):
            parameters = self._request.parameters = self._request.parameters or {}
            parameters[name] = parameter_value(value)
            if len(parameters) > self._limits.parameters:
                raise invalid(f"request holds more than {self._limits.parameters} parameters")
        else:
            raise invalid(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")

    def read_nested(self, members: Any) -> None:
        keyword = f"keyword: '{_NESTED}'"
        if type(members) is not dict:
            raise internal(f"Expected JSON object for {keyword}: attempt to access JSON non-object as object")
        for name, value in members.items():
            try:
                self.read(name, value)
            except WeirError as error:
                raise WeirError(error.code, f"Converting {keyword}: {error.message}") from None

    def _read_input(self, declared: ModelInput, value: Any) -> None:
        name = declared.name
        elements = value if type(value) is list else [value]
        shape = filled_shape(declared.name, [*self._batch, *declared.dims], len(elements))
        data = pack_json_data(name, BY_CONFIG_NAME[declared.data_type].name, elements, len(elements))
        if name in self._names:
            raise invalid_request(self._request.id, f"input '{name}' already exists in request")
        self._names.add(name)
        self._request.inputs.append(Tensor(name, BY_CONFIG_NAME[declared.data_type].name, shape, data))


def filled_shape(name: str, dims: list[int], count: int) -> list[int]:
    """The shape that `count` elements have in a tensor of `dims`: the innermost variable dimension takes what is left.

    Raises WeirError (INVALID_ARG) where they fill none.
    """
    shape = dims[::-1]
    for dim in shape:
        if dim != -1:
            if dim == 0 or count % dim:
                raise _no_shape(name)
            count //= dim
    for position, dim in enumerate(shape):
        if dim == -1:
            shape[position], count = count, 1
    if count != 1:
        raise _no_shape(name)
    return shape[::-1]


def _no_shape(name: str) -> WeirError:
    return invalid(f"The schema can not convert input '{name}' to tensor with proper shape")

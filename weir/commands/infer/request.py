"""`make_request`: the request that `weir infer` sends, from the model's configuration, the options, or a file.

Inputs that are not given are those of `weir.schemas.kserve.sample_inputs`, as in `weir init` and in the console.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weir.errors import StartError
from weir.options import UsageError
from weir.schemas.config.model_config import ModelConfig, ModelInput
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import BY_CONFIG_NAME, Tensor, element_count
from weir.schemas.kserve.generate import filled_shape
from weir.schemas.kserve.json_tensors import pack_json_data
from weir.schemas.kserve.request import parse_infer_request
from weir.schemas.kserve.sample_inputs import declared_inputs, sample_tensors


def sample_request(config: ModelConfig, given: Sequence[str]) -> InferRequest:
    """A request with the inputs in `given` ("NAME=VALUE"), and made-up ones for the rest of those that a request must have.

    Raises UsageError for an input that does not fit the model, StartError where no inputs can be made up.
    """
    declared = {one.name: one for one in config.input}
    tensors = dict[str, Tensor]()
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or name not in declared:
            known = ", ".join(declared)
            raise UsageError(f"--input takes NAME=VALUE with one of the model's inputs ({known}), not {text!r}")
        if name in tensors:
            raise UsageError(f"--input {name} is given twice")
        tensors[name] = _tensor(config, declared[name], value)
    rest = [one for one in declared_inputs(config) if one.name not in tensors]
    batch_size = next((tensor.shape[0] for tensor in tensors.values() if config.max_batch_size > 0), 1)
    try:
        tensors |= {tensor.name: tensor for tensor in sample_tensors(rest, batch_size)}
    except WeirError as error:
        raise StartError(f"{error.message}; give the input with --input or --data") from error
    return InferRequest(config.name, inputs=[tensors[name] for name in declared if name in tensors])


def read_request(config: ModelConfig, file: str) -> tuple[InferRequest, bytes]:
    """The KServe request in `file` ("-": on stdin), and its text. Raises StartError if it is not one."""
    place = "stdin" if file == "-" else file
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return parse_infer_request(config.name, "", text, None), text
    except OSError as error:
        raise StartError(f"{place} can't be read: {error.strerror}") from error
    except WeirError as error:
        raise StartError(f"{place} is not a KServe request in JSON: {error.message}") from error


def generate_document(request: InferRequest) -> dict[str, Any]:
    """The request as the generate extension takes it: its inputs as members, without their shapes. Raises StartError."""
    document: dict[str, Any] = dict(request.parameters or {})
    for tensor in request.inputs:
        if tensor.datatype in ("FP16", "BF16"):
            raise StartError(f"input '{tensor.name}' is {tensor.datatype}, which a stream of responses can't carry")
        values = tensor.to_numpy().ravel().tolist()
        document[tensor.name] = [one.decode(errors="replace") if isinstance(one, bytes) else one for one in values]
    return document


def _tensor(config: ModelConfig, declared: ModelInput, text: str) -> Tensor:
    datatype = BY_CONFIG_NAME[declared.data_type].name
    batch = [-1] if config.max_batch_size > 0 else []
    value = _value(declared.name, datatype, text)
    try:
        shape = _shape(declared, batch, value)
        data = pack_json_data(declared.name, datatype, value, element_count(shape))
        return Tensor(declared.name, datatype, shape, data)
    except (WeirError, ValueError) as error:
        reason = error.message if isinstance(error, WeirError) else "its lists are of different lengths"
        raise UsageError(
            f"--input {declared.name}: {reason}. It is {datatype} with the shape {[*batch, *declared.dims]}"
        ) from error


def _value(name: str, datatype: str, text: str) -> list[Any]:
    """The list that the text of an option means: text that is no list is one string. Raises UsageError."""
    is_text = datatype == "BYTES"
    for attempt in (text,) if is_text else (text, f"[{text}]"):
        try:
            value = json.loads(attempt)
        except ValueError:
            continue
        if isinstance(value, list):
            return value
        if not is_text:
            return [value]
    if is_text:
        return [text]
    raise UsageError(f"--input {name}: {text!r} is not JSON: write a number, [1,2] or [[1,2],[3,4]]")


def _shape(declared: ModelInput, batch: list[int], value: list[Any]) -> list[int]:
    """The shape that nested lists have, with a batch of one where they leave it out; of a flat list what fits the model."""
    shape = list(np.array(value, np.object_).shape)
    dims = [*batch, *declared.dims]
    for full in (shape, [1, *shape] if batch and len(shape) > 1 else []):
        if len(full) == len(dims) and all(dim in (-1, size) for dim, size in zip(dims, full, strict=True)):
            return full
    return filled_shape(declared.name, dims, len(np.array(value, np.object_).ravel()))

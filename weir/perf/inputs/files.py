"""`read_requests`: the requests of a load test from a file.

The file is either one KServe request in JSON, which is sent as it is, or data for perf_analyzer: an object whose `data` is
a list of rows, or a list of lists of rows. A row has a value for each input: a list of values, `{"content": [...], "shape":
[...]}`, or `{"b64": "..."}` with the content as bytes. Rows have no batch dimension: as many rows as the batch size become
one request, beginning again at the first row.
Source: perf_analyzer's documentation of its input data.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from weir.perf.inputs.generated import InputOptions, check_options
from weir.perf.inputs.model import InputError
from weir.schemas.config.model_config import ModelConfig, ModelInput
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import BY_CONFIG_NAME, Tensor, element_count, pack_bytes
from weir.schemas.kserve.json_tensors import pack_json_data
from weir.schemas.kserve.request import parse_infer_request

MAX_FILE_BYTES = 256 << 20
"""Larger files are rejected: all requests are kept in memory."""

MAX_ROWS = 100_000

_Row = dict[str, tuple[list[int], bytes]]
"""(shape, content) of each input of one row."""


def read_requests(path: Path, model: ModelConfig, options: InputOptions) -> list[InferRequest]:
    """The requests in the file. Raises InputError if it can't be read, or is of neither form."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes; at most {MAX_FILE_BYTES} are read")
        text = path.read_bytes()
        document = orjson.loads(text)
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    try:
        if isinstance(document, dict) and "inputs" in document:
            return [parse_infer_request(model.name, "", text, None)]
        if isinstance(document, dict) and isinstance(document.get("data"), list):
            return _batches(model, _rows(document["data"], model, options), options)
    except WeirError as error:
        raise InputError(f"{path}: {error.message}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    raise InputError(f"{path} has neither 'inputs', as a KServe request has, nor a list 'data', as perf_analyzer reads")


def _rows(data: list[Any], model: ModelConfig, options: InputOptions) -> list[_Row]:
    check_options(model, options)
    found = list(itertools.chain.from_iterable(entry if isinstance(entry, list) else [entry] for entry in data))
    if not found or len(found) > MAX_ROWS:
        raise InputError(f"'data' has {len(found)} rows; 1 to {MAX_ROWS} are read")
    declared = {one.name: one for one in model.input}
    rows: list[_Row] = []
    for number, entry in enumerate(found):
        if not isinstance(entry, dict):
            raise InputError(f"row {number} of 'data' is not an object")
        unknown = entry.keys() - declared.keys()
        if unknown:
            raise InputError(f"row {number} of 'data' has '{min(unknown)}', which is not an input of '{model.name}'")
        rows.append({name: _tensor(declared[name], value, options) for name, value in entry.items()})
    return rows


def _tensor(declared: ModelInput, value: Any, options: InputOptions) -> tuple[list[int], bytes]:
    datatype = BY_CONFIG_NAME[declared.data_type]
    shape: Any = None
    content: bytes | list[Any]
    if isinstance(value, Mapping):
        shape = value.get("shape")
        value = value.get("content", value)
    if isinstance(value, Mapping):
        content = _decoded(declared.name, value.get("b64"))
        count = len(content) // datatype.size_bytes if datatype.size_bytes else 1
        content = content if datatype.size_bytes else pack_bytes([content])
    else:
        content = value if isinstance(value, list) else [value]
        count = _count(content)
    if shape is None:
        shape = list(options.shapes.get(declared.name, declared.dims))
    if not isinstance(shape, list) or not all(isinstance(dim, int) for dim in shape):
        raise InputError(f"the shape of '{declared.name}' must be a list of integers, not {shape!r}")
    if shape.count(-1) == 1:
        others = element_count(dim for dim in shape if dim != -1)
        shape = [count // others if dim == -1 and others else dim for dim in shape]
    if min(shape, default=0) < 0 or element_count(shape) != count:
        raise InputError(f"'{declared.name}' has {count} values, which do not fill the shape {shape}")
    if isinstance(content, list):
        content = pack_json_data(declared.name, datatype.name, content, count)
    return shape, content


def _count(values: list[Any]) -> int:
    return sum(_count(value) if isinstance(value, list) else 1 for value in values)


def _decoded(name: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, binascii.Error) as error:
        raise InputError(f"'{name}' must have a 'content' or a 'b64' in base64: {error}") from error


def _batches(model: ModelConfig, rows: list[_Row], options: InputOptions) -> list[InferRequest]:
    """One request for each row, of that row and those after it."""
    size = options.batch_size
    requests: list[InferRequest] = []
    for first in range(0, len(rows), size):
        batch = [rows[(first + offset) % len(rows)] for offset in range(size)]
        requests.append(InferRequest(model.name, inputs=[_joined(model, name, batch) for name in batch[0]]))
    return requests


def _joined(model: ModelConfig, name: str, batch: list[_Row]) -> Tensor:
    declared = next(one for one in model.input if one.name == name)
    shapes = {tuple(row[name][0]) if name in row else () for row in batch}
    if len(shapes) > 1:
        raise InputError(f"rows of one batch have different shapes of '{name}': {sorted(map(list, shapes))}")
    has_batch = model.max_batch_size > 0 and not declared.is_shape_tensor
    shape = [len(batch), *batch[0][name][0]] if has_batch else batch[0][name][0]
    content = b"".join(row[name][1] for row in batch) if has_batch else batch[0][name][1]
    return Tensor(name, BY_CONFIG_NAME[declared.data_type].name, shape, content)

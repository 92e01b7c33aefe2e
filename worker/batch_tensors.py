"""Between requests and the arrays a model runs on: the rows of a batch put together, and taken apart again.

Copies: a request alone in its batch is not copied; rows of several requests are copied once, into the batch, unless they
lie there side by side already.

An input that may be ragged has no rows that could be put together: the model gets the elements of all requests in one
dimension, as from Triton's backends, and learns from batch inputs (`worker.batch_inputs`) whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bus.payloads import PayloadReader, StalePayload
from schemas.datatypes import DATATYPES
from schemas.errors import internal, unavailable
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from schemas.tensors import CudaRegionRef, PayloadRef, RegionRef, Tensor, as_array, element_count
from worker.client_memory import side_by_side

_REUSE_FROM_BYTES = 256 * 1024

Split = Callable[[Sequence[InferRequest], str, str, np.ndarray], list[Tensor]]
"""Takes the requests of a batch, an output's name and datatype, and its array; returns each request's share."""

_NONE_SPLIT: Mapping[str, Split] = {}


def ragged_inputs(config: ModelConfig) -> frozenset[str]:
    """The inputs whose shapes may differ between the requests of one batch."""
    return frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)


class InputPieces(NamedTuple):
    """An input of a batch that is still to be put together: `contents`, one behind the other, are `size_bytes` long."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    contents: Sequence[bytes | memoryview]
    size_bytes: int

    def write_into(self, target: np.ndarray) -> None:
        """Puts it together at the start of `target`, an array of bytes, in one copy."""
        start = 0
        for content in self.contents:
            end = start + len(content)
            # By numpy, which lets other threads go on meanwhile.
            target[start:end] = np.frombuffer(content, np.uint8)
            start = end


class BatchAssembler:
    """Puts the inputs of a batch together; keeps a buffer for large batches, whose pages would be costly to get anew.

    The inputs named in `ragged` are given in one dimension. Arrays it returns are valid until the next call.
    """

    def __init__(self, ragged: Collection[str] = ()) -> None:
        self._ragged = ragged
        self._buffers: dict[str, bytearray] = {}

    def assemble(
        self, requests: Sequence[InferRequest], batching: bool, reader: PayloadReader
    ) -> dict[str, np.ndarray]:
        """The input arrays of the batch by name, rows in the order of the requests.

        `batching`: the model has a batch dimension, along which the requests' tensors are joined; without it there is
        exactly one request. Raises WeirError for inputs that can't be joined or have gone.
        """
        first = requests[0]
        if len(requests) == 1:
            arrays = {tensor.name: _aligned(_array(tensor, reader)) for tensor in first.inputs}
            for name in self._ragged:
                if name in arrays:
                    arrays[name] = arrays[name].reshape(-1)
            return arrays
        return {name: self._join(name, rows, reader) for name, rows in _rows_of(requests, batching)}

    def pieces(
        self, requests: Sequence[InferRequest], batching: bool, reader: PayloadReader, on_host: Collection[str]
    ) -> tuple[list[InputPieces], dict[str, np.ndarray]]:
        """As `assemble`, for a device: what is to be copied there, and arrays for strings and the inputs in `on_host`.

        The arrays are nobody else's, and stay as they are.
        """
        pieces: list[InputPieces] = []
        arrays: dict[str, np.ndarray] = {}
        for name, rows in _rows_of(requests, batching):
            datatype = rows[0].datatype
            ragged = name in self._ragged
            if datatype == "BYTES":
                strings = [_array(row, reader) for row in rows]
                array = strings[0] if len(strings) == 1 else np.concatenate(strings, axis=None if ragged else 0)
                arrays[name] = array.reshape(-1) if ragged else array
                continue
            contents = [_content(row, reader) for row in rows]
            size = sum(map(len, contents))
            shape = tuple(rows[0].shape)
            if ragged:
                shape = (size // DATATYPES[datatype].size_bytes,)
            elif len(rows) > 1:
                shape = (sum(row.shape[0] for row in rows), *shape[1:])
            if element_count(shape) * DATATYPES[datatype].size_bytes != size:
                raise internal(f"the content of input '{name}' does not fill its shape")
            if name in on_host:
                arrays[name] = np.frombuffer(b"".join(contents), DATATYPES[datatype].numpy).reshape(shape)
            else:
                pieces.append(InputPieces(name, datatype, shape, contents, size))
        return pieces, arrays

    def _join(self, name: str, rows: list[Tensor], reader: PayloadReader) -> np.ndarray:
        datatype = rows[0].datatype
        ragged = name in self._ragged
        shape = [-1] if ragged else [sum(row.shape[0] for row in rows), *rows[0].shape[1:]]
        if datatype == "BYTES":
            return np.concatenate([_array(row, reader) for row in rows], axis=None if ragged else 0)
        contents = [_content(row, reader) for row in rows]
        size = sum(map(len, contents))
        together = side_by_side(contents)
        if together is not None:
            return np.frombuffer(together, DATATYPES[datatype].numpy).reshape(shape)
        if size < _REUSE_FROM_BYTES:
            joined: bytes | memoryview = b"".join(contents)
        else:
            buffer = self._buffers.get(name)
            if buffer is None or len(buffer) < size:
                buffer = self._buffers[name] = bytearray(size)
            joined = memoryview(buffer)[:size]
            position = 0
            for content in contents:
                joined[position : position + len(content)] = content
                position += len(content)
        return np.frombuffer(joined, DATATYPES[datatype].numpy).reshape(shape)


def _rows_of(requests: Sequence[InferRequest], batching: bool) -> Iterator[tuple[str, list[Tensor]]]:
    """Each input's name and its tensors in all requests."""
    if len(requests) > 1 and not batching:
        raise internal("a model without a batch dimension was given several requests at once")
    for position, tensor in enumerate(requests[0].inputs):
        name = tensor.name
        rows = [request.inputs[position] for request in requests]
        if any(row.name != name for row in rows):
            rows = [input_named(request, name) for request in requests]
        yield name, rows


def batch_sizes(requests: Sequence[InferRequest], batching: bool) -> list[int]:
    """The rows of each request; 1 each for a model without a batch dimension."""
    if not batching:
        return [1] * len(requests)
    return [request.inputs[0].shape[0] if request.inputs else 1 for request in requests]


def split_outputs(
    requests: Sequence[InferRequest],
    outputs: Sequence[tuple[str, str, np.ndarray]],
    batching: bool,
    scattered: Mapping[str, Split] = _NONE_SPLIT,
    wanted_only: bool = True,
) -> list[list[Tensor]]:
    """Each request's rows of the output arrays `(name, datatype, array)`, as views; `wanted_only` those it asked for.

    Outputs in `scattered` have no rows and are split as it says. Raises WeirError when an output has another number of
    rows than the batch.
    """
    sizes = batch_sizes(requests, batching)
    results: list[list[Tensor]] = [[] for _ in requests]
    for name, datatype, array in outputs:
        if name in scattered:
            parts = scattered[name](requests, name, datatype, array)
        elif not batching:
            parts = [Tensor.from_numpy(name, array, datatype)]
        else:
            parts = _rows(name, datatype, array, sizes)
        for request, result, part in zip(requests, results, parts, strict=True):
            if not wanted_only or not request.outputs or any(output.name == name for output in request.outputs):
                result.append(part)
    return results


def _rows(name: str, datatype: str, array: np.ndarray, sizes: Sequence[int]) -> list[Tensor]:
    total = sum(sizes)
    shape = array.shape
    if not shape or shape[0] != total:
        raise internal(f"output '{name}' has {shape[0] if shape else 0} rows for a batch of {total}")
    if len(sizes) == 1:
        return [Tensor.from_numpy(name, array, datatype)]
    rest = shape[1:]
    parts: list[Tensor] = []
    start = 0
    if datatype == "BYTES":
        for size in sizes:
            parts.append(Tensor.from_numpy(name, array[start : start + size], datatype))
            start += size
        return parts
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    row_bytes = len(content) // total if total else 0
    for size in sizes:
        end = start + size * row_bytes
        parts.append(Tensor(name, datatype, (size, *rest), content[start:end]))
        start = end
    return parts


def has_gone(request: InferRequest, reader: PayloadReader) -> bool:
    """Whether content of the request that lies in shared memory was given up: its caller has gone."""
    for tensor in request.inputs:
        if isinstance(tensor.data, PayloadRef):
            try:
                reader.view(tensor.data)
            except (StalePayload, ValueError):
                return True
    return False


def input_named(request: InferRequest, name: str) -> Tensor:
    """The request's input of that name. Raises WeirError (INTERNAL) when it has none."""
    for tensor in request.inputs:
        if tensor.name == name:
            return tensor
    raise internal(f"input '{name}' is missing from a request of the batch")


def _content(tensor: Tensor, reader: PayloadReader) -> bytes | memoryview:
    data = tensor.data
    if isinstance(data, (RegionRef, CudaRegionRef)):
        raise internal(f"the content of input '{tensor.name}' has not been fetched")
    if isinstance(data, PayloadRef):
        # Not checked again: a request that is given up from now on spoils its own rows, which nobody waits for, and
        # must not fail the others of its batch.
        try:
            return reader.view_unchecked(data)
        except (StalePayload, ValueError) as error:
            raise unavailable(f"the content of input '{tensor.name}' has gone") from error
    return data


def _array(tensor: Tensor, reader: PayloadReader) -> np.ndarray:
    try:
        return as_array(_content(tensor, reader), tensor.datatype, tensor.shape)
    except ValueError as error:
        raise internal(f"the content of input '{tensor.name}' does not fill its shape") from error


def _aligned(array: np.ndarray) -> np.ndarray:
    return array if array.flags.aligned else array.copy()

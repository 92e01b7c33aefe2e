"""Joins the inputs of a batch's requests into arrays, and splits output arrays into the requests' rows.

The content of a single request is not copied. Rows of several requests are copied once, unless they are contiguous already.

A ragged input (`allow_ragged_batch`) has no common row shape: as from Triton's backends, the model gets the elements of all
requests in one dimension, and *batch inputs* that say which belong to which request (`batch_input` in Triton's model
configuration). A batch input is computed from the shapes that a source input has in the requests. As in Triton, shapes
include the batch dimension.

Most outputs have a row for each row of the batch. An output in `batch_output` of the configuration (of which there is one
kind, BATCH_SCATTER_WITH_INPUT_SHAPE) has no rows: each request's share has the output's configured shape, with the variable
dimensions that its source input has in the request, and the shares follow each other.

With `reshape` in the configuration, clients see a tensor's `dims` and the model sees `reshape.shape`. Both have the same
element count; variable dimensions (-1) correspond in order. The batch dimension belongs to neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weir.bus.payloads.arena import PayloadReader, StalePayload
from weir.bus.payloads.client_regions import RegionError
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import internal, invalid, unavailable
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import (
    BY_CONFIG_NAME,
    DATATYPES,
    CudaRegionRef,
    PayloadRef,
    RegionRef,
    Tensor,
    as_array,
    element_count,
)
from weir.worker.backend_api.interface import Result
from weir.worker.devices.cuda_shared_memory import MappedRegion
from weir.worker.execution.shared_memory import contiguous_view

_REUSE_FROM_BYTES = 256 * 1024

Split = Callable[[Sequence[InferRequest], str, str, np.ndarray], list[Tensor]]
"""A function of a batch's requests, an output's name, datatype and array; returns each request's share."""

_NONE_SPLIT: Mapping[str, Split] = {}


def ragged_inputs(config: ModelConfig) -> frozenset[str]:
    """The inputs whose shapes may differ between the requests of one batch."""
    return frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)


class InputPieces(NamedTuple):
    """An input of a batch before it is joined: `contents` in order, `size_bytes` in all.

    With `in_regions` some contents are clients' regions on the instance's GPU.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    contents: Sequence[bytes | memoryview | MappedRegion]
    size_bytes: int
    in_regions: bool = False

    def write_into(self, target: np.ndarray) -> None:
        """Joins the contents at the start of `target`, an array of bytes, in one copy; leaves the places of regions out."""
        start = 0
        for content in self.contents:
            end = start + len(content)
            if not isinstance(content, MappedRegion):
                # NumPy releases the interpreter's lock while it copies.
                target[start:end] = np.frombuffer(content, np.uint8)
            start = end


class BatchAssembler:
    """Joins the inputs of batches. Large batches reuse a buffer, because allocating its pages again would be costly.

    The inputs named in `ragged` are joined in one dimension. Returned arrays are valid until the next call.
    """

    def __init__(self, ragged: Collection[str] = ()) -> None:
        self._ragged = ragged
        self._buffers: dict[str, bytearray] = {}

    def assemble(
        self, requests: Sequence[InferRequest], batching: bool, reader: PayloadReader
    ) -> dict[str, np.ndarray]:
        """The input arrays of the batch by name, rows in the order of the requests.

        With `batching` the model has a batch dimension, along which tensors are joined; without it there is exactly one
        request. Raises WeirError for inputs that can't be joined or whose content is lost.
        """
        first = requests[0]
        if len(requests) == 1:
            arrays = {tensor.name: _array(tensor, reader) for tensor in first.inputs}
            for name in self._ragged:
                if name in arrays:
                    arrays[name] = arrays[name].reshape(-1)
            return arrays
        return {name: self._join(name, rows, reader) for name, rows in _rows_of(requests, batching)}

    def pieces(
        self, requests: Sequence[InferRequest], batching: bool, reader: PayloadReader, on_host: Collection[str]
    ) -> tuple[list[InputPieces], dict[str, np.ndarray]]:
        """As `assemble`, for a device: pieces to copy there, and arrays for strings and the inputs in `on_host`.

        The arrays are not reused by later calls.
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
            contents: list[bytes | memoryview | MappedRegion] = [_content(row, reader) for row in rows]
            in_regions = any(isinstance(content, MappedRegion) for content in contents)
            size = sum(map(len, contents))
            shape = tuple(rows[0].shape)
            if ragged:
                shape = (size // DATATYPES[datatype].size_bytes,)
            elif len(rows) > 1:
                shape = (sum(row.shape[0] for row in rows), *shape[1:])
            if element_count(shape) * DATATYPES[datatype].size_bytes != size:
                raise internal(f"the content of input '{name}' does not fill its shape")
            if name in on_host:
                joined = b"".join([_on_host(content, name) for content in contents])
                arrays[name] = np.frombuffer(joined, DATATYPES[datatype].numpy).reshape(shape)
            else:
                pieces.append(InputPieces(name, datatype, shape, contents, size, in_regions))
        return pieces, arrays

    def _join(self, name: str, rows: list[Tensor], reader: PayloadReader) -> np.ndarray:
        datatype = rows[0].datatype
        ragged = name in self._ragged
        shape = [-1] if ragged else [sum([row.shape[0] for row in rows]), *rows[0].shape[1:]]
        if datatype == "BYTES":
            return np.concatenate([_array(row, reader) for row in rows], axis=None if ragged else 0)
        contents = [row.data if type(row.data) is bytes else _content(row, reader) for row in rows]
        size = sum(map(len, contents))
        together = contiguous_view(contents)
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
    """The name of each input, and its tensor in each request."""
    if len(requests) > 1 and not batching:
        raise internal("a model without a batch dimension was given several requests at once")
    for position, tensor in enumerate(requests[0].inputs):
        name = tensor.name
        rows = [request.inputs[position] for request in requests]
        if any([row.name != name for row in rows]):  # noqa: C419 - a list is faster than a generator here
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
    splits: Mapping[str, Split] = _NONE_SPLIT,
    wanted_only: bool = True,
) -> list[list[Tensor]]:
    """Each request's rows of the output arrays `(name, datatype, array)`, as views; `wanted_only` the requested outputs.

    Outputs in `splits` have no rows; their function splits them. Raises WeirError for an output with another
    number of rows than the batch.
    """
    sizes = batch_sizes(requests, batching)
    results: list[list[Tensor]] = [[] for _ in requests]
    for name, datatype, array in outputs:
        if name in splits:
            parts = splits[name](requests, name, datatype, array)
        elif not batching:
            parts = [Tensor.from_numpy(name, array, datatype)]
        else:
            parts = _rows(name, datatype, array, sizes)
        for request, result, part in zip(requests, results, parts, strict=True):
            wanted = request.outputs
            if not wanted_only or not wanted or wanted[0].name == name or name in [output.name for output in wanted]:
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


def input_named(request: InferRequest, name: str) -> Tensor:
    """The request's input of that name. Raises WeirError (INTERNAL) if it has none."""
    for tensor in request.inputs:
        if tensor.name == name:
            return tensor
    raise internal(f"input '{name}' is missing from a request of the batch")


def _content(tensor: Tensor, reader: PayloadReader) -> bytes | memoryview:
    data = tensor.data
    if isinstance(data, (RegionRef, CudaRegionRef)):
        raise internal(f"the content of input '{tensor.name}' has not been fetched")
    if isinstance(data, PayloadRef):
        # Not checked again: a request that is cancelled from now on may get wrong content, but its response is dropped, and
        # the other requests of the batch must not fail.
        try:
            return reader.view_unchecked(data)
        except (StalePayload, ValueError) as error:
            raise unavailable(f"the content of input '{tensor.name}' was released") from error
    return data


def _on_host(content: bytes | memoryview | MappedRegion, name: str) -> bytes | memoryview:
    if not isinstance(content, MappedRegion):
        return content
    try:
        return content.read()
    except RegionError as error:
        raise invalid(f"failed to read input '{name}': {error}") from error


def _array(tensor: Tensor, reader: PayloadReader) -> np.ndarray:
    data = tensor.data if type(tensor.data) is bytes else _content(tensor, reader)
    try:
        array = as_array(data, tensor.datatype, tensor.shape)
    except ValueError as error:
        raise internal(f"the content of input '{tensor.name}' does not fill its shape") from error
    return array if array.flags.aligned else array.copy()


_Shapes = Sequence[Sequence[int]]


class BatchInputs:
    """The batch inputs of one model; false if it has none."""

    def __init__(self, config: ModelConfig) -> None:
        self._rows = [
            (row.target_name, row.source_input[0], _VALUES[row.kind], BY_CONFIG_NAME[row.data_type].numpy)
            for row in config.batch_input
        ]

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def names(self) -> list[str]:
        """The names of the batch inputs."""
        return [name for targets, *_ in self._rows for name in targets]

    def of(self, requests: Sequence[InferRequest]) -> dict[str, np.ndarray]:
        """The batch inputs of a batch of these requests, by name. Raises WeirError if a source is missing."""
        arrays: dict[str, np.ndarray] = {}
        for targets, source, values, numpy_type in self._rows:
            array = values([input_named(request, source).shape for request in requests]).astype(numpy_type)
            for name in targets:
                arrays[name] = array
        return arrays


def _element_counts(shapes: _Shapes) -> np.ndarray:
    return np.array([element_count(shape) for shape in shapes])


def _item_shapes(shapes: _Shapes) -> np.ndarray:
    items = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(items, np.int64).reshape(len(items), len(shapes[0]) - 1)


_VALUES: Mapping[str, Callable[[_Shapes], np.ndarray]] = {
    "BATCH_ELEMENT_COUNT": _element_counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes: np.cumsum(_element_counts(shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: np.cumsum([0, *_element_counts(shapes)]),
    # Only the shape is information. Triton leaves the content uninitialized.
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(_element_counts(shapes).max()),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: _item_shapes(shapes).reshape(-1),
}
"""By the name of the kind. The first three have one value for each request, the last two one shape for each row."""


class NamedDatatype(NamedTuple):
    """An output of a model: its name and Triton's name of its datatype ("FP32")."""

    name: str
    datatype: str


class BatchOutputs:
    """The outputs of one model. `names` are its outputs, then the states that are not outputs: the order of the arrays."""

    def __init__(
        self, config: ModelConfig, outputs: Sequence[NamedDatatype], states: Sequence[NamedDatatype] = ()
    ) -> None:
        self.names = list(dict.fromkeys([*outputs, *states]))
        self.has_states = bool(states)
        self._outputs = outputs
        self._states = states
        self._batching = config.max_batch_size > 0
        self._splits = batch_output_splits(config)

    def has_rows(self, name: str) -> bool:
        """Whether an output has a row for each row of the batch."""
        return name not in self._splits

    def results(self, requests: Sequence[InferRequest], arrays: Sequence[np.ndarray]) -> list[Result]:
        """The result of each request, with views of its rows of `arrays`, which are in the order of `names`.

        Raises WeirError for arrays with another number of rows than the batch.
        """
        if not self._states:
            outputs = [(name, datatype, array) for (name, datatype), array in zip(self._outputs, arrays, strict=True)]
            return [Result(tensors) for tensors in split_outputs(requests, outputs, self._batching, self._splits)]
        by_name = dict(zip(self.names, arrays, strict=True))
        outputs, states = (
            [(tensor.name, tensor.datatype, by_name[tensor]) for tensor in named]
            for named in (self._outputs, self._states)
        )
        return [
            Result(tensors, states=of_sequence)
            for tensors, of_sequence in zip(
                split_outputs(requests, outputs, self._batching, self._splits),
                split_outputs(requests, states, self._batching, wanted_only=False),
                strict=True,
            )
        ]


def batch_output_splits(config: ModelConfig) -> dict[str, Split]:
    """The function that splits each output without rows, by name."""
    outputs: dict[str, Split] = {}
    for row in config.batch_output:
        for name in row.target_name:
            declared = config.output_by_name[name]
            dims = declared.dims if declared.reshape is None else declared.reshape.shape
            outputs[name] = _BatchOutputSplit(row.source_input[0], [-1, *dims] if config.max_batch_size > 0 else dims)
    return outputs


class _BatchOutputSplit:
    def __init__(self, source: str, shape: Sequence[int]) -> None:
        self._source = source
        self._shape = shape

    def __call__(self, requests: Sequence[InferRequest], name: str, datatype: str, array: np.ndarray) -> list[Tensor]:
        shapes = [self._share(input_named(request, self._source).shape) for request in requests]
        sizes = [element_count(shape) for shape in shapes]
        if sum(sizes) != array.size:
            raise internal(
                f"output '{name}' has {array.size} elements, but the shapes of input '{self._source}' require {sum(sizes)}"
            )
        elements = np.ascontiguousarray(array).reshape(-1)
        parts: list[Tensor] = []
        start = 0
        for shape, size in zip(shapes, sizes, strict=True):
            parts.append(Tensor.from_numpy(name, elements[start : start + size].reshape(shape), datatype))
            start += size
        return parts

    def _share(self, source: Sequence[int]) -> list[int]:
        # An output with more dimensions than its source gets sizes of 0, which fail the check of the element count.
        return [
            dim if dim != -1 else source[position] if position < len(source) else 0
            for position, dim in enumerate(self._shape)
        ]


class Reshaper:
    """Converts the shapes of one model's tensors between those that clients see and those that the model sees."""

    def __init__(self, config: ModelConfig) -> None:
        self._batch_dims = 1 if config.max_batch_size > 0 else 0
        self._inputs = {t.name: (t.dims, t.reshape.shape) for t in config.input if t.reshape is not None}
        self._outputs = {t.name: (t.reshape.shape, t.dims) for t in config.output if t.reshape is not None}

    @property
    def is_needed(self) -> bool:
        """Whether the model has a tensor with `reshape`."""
        return bool(self._inputs or self._outputs)

    def to_model(self, request: InferRequest) -> None:
        """Converts the shapes of the request's inputs."""
        for tensor in request.inputs:
            if tensor.name in self._inputs:
                tensor.shape = self._change(tensor.shape, *self._inputs[tensor.name])

    def to_client(self, result: Result) -> None:
        """Converts the shapes of the result's outputs."""
        for tensor in result.outputs:
            if tensor.name in self._outputs:
                tensor.shape = self._change(tensor.shape, *self._outputs[tensor.name])

    def _change(self, shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[int]:
        batch, rest = list(shape[: self._batch_dims]), shape[self._batch_dims :]
        variable = iter([actual for actual, dim in zip(rest, source, strict=False) if dim == -1])
        return batch + [next(variable, 1) if dim == -1 else dim for dim in target]

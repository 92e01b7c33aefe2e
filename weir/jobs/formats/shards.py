"""`ShardFormat`: the interface of output formats. `OutputColumn`: an output of a shard's items as one array, if
possible.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import BinaryIO, ClassVar

import numpy as np

from weir.jobs.formats.items import ItemResult
from weir.schemas.config.model_config import ModelOutput
from weir.schemas.core.errors import WeirError, internal, invalid
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES, Tensor, as_array, element_count, unpack_bytes

LARGE_SHARD_BYTES = 24 << 20
"""Outputs of a shard beyond which memory is saved when it is written. Only large items make such shards."""


class ShardFormat(ABC):
    """Writes and rereads shards. `outputs` are those that the model declares.

    `own_names` are those that outputs can't have. Raises WeirError (INVALID_ARG) where one has.
    """

    suffix: ClassVar[str]
    own_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, outputs: Sequence[ModelOutput]) -> None:
        self.outputs = outputs
        for output in outputs:
            if output.name in self.own_names:
                raise invalid(f"an output called '{output.name}' can't be written to {self.suffix}: write JSON Lines")

    @abstractmethod
    def write(self, file: BinaryIO, results: Sequence[ItemResult]) -> int:
        """Write `results` as a shard; return how many of them failed."""

    @abstractmethod
    def failed(self, file: BinaryIO) -> list[int]:
        """The numbers of the failed items of a shard. Raises ValueError or OSError for an invalid shard."""

    @abstractmethod
    def replace(self, old: BinaryIO, new: BinaryIO, results: Sequence[ItemResult]) -> int:
        """Copy the shard `old` to `new`, with `results` instead of the results of these items.

        Returns how many failures are left. Raises ValueError or OSError for an invalid shard.
        """


def text_of(error: WeirError) -> str:
    """The text of `error` as valid Unicode, which the text of a model need not be."""
    return error.message.encode(errors="replace").decode()


class OutputColumn:
    """One output of a shard's items.

    `dims` are the declared ones, None for an output that is not declared; `exact`: no value may have others. `shapes`
    and `contents` have a place for each item, with None where it has no such output.
    """

    __slots__ = ("contents", "datatype", "dims", "exact", "name", "shapes")

    def __init__(self, name: str, datatype: str, dims: Sequence[int] | None, count: int, exact: bool) -> None:
        self.name = name
        self.datatype = datatype
        self.dims = dims
        self.exact = exact
        self.shapes: list[tuple[int, ...] | None] = [None] * count
        self.contents: list[bytes | memoryview] = [b""] * count

    def put(self, place: int, tensor: Tensor) -> None:
        """Set the value at `place`, without a batch dimension of 1 that the model adds."""
        shape, data = tuple(tensor.shape), tensor.data
        if isinstance(data, tuple):
            raise TypeError(f"the content of output '{tensor.name}' has not been fetched")
        if tensor.datatype != self.datatype:
            raise internal(f"output '{self.name}' is {tensor.datatype}, but was {self.datatype}")
        if self.dims is not None and len(shape) == len(self.dims) + 1 and shape[0] == 1:
            shape = shape[1:]
        if self.exact and not self._fits(shape):
            dims = None if self.dims is None else list(self.dims)
            raise invalid(
                f"output '{self.name}' of shape {list(shape)} does not fit the declared {dims}: write JSON Lines"
            )
        size = DATATYPES[self.datatype].size_bytes
        if size and element_count(shape) * size != len(data):
            raise internal(f"output tensor shape does not match size of output for '{self.name}'")
        self.shapes[place] = shape
        self.contents[place] = data

    def _fits(self, shape: tuple[int, ...]) -> bool:
        dims = self.dims
        if dims is None or len(dims) != len(shape):
            return False
        return all(dim in (size, -1) for dim, size in zip(dims, shape, strict=True))

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The common shape of all values, None if they differ."""
        shapes = set(self.shapes)
        shapes.discard(None)
        return shapes.pop() if len(shapes) == 1 else None

    def stacked(self, shape: tuple[int, ...]) -> np.ndarray:
        """The existing values, all of `shape`, as rows of one array (BYTES: an array of bytes objects)."""
        count = len(self.shapes) - self.shapes.count(None)
        return as_array(b"".join(self.contents), self.datatype, (count, *shape))

    def value(self, place: int) -> np.ndarray | None:
        """The value at `place`."""
        shape = self.shapes[place]
        return None if shape is None else as_array(self.contents[place], self.datatype, shape)


def columns_of(
    results: Sequence[ItemResult],
    declared: Sequence[ModelOutput],
    errors: list[WeirError | None],
    exact: bool = False,
) -> list[OutputColumn]:
    """The columns of `results`: the declared outputs in order, then, unless `exact`, others as they occur.

    `errors` has a place for each result, which is filled with its error. One whose outputs can't be written gets one:
    with `exact` those of other names or shapes than the declared ones, too.
    """
    count = len(results)
    columns = {
        output.name: OutputColumn(output.name, BY_CONFIG_NAME[output.data_type].name, output.dims, count, exact)
        for output in declared
    }
    for place, result in enumerate(results):
        error = result.error
        if error is None and result.outputs is None:
            raise internal(f"item {result.number} has neither outputs nor an error")
        errors[place] = error
        if error is not None:
            continue
        try:
            for tensor in result.outputs or ():
                column = columns.get(tensor.name)
                if column is None:
                    if exact:
                        raise invalid(f"output '{tensor.name}' is not declared: write JSON Lines")
                    column = columns[tensor.name] = OutputColumn(tensor.name, tensor.datatype, None, count, False)
                column.put(place, tensor)
                if column.datatype == "BYTES":
                    _check_strings(column, place)
        except WeirError as problem:
            errors[place] = problem
            for column in columns.values():
                column.shapes[place], column.contents[place] = None, b""
    return list(columns.values())


def _check_strings(column: OutputColumn, place: int) -> None:
    shape = column.shapes[place]
    try:
        found = len(unpack_bytes(column.contents[place]))
    except ValueError:
        found = -1
    if shape is None or found != element_count(shape):
        raise internal(f"output tensor shape does not match size of output for '{column.name}'")

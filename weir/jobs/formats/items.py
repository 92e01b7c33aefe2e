"""Items and results, which the files of a job and its runner exchange; both are numbered from 0 in the order of the input.

`DeclaredInput`: an input that a model declares, as files provide it: without a datatype, usually without a batch dimension.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import msgspec

from weir.schemas.config.model_config import ModelConfig, ModelInput
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES, Tensor

MAX_ITEM_BYTES = 64 << 20
"""Bytes of one item: a line, a row or a file. A larger one becomes an error, and is never completely in memory."""


class JobItem:
    """One item of a job's input.

    `source` is repeated in its result: the `id` of a request that has one, else the file and the line or row. `inputs` is
    an error if the item can't be read. `request` is set if the item is a request with more than inputs (parameters,
    outputs). `kept` are values of its file that its result repeats.
    """

    __slots__ = ("inputs", "kept", "number", "request", "source")

    def __init__(
        self,
        number: int,
        source: str,
        inputs: list[Tensor] | WeirError,
        request: InferRequest | None = None,
        kept: Sequence[Tensor] = (),
    ) -> None:
        self.number = number
        self.source = source
        self.inputs = inputs
        self.request = request
        self.kept = kept

    def __repr__(self) -> str:
        return f"JobItem({self.number}, {self.source!r}, {self.inputs!r})"


class ItemResult:
    """The result of one item: its outputs or its error; exactly one of them is not None. `kept` is that of its item."""

    __slots__ = ("error", "kept", "number", "outputs", "source")

    def __init__(
        self,
        number: int,
        source: str,
        outputs: list[Tensor] | None,
        error: WeirError | None,
        kept: Sequence[Tensor] = (),
    ) -> None:
        self.number = number
        self.source = source
        self.outputs = outputs
        self.error = error
        self.kept = kept

    def __repr__(self) -> str:
        return f"ItemResult({self.number}, {self.source!r}, {self.error or self.outputs!r})"


class KeptColumn(msgspec.Struct, frozen=True):
    """A column of the input that results repeat: one value of `datatype` (a wire datatype) for each item, or none."""

    name: str
    datatype: str


class JobInput(ABC):
    """The items of a job, in an order that depends on its files alone. Methods block: call them in threads.

    One object serves one reader at a time. `kept` are the columns that results repeat.
    """

    kept: Sequence[KeptColumn] = ()

    @abstractmethod
    def count(self) -> int | None:
        """The number of items, None if unknown. The first call is slow for text, which it reads.

        Raises WeirError if a file can't be read.
        """

    @abstractmethod
    def items(self, start: int = 0) -> Iterator[JobItem]:
        """The items from number `start` on. Earlier ones are skipped without reading them, as far as possible.

        Errors of single items, or of the rest of a file, become items with errors; nothing is raised.
        """

    def close(self) -> None:  # noqa: B027 - most need not
        """End what reads the items. They can't be read afterwards. May be called repeatedly."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that changes when the files change: a job must not continue in the middle of a changed input."""


class DeclaredInput(msgspec.Struct):
    """One input: its name, wire datatype, `dims` without the batch dimension, and whether it has a batch dimension.

    `size_bytes` are those of an element, 0 for BYTES; `scalar` is the shape of one element in a request.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    has_batch: bool = False
    size_bytes: int = 0
    scalar: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.size_bytes = DATATYPES[self.datatype].size_bytes
        self.scalar = (1,) * (len(self.dims) + self.has_batch)

    @classmethod
    def of_config(cls, declared: ModelInput, batching: bool) -> DeclaredInput:
        """An input of a model's configuration, which batches or does not."""
        datatype = BY_CONFIG_NAME[declared.data_type].name
        has_batch = batching and not declared.is_shape_tensor
        return cls(declared.name, datatype, tuple(declared.dims), declared.optional, has_batch)

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape, in a request, of a value of `shape`: adds a missing batch dimension of 1.

        One element fits any number of dimensions, and a flat list fits dims that are all known. Sizes are compared later,
        when the request is validated. Raises WeirError for too many or too few dimensions.
        """
        rank, wanted = len(shape), len(self.dims)
        if rank == wanted:
            return (1, *shape) if self.has_batch else tuple(shape)
        if rank == 0:
            return self.scalar
        if rank == 1 and -1 not in self.dims and math.prod(self.dims) == shape[0]:
            return (1, *self.dims) if self.has_batch else self.dims
        if rank == wanted + 1 and self.has_batch:
            return tuple(shape)
        raise self.wrong_shape(shape)

    def row_shape(self, shape: Sequence[int], what: str) -> tuple[int, ...]:
        """As `shape_of` for all rows of a file, whose sizes are compared too; `what` names the file in the error."""
        full = self.shape_of(shape)
        row = full[1:] if self.has_batch else full
        if len(full) != len(self.scalar) or any(
            size != dim for size, dim in zip(row, self.dims, strict=True) if dim != -1
        ):
            raise invalid(f"{what} has rows of shape {list(shape)}, but input '{self.name}' requires {list(self.dims)}")
        return full

    def wrong_shape(self, shape: Sequence[int]) -> WeirError:
        """The error for a value of `shape`."""
        return invalid(f"value of shape {list(shape)} does not fit input '{self.name}' with dims {list(self.dims)}")


def declared_inputs(config: ModelConfig) -> dict[str, DeclaredInput]:
    """The inputs of a model by name. Raises WeirError if it has none."""
    if not config.input:
        raise invalid(f"model '{config.name}' declares no inputs")
    return {declared.name: DeclaredInput.of_config(declared, config.max_batch_size > 0) for declared in config.input}


def check_names(names: Sequence[str], inputs: dict[str, DeclaredInput], what: str, advice: str = "") -> None:
    """Raise WeirError unless the arrays or columns of a file, called `what`, are the inputs of the model. `advice` is what
    to do about others.
    """
    unknown = [name for name in names if name not in inputs]
    if unknown:
        raise invalid(f"{what} '{unknown[0]}' is not an input of the model; its inputs are {sorted(inputs)}{advice}")
    lacking = [name for name, declared in inputs.items() if not declared.optional and name not in names]
    if lacking:
        raise invalid(f"{what} '{lacking[0]}' is missing")

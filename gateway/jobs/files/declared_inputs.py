"""The inputs that a model declares, as files give them: without datatypes, and mostly without the batch dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

from schemas.datatypes import BY_CONFIG_NAME
from schemas.errors import WeirError, invalid
from schemas.model_config import ModelConfig, ModelInput


class DeclaredInput:
    """One input: its name, datatype on the wire, `dims` without the batch dimension, and whether there is one."""

    __slots__ = ("datatype", "dims", "has_batch", "name", "optional", "scalar", "size_bytes")

    def __init__(self, declared: ModelInput, batching: bool) -> None:
        datatype = BY_CONFIG_NAME[declared.data_type]
        self.name = declared.name
        self.datatype = datatype.name
        self.size_bytes = datatype.size_bytes
        self.dims = tuple(declared.dims)
        self.optional = declared.optional
        self.has_batch = batching and not declared.is_shape_tensor
        self.scalar = (1,) * (len(self.dims) + self.has_batch)

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in a request of a value of `shape`: a missing batch dimension of 1 is added.

        One element fits any number of dimensions, and a flat list those that are all known. Sizes are not compared: that
        is done when the request is checked. Raises WeirError for too many or too few dimensions.
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
        """As `shape_of`, for all rows of a file, whose sizes are compared too; `what` names them in the error."""
        full = self.shape_of(shape)
        row = full[1:] if self.has_batch else full
        if len(full) != len(self.scalar) or any(
            size != dim for size, dim in zip(row, self.dims, strict=True) if dim != -1
        ):
            raise invalid(f"{what} has rows of shape {list(shape)}, but input '{self.name}' wants {list(self.dims)}")
        return full

    def wrong_shape(self, shape: Sequence[int]) -> WeirError:
        """The error for a value of `shape`."""
        return invalid(f"value of shape {list(shape)} does not fit input '{self.name}' of dims {list(self.dims)}")


def declared_inputs(config: ModelConfig) -> dict[str, DeclaredInput]:
    """The inputs of a model by name. Raises WeirError for a model that takes none."""
    if not config.input:
        raise invalid(f"model '{config.name}' declares no inputs")
    return {declared.name: DeclaredInput(declared, config.max_batch_size > 0) for declared in config.input}


def check_names(names: Sequence[str], inputs: dict[str, DeclaredInput], what: str) -> None:
    """Refuse a file whose arrays or columns, called `what`, are not the inputs. Raises WeirError."""
    unknown = [name for name in names if name not in inputs]
    if unknown:
        raise invalid(f"{what} '{unknown[0]}' is no input of the model; its inputs are {sorted(inputs)}")
    lacking = [name for name, declared in inputs.items() if not declared.optional and name not in names]
    if lacking:
        raise invalid(f"{what} '{lacking[0]}' is missing")

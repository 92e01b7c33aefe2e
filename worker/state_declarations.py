"""`StateDeclarations`: the implicit states of a model as its configuration declares them, with their first values.

Source: Triton's `sequence_batching.state`. A state is an output of one request that is an input of the sequence's next.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from repository.small_files import MAX_TENSOR_FILE_BYTES, read_small_file
from schemas.datatypes import BY_CONFIG_NAME
from schemas.errors import WeirError, invalid
from schemas.model_config import ModelConfig
from schemas.scheduling_config import SequenceState
from schemas.tensors import Tensor

INITIAL_STATE_FOLDER = "initial_state"
_EMPTY_STRING = bytes(4)


class DeclaredState:
    """One state: its two tensors, its dims (with the batch dimension, where the model has one; -1 is any size)."""

    def __init__(self, state: SequenceState, batching: bool, folder: Path, model: str) -> None:
        datatype = BY_CONFIG_NAME[state.data_type]
        self.input_name = state.input_name
        self.output_name = state.output_name
        self.datatype = datatype.name
        batch = [1] if batching else []
        self.dims = [*batch, *state.dims]
        initial = state.initial_state[0] if state.initial_state else None
        dims = initial.dims if initial is not None else [max(1, dim) for dim in state.dims]
        size = prod(dims) * (datatype.size_bytes or len(_EMPTY_STRING))
        content = bytes(size)
        if initial is not None and initial.zero_data is None and initial.data_file:
            content = _read(folder / INITIAL_STATE_FOLDER / initial.data_file, state.input_name, model)
            if len(content) != size and (datatype.size_bytes or len(content) < size):
                raise invalid(
                    f"initial_state setting expects {size} bytes, but the data provided from {initial.data_file} only "
                    f"has {len(content)} bytes"
                )
        self.initial = Tensor(self.input_name, self.datatype, [*batch, *dims], content)

    def fits(self, tensor: Tensor) -> bool:
        """Whether this could be the state's value."""
        return (
            tensor.datatype == self.datatype
            and len(tensor.shape) == len(self.dims)
            and all(dim in (-1, given) for dim, given in zip(self.dims, tensor.shape, strict=True))
        )


class StateDeclarations:
    """The states of one model version; raises WeirError for an initial value that can't be read.

    `checkpoint_every` is after how many requests of a sequence its state is checkpointed, 0 for never.
    """

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        batching = config.sequence_batching
        self.states = [
            DeclaredState(state, config.max_batch_size > 0, folder, config.name)
            for state in (batching.state if batching is not None else ())
        ]
        self.checkpoint_every = config.checkpoint_every if self.states else 0
        self.model = config.name

    @property
    def initial(self) -> list[Tensor]:
        """What a sequence starts with."""
        return [state.initial for state in self.states]

    def as_inputs(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """The states as the model's inputs, given as its outputs or as inputs; None where they aren't all there."""
        by_name = {tensor.name: tensor for tensor in tensors}
        inputs: list[Tensor] = []
        for state in self.states:
            tensor = by_name.get(state.output_name) or by_name.get(state.input_name)
            if tensor is None or not state.fits(tensor):
                return None
            inputs.append(Tensor(state.input_name, tensor.datatype, tensor.shape, tensor.data))
        return inputs


def _read(path: Path, state: str, model: str) -> bytes:
    try:
        return read_small_file(path, MAX_TENSOR_FILE_BYTES)
    except OSError as error:
        raise _unreadable(path.name, state, model, error) from error


def _unreadable(name: str, state: str, model: str, error: OSError) -> WeirError:
    return invalid(f"failed to read initial state file '{name}' of state '{state}' for {model}: {error.strerror}")

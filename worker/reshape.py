"""`reshape` of inputs and outputs: clients see `dims`, the model sees `reshape.shape`.

Source: Triton's `reshape` in `config.pbtxt`. Both have the same element count; variable dimensions (-1) of one stand for
those of the other in order. The batch dimension is outside of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from worker.backend import Result


class Reshaper:
    """Changes shapes between what clients and the model see, as one model's configuration says."""

    def __init__(self, config: ModelConfig) -> None:
        self._batch_dims = 1 if config.max_batch_size > 0 else 0
        self._inputs = {t.name: (t.dims, t.reshape.shape) for t in config.input if t.reshape is not None}
        self._outputs = {t.name: (t.reshape.shape, t.dims) for t in config.output if t.reshape is not None}

    @property
    def is_needed(self) -> bool:
        """Whether any tensor of the model is reshaped."""
        return bool(self._inputs or self._outputs)

    def to_model(self, request: InferRequest) -> None:
        """Gives the request's inputs the shapes that the model sees."""
        for tensor in request.inputs:
            if tensor.name in self._inputs:
                tensor.shape = self._change(tensor.shape, *self._inputs[tensor.name])

    def to_client(self, result: Result) -> None:
        """Gives the result's outputs the shapes that clients see."""
        for tensor in result.outputs:
            if tensor.name in self._outputs:
                tensor.shape = self._change(tensor.shape, *self._outputs[tensor.name])

    def _change(self, shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[int]:
        batch, rest = list(shape[: self._batch_dims]), shape[self._batch_dims :]
        variable = iter([actual for actual, dim in zip(rest, source, strict=False) if dim == -1])
        return batch + [next(variable, 1) if dim == -1 else dim for dim in target]

"""Batch inputs: inputs that tell a model how its batch was put together, which no client sends.

Source: `batch_input` of Triton's model configuration. Each is computed from the shapes that one input, the source, has
in the requests of the batch; shapes here include the batch dimension, as Triton's do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from schemas.datatypes import BY_CONFIG_NAME
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from schemas.tensors import element_count
from worker.batch_tensors import input_named

_Shapes = Sequence[Sequence[int]]


class BatchInputs:
    """Those of one model; false when it has none."""

    def __init__(self, config: ModelConfig) -> None:
        self._rows = [
            (row.target_name, row.source_input[0], _VALUES[row.kind], BY_CONFIG_NAME[row.data_type].numpy)
            for row in config.batch_input
        ]

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def names(self) -> list[str]:
        """The inputs of the model that come from here."""
        return [name for targets, *_ in self._rows for name in targets]

    def of(self, requests: Sequence[InferRequest]) -> dict[str, np.ndarray]:
        """The batch inputs of a batch of these requests, by name. Raises WeirError when a source is missing."""
        arrays: dict[str, np.ndarray] = {}
        for targets, source, values, numpy_type in self._rows:
            array = values([input_named(request, source).shape for request in requests]).astype(numpy_type)
            for name in targets:
                arrays[name] = array
        return arrays


def _element_counts(shapes: _Shapes) -> np.ndarray:
    return np.array([element_count(shape) for shape in shapes])


def _accumulated(shapes: _Shapes) -> np.ndarray:
    return np.array(list(accumulate(map(element_count, shapes))))


def _accumulated_with_zero(shapes: _Shapes) -> np.ndarray:
    return np.array(list(accumulate(map(element_count, shapes), initial=0)))


def _longest_as_shape(shapes: _Shapes) -> np.ndarray:
    # Only the shape tells something. Triton leaves the content as it finds it.
    return np.zeros(max(map(element_count, shapes)))


def _item_shapes(shapes: _Shapes) -> np.ndarray:
    items = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(items, np.int64).reshape(len(items), len(shapes[0]) - 1)


def _item_shapes_flat(shapes: _Shapes) -> np.ndarray:
    return _item_shapes(shapes).reshape(-1)


_VALUES: Mapping[str, Callable[[_Shapes], np.ndarray]] = {
    "BATCH_ELEMENT_COUNT": _element_counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _accumulated_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _longest_as_shape,
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": _item_shapes_flat,
}
"""By the kind's name. The first three have one value a request, the last two one shape a row."""

"""Batch outputs: outputs of a whole batch in one piece, of which each request gets as much as its input was long.

Source: `batch_output` of Triton's model configuration, of which there is one kind (BATCH_SCATTER_WITH_INPUT_SHAPE). A
request's share has the output's configured shape, whose variable dimensions are those that the source input has at the
same places in the request; the shares lie in the output one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schemas.errors import internal
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from schemas.tensors import Tensor, element_count
from worker.batch_tensors import Split, input_named


def scattered_outputs(config: ModelConfig) -> dict[str, Split]:
    """How each batch output of the model is split, by its name."""
    outputs: dict[str, Split] = {}
    for row in config.batch_output:
        for name in row.target_name:
            declared = config.output_by_name[name]
            dims = declared.dims if declared.reshape is None else declared.reshape.shape
            outputs[name] = _Scatter(row.source_input[0], [-1, *dims] if config.max_batch_size > 0 else dims)
    return outputs


class _Scatter:
    def __init__(self, source: str, shape: Sequence[int]) -> None:
        self._source = source
        self._shape = shape

    def __call__(self, requests: Sequence[InferRequest], name: str, datatype: str, array: np.ndarray) -> list[Tensor]:
        shapes = [self._share(input_named(request, self._source).shape) for request in requests]
        sizes = [element_count(shape) for shape in shapes]
        if sum(sizes) != array.size:
            raise internal(
                f"output '{name}' has {array.size} elements, but input '{self._source}' tells of {sum(sizes)} in all"
            )
        elements = np.ascontiguousarray(array).reshape(-1)
        parts: list[Tensor] = []
        start = 0
        for shape, size in zip(shapes, sizes, strict=True):
            parts.append(Tensor.from_numpy(name, elements[start : start + size].reshape(shape), datatype))
            start += size
        return parts

    def _share(self, source: Sequence[int]) -> list[int]:
        # An output of more dimensions than its source has nothing to take the rest from: then nothing fits, and says so.
        return [
            dim if dim != -1 else source[position] if position < len(source) else 0
            for position, dim in enumerate(self._shape)
        ]

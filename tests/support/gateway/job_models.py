"""Models and values for the tests of job files."""

from __future__ import annotations

from typing import Any

import numpy as np

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES, Tensor, pack_bytes

ALL = list(DATATYPES)
CONFIG_NAMES = {datatype.name: name for name, datatype in BY_CONFIG_NAME.items()}


def model(max_batch_size: int = 8, outputs: dict[str, Any] | None = None, **inputs: Any) -> ModelConfig:
    """A model whose inputs, and outputs, are given as name = (datatype, dims) or (datatype, dims, optional)."""
    tensors = {
        side: [
            {"name": name, "data_type": CONFIG_NAMES[given[0]], "dims": given[1]}
            | ({"optional": given[2]} if given[2:] else {})
            for name, given in declared.items()
        ]
        for side, declared in (("input", inputs), ("output", outputs or {}))
    }
    return ModelConfig.model_validate({"name": "m", "max_batch_size": max_batch_size, **tensors})


def value(random: np.random.Generator, name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of any bits; floats that are no NaN, whose bits change on the way through JSON, but may be infinite."""
    count = int(np.prod(shape))
    if datatype == "BYTES":
        return Tensor(
            name, datatype, shape, pack_bytes([random.bytes(int(random.integers(0, 9))) for _ in range(count)])
        )
    size = DATATYPES[datatype].size_bytes
    if datatype == "BOOL":
        return Tensor(name, datatype, shape, random.integers(0, 2, count, np.uint8).tobytes())
    array = np.frombuffer(random.bytes(count * size), DATATYPES[datatype].numpy).copy()
    if datatype == "BF16":
        array[(array & 0x7F80) == 0x7F80] = 0x7F80
    elif array.dtype.kind == "f":
        array[np.isnan(array)] = np.inf
    return Tensor(name, datatype, shape, array.tobytes())

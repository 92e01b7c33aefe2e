"""The classification extension: the highest values of an output and their labels, instead of the output itself.

Source: the classification extension of the KServe v2 protocol as Triton has it, compared with a running Triton 2.51.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from schemas.errors import invalid
from schemas.tensors import Tensor, pack_bytes

MAX_ELEMENTS = 1_000_000

_UNSUPPORTED = frozenset({"BOOL", "FP16", "BF16", "BYTES"})


def classify(tensor: Tensor, class_count: int, batching: bool, labels: Sequence[str] | None) -> Tensor:
    """The `class_count` highest values of `tensor` as BYTES "value:index" or "value:index:label", highest first.

    With `batching` the first dimension is the batch and each row is ranked by itself: the shape is [batch, k], else
    [k], where k is at most the number of elements ranked. Equal values come in the order of their indexes, NaN last;
    floats have six decimals. Raises WeirError (INVALID_ARG) for datatypes without an order and for huge outputs.
    """
    if tensor.datatype in _UNSUPPORTED:
        raise invalid(f"class result not available for output due to unsupported type '{tensor.datatype}'")
    values = tensor.to_numpy()
    if values.size > MAX_ELEMENTS:
        raise invalid("classification output tensor too large")
    rows = values.reshape(values.shape[0], math.prod(values.shape[1:])) if batching else values.reshape(1, values.size)
    count = min(class_count, rows.shape[1])
    classes = [text for row in rows for text in _classes(row, count, labels)]
    shape = [len(rows), count] if batching else [count]
    return Tensor(tensor.name, "BYTES", shape, pack_bytes(classes))


def _classes(row: np.ndarray, count: int, labels: Sequence[str] | None) -> list[str]:
    # Both turn the order around without overflow, so that a stable ascending sort ranks equal values by index.
    descending = -row if row.dtype.kind == "f" else ~row
    indexes = np.argsort(descending, kind="stable")[:count].tolist()
    pattern = "%f:%d" if row.dtype.kind == "f" else "%d:%d"
    texts = []
    for index, value in zip(indexes, row[indexes].tolist(), strict=True):
        label = labels[index] if labels is not None and index < len(labels) else ""
        texts.append(pattern % (value, index) + (f":{label}" if label else ""))
    return texts

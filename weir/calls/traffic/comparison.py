"""Compares the outputs of a live request with those of its copy on another version, and sums many comparisons.

For each output of numbers: the largest absolute difference, and the largest relative one, which is the absolute difference
divided by the larger of the two magnitudes (0 for equal values, at most 2). NaN equals NaN; NaN beside a number, and an
infinity beside anything else, differ by infinity.

*Labels* are what a caller decides by: for floating-point outputs whose last axis is longer than 1, the position of the
largest value along it; for outputs of integers, booleans and BYTES, each value. Other outputs have none.

Sans-IO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.traffic import ComparisonRow, OutputRow

_FLOATS = ("FP16", "BF16", "FP32", "FP64")

MAX_OUTPUTS = 64
"""Outputs of a version that are summed; further ones are not compared."""


class Difference(NamedTuple):
    """How two responses differ: by output, or by a `mismatch` (a text) for which they can't be compared."""

    outputs: dict[str, OutputRow]
    mismatch: str = ""

    @property
    def score(self) -> float:
        """How bad it is, to choose the worst: infinity for a mismatch, else the largest relative difference."""
        if self.mismatch:
            return math.inf
        return max((_output_score(row) for row in self.outputs.values()), default=0.0)


def _output_score(row: OutputRow) -> float:
    # A different label counts as the largest finite relative difference does.
    return max(row.largest_relative, 2.0 if row.different_labels else 0.0)


def compare(live: Sequence[Tensor], copied: Sequence[Tensor]) -> Difference:
    """The difference of two responses; outputs are matched by name. Malformed content counts as a mismatch."""
    others = {tensor.name: tensor for tensor in copied}
    if others.keys() != {tensor.name for tensor in live}:
        names = ", ".join(sorted(others.keys() ^ {tensor.name for tensor in live}))
        return Difference({}, f"only one of the versions has the outputs: {names}")
    rows: dict[str, OutputRow] = {}
    for tensor in live[:MAX_OUTPUTS]:
        other = others[tensor.name]
        if tensor.datatype != other.datatype or list(tensor.shape) != list(other.shape):
            return Difference(
                {},
                f"output '{tensor.name}' is {tensor.datatype} {list(tensor.shape)}, and {other.datatype} "
                f"{list(other.shape)} in the copy",
            )
        try:
            rows[tensor.name] = _compare(tensor.datatype, tensor.to_numpy(), other.to_numpy())
        except (ValueError, TypeError) as error:
            return Difference({}, f"output '{tensor.name}' is malformed: {error}")
    return Difference(rows)


def _compare(datatype: str, live: np.ndarray, copied: np.ndarray) -> OutputRow:
    if datatype not in _FLOATS:
        different = int(np.count_nonzero(live != copied))
        if datatype == "BYTES" or not different:
            return OutputRow(live.size, different, 0.0, 0.0, live.size, different)
        a, b = live.astype(np.float64), copied.astype(np.float64)
        return OutputRow(live.size, different, *_largest(a, b), live.size, different)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        a, b = live.astype(np.float64), copied.astype(np.float64)
    different = int(np.count_nonzero((a != b) & ~(np.isnan(a) & np.isnan(b))))
    if not different:
        return OutputRow(live.size, 0, 0.0, 0.0, _labels(a), 0)
    changed = 0
    if _labels(a):
        changed = int(np.count_nonzero(_decided(a) != _decided(b)))
    return OutputRow(live.size, different, *_largest(a, b), _labels(a), changed)


def _largest(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """The largest absolute and relative difference."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        absolute = np.where(same, 0.0, np.abs(a - b))
        finite = np.isfinite(a) & np.isfinite(b)
        absolute = np.where(finite | same, absolute, np.inf)
        relative = np.where(same, 0.0, np.where(finite, absolute / np.maximum(np.abs(a), np.abs(b)), np.inf))
    return float(absolute.max()), float(relative.max())


def _labels(array: np.ndarray) -> int:
    if array.ndim == 0 or array.shape[-1] < 2:
        return 0
    return int(array.size // array.shape[-1])


def _decided(array: np.ndarray) -> np.ndarray:
    decided: np.ndarray = np.where(np.isnan(array), -np.inf, array).argmax(axis=-1)
    return decided


class ComparisonTotals:
    """The sum of the comparisons with one version: how many requests were `compared`, how many were `skipped` (their
    outputs were too large, or too many waited), how many copies `failed`, how many responses were `mismatched`.
    """

    __slots__ = ("compared", "differing", "failed", "mismatched", "outputs", "skipped")

    def __init__(self) -> None:
        self.compared = 0
        self.skipped = 0
        self.failed = 0
        self.mismatched = 0
        self.differing = 0
        self.outputs: dict[str, OutputRow] = {}

    def add(self, difference: Difference) -> None:
        """Adds one comparison."""
        self.compared += 1
        if difference.mismatch:
            self.mismatched += 1
        self.differing += difference.score > 0
        self._add_outputs(difference.outputs)

    def add_row(self, row: ComparisonRow) -> None:
        """Adds the sum of another process."""
        self.compared += row.compared
        self.skipped += row.skipped
        self.failed += row.failed
        self.mismatched += row.mismatched
        self.differing += row.differing
        self._add_outputs(row.outputs)

    def row(self, model: str, version: int) -> ComparisonRow:
        """The sum as it travels."""
        return ComparisonRow(
            model,
            version,
            self.compared,
            self.skipped,
            self.failed,
            self.mismatched,
            self.differing,
            dict(self.outputs),
        )

    def _add_outputs(self, rows: dict[str, OutputRow]) -> None:
        for name, row in rows.items():
            known = self.outputs.get(name)
            if known is None:
                if len(self.outputs) < MAX_OUTPUTS:
                    self.outputs[name] = row
                continue
            self.outputs[name] = OutputRow(
                known.values + row.values,
                known.differing + row.differing,
                max(known.largest_absolute, row.largest_absolute),
                max(known.largest_relative, row.largest_relative),
                known.labels + row.labels,
                known.different_labels + row.different_labels,
            )

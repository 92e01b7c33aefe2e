"""Plain tables of figures."""

from __future__ import annotations

import math
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns two spaces apart, the first one flush left and the others flush right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def quantile(ascending: Sequence[float], share: float) -> float:
    """The least value that at least `share` of them are not above; 0 of none."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else 0.0

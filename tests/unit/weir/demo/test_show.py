"""What the demo prints of its measurements."""

from __future__ import annotations

from rich.console import Console

from weir.demo.load import LoadFigures
from weir.demo.show import batching_table


def test_gains_are_by_the_first_line_of_each_model() -> None:
    levels = {
        "a": [LoadFigures(1, 100.0, 9.0, 12.0, 1.0), LoadFigures(8, 450.0, 15.0, 20.0, 6.5)],
        "b": [LoadFigures(1, 2000.0, 0.4, 1.0, 1.0)],
    }
    console = Console(width=120)
    with console.capture() as printed:
        console.print(batching_table(levels))
    rows = [line.split() for line in printed.get().splitlines() if line.split()[:1] in (["a"], ["b"])]
    assert rows == [
        ["a", "1", "1.00", "100", "×", "1.0", "9.00", "12.00"],
        ["a", "8", "6.50", "450", "×", "4.5", "15.00", "20.00"],
        ["b", "1", "1.00", "2000", "×", "1.0", "0.40", "1.00"],
    ]

"""`Timeline`: what happened when, drawn as SVG: rows of bars and marks over a time axis in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from xml.sax.saxutils import escape

COLOURS = ("#3b6fb6", "#d9822b", "#4c9a5b", "#a24fa0", "#c0453e", "#6b7280")
"""By number; the last one is for what has no owner."""

_LEFT, _RIGHT, _TOP, _ROW, _AXIS = 132, 20, 16, 34, 30
_WIDTH = 820
_FONT = "font-family='ui-sans-serif,system-ui,sans-serif' font-size='12'"


class Bar(NamedTuple):
    """Something that took from `start_us` to `end_us`, in `cells` side by side from top to bottom: (text, colour)."""

    row: str
    start_us: int
    end_us: int
    cells: tuple[tuple[str, int], ...]


class Mark(NamedTuple):
    """Something that happened at `at_us`: an arrival, or with `is_end` a refusal."""

    row: str
    at_us: int
    text: str
    colour: int
    is_end: bool = False


class Timeline:
    """See the module. Rows are drawn in the order given; a bar with several cells gets a higher row."""

    def __init__(self, rows: Iterable[str], end_us: int, step_us: int = 1000) -> None:
        self._rows = list(rows)
        self._end_us = end_us
        self._step_us = step_us
        self._bars: list[Bar] = []
        self._marks: list[Mark] = []

    def add(self, *what: Bar | Mark) -> None:
        """Draws these too."""
        for one in what:
            if isinstance(one, Bar):
                self._bars.append(one)
            else:
                self._marks.append(one)

    def svg(self, title: str) -> str:
        """The picture."""
        heights = dict.fromkeys(self._rows, _ROW)
        for bar in self._bars:
            heights[bar.row] = max(heights[bar.row], 19 * len(bar.cells) + 12)
        for row in self._rows:
            heights[row] = max(heights[row], 16 * self._deepest(row) + 22)
        tops: dict[str, int] = {}
        height = _TOP
        for row in self._rows:
            tops[row] = height
            height += heights[row]
        lines = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height + _AXIS}' {_FONT} role='img'>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{_WIDTH}' height='{height + _AXIS}' rx='8' fill='#ffffff'/>",
        ]
        lines += self._axis(height)
        for row in self._rows:
            middle = tops[row] + heights[row] / 2 + 4
            lines.append(f"<text x='12' y='{middle:g}' fill='#374151'>{escape(row)}</text>")
            lines.append(f"<line x1='12' x2='{_WIDTH - 12}' y1='{tops[row]}' y2='{tops[row]}' stroke='#e5e7eb'/>")
        for bar in self._bars:
            lines += self._bar(bar, tops[bar.row], heights[bar.row])
        for row in self._rows:
            lines += self._marks_of(row, tops[row])
        return "\n".join([*lines, "</svg>"]) + "\n"

    def _x(self, at_us: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * at_us / self._end_us, 1)

    def _axis(self, bottom: int) -> list[str]:
        lines: list[str] = []
        for at_us in range(0, self._end_us + 1, self._step_us):
            x = self._x(at_us)
            lines.append(f"<line x1='{x:g}' x2='{x:g}' y1='{_TOP}' y2='{bottom}' stroke='#f1f3f5'/>")
            text = f"{at_us / 1000:g} ms" if at_us == 0 else f"{at_us / 1000:g}"
            lines.append(f"<text x='{x:g}' y='{bottom + 18}' text-anchor='middle' fill='#6b7280'>{text}</text>")
        return lines

    def _bar(self, bar: Bar, top: int, height: int) -> list[str]:
        x, width = self._x(bar.start_us), self._x(bar.end_us) - self._x(bar.start_us)
        cell = (height - 10) / len(bar.cells)
        lines: list[str] = []
        for place, (text, colour) in enumerate(bar.cells):
            y = round(top + 5 + place * cell, 1)
            lines.append(
                f"<rect x='{x:g}' y='{y:g}' width='{width:.1f}' height='{cell - 1:.1f}' rx='3' fill='{COLOURS[colour]}' "
                f"fill-opacity='{0.25 if colour == len(COLOURS) - 1 else 0.9}'/>"
            )
            lines.append(
                f"<text x='{x + width / 2:.1f}' y='{y + cell / 2 + 4:.1f}' text-anchor='middle' "
                f"fill='{'#6b7280' if colour == len(COLOURS) - 1 else '#ffffff'}'>{escape(text)}</text>"
            )
        return lines

    def _placed(self, row: str) -> list[tuple[Mark, int]]:
        """The row's marks, each with its depth: marks that come together stand one below the other."""
        placed: list[tuple[Mark, int]] = []
        ends: list[float] = []
        for mark in sorted((mark for mark in self._marks if mark.row == row), key=lambda mark: mark.at_us):
            x = self._x(mark.at_us)
            depth = next((at for at, end in enumerate(ends) if end <= x), len(ends))
            end = x + 18 + 7.5 * len(mark.text)
            ends[depth : depth + 1] = [end]
            placed.append((mark, depth))
        return placed

    def _deepest(self, row: str) -> int:
        return max((depth for _, depth in self._placed(row)), default=0)

    def _marks_of(self, row: str, top: int) -> list[str]:
        lines: list[str] = []
        for mark, depth in self._placed(row):
            x, y = self._x(mark.at_us), top + 17 + 16 * depth
            colour = COLOURS[mark.colour]
            if mark.is_end:
                lines.append(f"<path d='M{x - 4:g} {y - 4} l8 8 m0 -8 l-8 8' stroke='{colour}' stroke-width='2'/>")
            else:
                lines.append(f"<circle cx='{x:g}' cy='{y}' r='4' fill='{colour}'/>")
            lines.append(f"<text x='{x + 7:g}' y='{y + 4}' fill='#374151'>{escape(mark.text)}</text>")
        return lines

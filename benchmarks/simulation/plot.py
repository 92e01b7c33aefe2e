"""Latency against throughput as an SVG plot: one colour per setting, p99 solid and p50 dashed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 560, 46, 380
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#e08e00", "#7b4fa3", "#00888a", "#8d6346", "#5b6770")
_INK, _GRID = "#333333", "#dddddd"


class Point(NamedTuple):
    """One simulation: answers a second, and two percentiles of latency in milliseconds."""

    throughput: float
    p50_ms: float
    p99_ms: float


class Curve(NamedTuple):
    """One setting: its name, and its points with rising load."""

    name: str
    points: Sequence[Point]


def latency_over_throughput(title: str, subtitle: str, curves: Sequence[Curve]) -> str:
    """The picture. Throughput is linear from 0, latency logarithmic. At least one curve must have a point."""
    points = [point for curve in curves for point in curve.points]
    step = _round_step(max(point.throughput for point in points))
    most = step * ceil(max(point.throughput for point in points) / step)
    marks = _marks(min(point.p50_ms for point in points), max(point.p99_ms for point in points))
    low, high = log10(marks[0]), log10(marks[-1])

    def x(throughput: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * throughput / most

    def y(latency_ms: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (log10(max(marks[0], latency_ms)) - low) / (high - low)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, title, "start", 'font-size="15" font-weight="bold"'),
        _text(_LEFT, 37, subtitle, "start", 'fill="#666666"'),
    ]
    for mark in marks:
        lines.append(_line(_LEFT, y(mark), _RIGHT, y(mark), _GRID))
        lines.append(_text(_LEFT - 8, y(mark) + 4, f"{mark:g}", "end"))
    for number in range(round(most / step) + 1):
        at = x(number * step)
        lines.append(_line(at, _TOP, at, _BOTTOM, _GRID))
        lines.append(_text(at, _BOTTOM + 18, f"{number * step:,.0f}".replace(",", " "), "middle"))
    lines.append(_line(_LEFT, _TOP, _LEFT, _BOTTOM, _INK))
    lines.append(_line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, _INK))
    lines.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, "answers a second", "middle"))
    middle = (_TOP + _BOTTOM) / 2
    lines.append(_text(18, middle, "latency, ms", "middle", f'transform="rotate(-90 18 {middle})"'))
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        for values, dashes in (("p99_ms", ""), ("p50_ms", ' stroke-dasharray="5 4" stroke-opacity="0.7"')):
            places = [(x(point.throughput), y(getattr(point, values))) for point in curve.points]
            lines += _curve(places, colour, dashes)
        at = _TOP + 8 + 20 * number
        lines.append(
            f'<line x1="{_RIGHT + 20}" y1="{at}" x2="{_RIGHT + 44}" y2="{at}" stroke="{colour}" stroke-width="2"/>'
        )
        lines.append(_text(_RIGHT + 52, at + 4, curve.name, "start"))
    at = _TOP + 20 * len(curves) + 16
    lines.append(_text(_RIGHT + 20, at, "solid p99, dashed p50", "start", 'fill="#666666"'))
    return "\n".join([*lines, "</svg>", ""])


def _curve(places: Sequence[tuple[float, float]], colour: str, dashes: str) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
    for x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _round_step(most: float) -> float:
    """A step of 1, 2 or 5 times a power of ten, of which five to ten make up `most`."""
    power = 10.0 ** floor(log10(max(most, 1e-9) / 5))
    return next(power * multiple for multiple in (1, 2, 5, 10) if most / (power * multiple) <= 8)


def _marks(least: float, most: float) -> list[float]:
    """Latencies of 1, 2, 3 or 5 times a power of ten that enclose both, two at least."""
    least = max(least, 1e-3)
    decades = range(floor(log10(least)), ceil(log10(max(most, least))) + 2)
    marks = [multiple * 10.0**decade for decade in decades for multiple in (1, 2, 3, 5)]
    first = max(number for number, mark in enumerate(marks) if mark <= least)
    last = min(number for number, mark in enumerate(marks) if mark >= most and number > first)
    return marks[first : last + 1]

"""Latency against throughput: in the terminal (plotext), and as an SVG file (matplotlib). Both are optional."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from weir.perf.report.document import PerfReport
from weir.runtime.extras import is_installed, missing_extra

QUANTILES = ("p50", "p99")
"""One curve each."""

_TICKS = 5
_MARKERS = ("braille", "hd")

_WIDTH, _HEIGHT = 78, 18
_MIN_POINTS = 2
_X_LABEL, _Y_LABEL = "requests/s", "latency ms"


class PlotUnavailable(Exception):
    """The plot can't be written. The message is one line."""


class _Point(NamedTuple):
    """One level: its name, its throughput, and its latency by quantile in milliseconds."""

    name: str
    per_s: float
    latency_ms: dict[str, float]


def terminal_plot(report: PerfReport, width: int = _WIDTH) -> str:
    """The plot as text, at most `width` characters wide; "" for fewer than two levels with responses.

    Without the packages that draw it, the text says what to install.
    """
    points = _points(report)
    if len(points) < _MIN_POINTS:
        return ""
    if not is_installed("tools"):
        return f"({missing_extra('the plot', 'tools')})"
    import plotext

    figure = plotext.figure
    figure.clear()
    plotext.terminal.limit(False, False)  # the size is ours, also where there is no terminal
    figure.plot_size(min(width, _WIDTH), _HEIGHT)
    per_s = [point.per_s for point in points]
    for quantile, marker in zip(QUANTILES, _MARKERS, strict=True):
        curve = figure.signal(per_s, [point.latency_ms[quantile] for point in points], marker=marker)
        figure.draw(curve.lines().label(quantile))
    figure.label(_X_LABEL, "x")
    figure.label(_Y_LABEL, "y")
    _scale(figure.ruler("x", "lower"), max(per_s))
    _scale(figure.ruler("y", "left"), max(point.latency_ms[QUANTILES[-1]] for point in points))
    text: str = plotext.uncolorize(str(figure.build()))  # plain: it may go to a file
    figure.clear()
    return "\n".join(line.rstrip() for line in text.splitlines())


def _scale(ruler: Any, largest: float) -> None:
    """Shows the values from 0 to a little above `largest`, with ticks at round numbers."""
    rough_step = largest / _TICKS
    magnitude = 10 ** math.floor(math.log10(rough_step))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough_step)
    ticks = [step * number for number in range(int(largest / step) + 1)]
    ruler.lim(0, largest * 1.05)
    ruler.ticks(ticks, [f"{tick:.10g}" for tick in ticks])


def check_svg(path: Path) -> None:
    """Raises PlotUnavailable if `write_svg` could not write to `path`: called before a test, which takes a while."""
    if path.suffix != ".svg":
        raise PlotUnavailable(f"--plot writes SVG: the name of its file must end in .svg, not {path.name!r}")
    if find_spec("matplotlib") is None:
        raise PlotUnavailable("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise PlotUnavailable(f"{path} can't be written: {path.absolute().parent} is not a folder you may write to")


def write_svg(report: PerfReport, path: Path) -> None:
    """Writes the plot to `path`. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    points = _points(report)
    for quantile in QUANTILES:
        latency_ms = [point.latency_ms[quantile] for point in points]
        axes.plot([point.per_s for point in points], latency_ms, marker="o", markersize=4, label=quantile)
    for point in points:
        axes.annotate(
            point.name,
            (point.per_s, point.latency_ms[QUANTILES[-1]]),
            textcoords="offset points",
            xytext=(4, 4),
            fontsize=8,
        )
    axes.set_title(f"{report.model} of {report.server}, {report.protocol}", fontsize=10)
    axes.set_xlabel(_X_LABEL)
    axes.set_ylabel(_Y_LABEL)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(title=f"by {report.mode}")
    figure.savefig(path, format="svg")


def _points(report: PerfReport) -> list[_Point]:
    return [
        _Point(level.load, level.requests_per_s, level.latency_ms.model_dump())
        for level in report.levels
        if level.latency_ms is not None
    ]

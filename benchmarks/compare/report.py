"""The tables that `make bench` prints."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.compare.measurement import Measurement
from benchmarks.compare.targets import BATCHER, Baseline, Quantity, Target

_ROLE_ORDER = ("gateway", "scheduler", "worker", "nats-server", "supervisor")
_UNITS = {Quantity.CPU: "CPU ms", Quantity.RATE: "requests/s", Quantity.LATENCY: "p50 ms"}


class Report:
    """The tables of a run. A figure is the median over the rounds; a ratio is the median of the rounds' ratios."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self._groups: dict[tuple[str, str], list[Measurement]] = {}
        for measurement in measurements:
            self._groups.setdefault((measurement.workload, measurement.server), []).append(measurement)

    def print(self, targets: Sequence[Target], batcher_per_s: float | None) -> None:
        """The targets, every measurement, and Weir's CPU by role. `batcher_per_s` None leaves its row out."""
        console = Console(width=150, highlight=False)
        console.print(self._targets(targets, batcher_per_s))
        console.print(self._measurements())
        console.print(self._roles())

    def _targets(self, targets: Sequence[Target], batcher_per_s: float | None) -> Table:
        table = _table("targets", "row", "work", "figure", "Triton", "raw", "Weir", "ratio", "must", "aim", "reached")
        for target in targets:
            name, times = str(target.workload), " ×" if target.baseline else ""
            weir, ratio = self._figure(name, "weir", target), self._ratio(name, target)
            table.add_row(
                target.key,
                name,
                _UNITS[target.quantity],
                _number(self._figure(name, Baseline.TRITON, target)),
                _number(self._figure(name, Baseline.ONNXRUNTIME, target)),
                _number(weir),
                _number(ratio),
                _number(target.must, times),
                _number(target.aim, times),
                target.reached(ratio if target.baseline else weir),
            )
        if batcher_per_s is not None:
            figures = map(_number, (batcher_per_s, None, BATCHER.must, BATCHER.aim))
            work = "sans-IO batcher, one core"
            table.add_row(BATCHER.key, work, "requests/s", "", "", *figures, BATCHER.reached(batcher_per_s))
        return table

    def _measurements(self) -> Table:
        columns = ("requests/s", "p50 ms", "p99 ms", "CPU ms", "lowest", "highest", "batch", "others' cores")
        table = _table("measurements (medians over the rounds)", "work", "server", *columns)
        for (workload, server), rounds in self._groups.items():
            cpu = [m.cpu_ms for m in rounds]
            figures = (
                *(_median(rounds, name) for name in ("requests_per_s", "p50_ms", "p99_ms", "cpu_ms")),
                min(cpu),
                max(cpu),
                _median(rounds, "batch_size"),
                _median(rounds, "other_cores"),
            )
            table.add_row(workload, server, *map(_number, figures))
        return table

    def _roles(self) -> Table:
        table = _table("Weir's CPU by role, us a request", "work", *_ROLE_ORDER, "all")
        for (workload, server), rounds in self._groups.items():
            if server == "weir":
                by_role = [statistics.median(m.cpu_us_by_role.get(role, 0.0) for m in rounds) for role in _ROLE_ORDER]
                table.add_row(workload, *map(_number, (*by_role, _median(rounds, "cpu_ms") * 1e3)))
        return table

    def _figure(self, workload: str, server: str, target: Target) -> float | None:
        rounds = self._groups.get((workload, server))
        return _median(rounds, target.quantity) if rounds else None

    def _ratio(self, workload: str, target: Target) -> float | None:
        mine, theirs = (
            {m.round: getattr(m, target.quantity) for m in self._groups.get((workload, server), [])}
            for server in ("weir", target.baseline)
        )
        ratios = [mine[number] / theirs[number] for number in mine.keys() & theirs.keys()]
        return statistics.median(ratios) if ratios else None


def _median(rounds: Sequence[Measurement], name: str) -> float:
    return statistics.median(getattr(m, name) for m in rounds)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for column in columns:
        text = column in ("row", "work", "server", "figure", "reached")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    return table


def _number(value: float | None, suffix: str = "") -> str:
    if value is None:
        return ""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.5 else 3
    return f"{value:,.{digits}f}{suffix}"

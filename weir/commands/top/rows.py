"""What `weir top` shows of models: rows from the load and the state of a cluster, sorted and filtered. Sans-IO."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weir.cluster.status.snapshot import ClusterStatus, ModelStatus
from weir.commands.terminal import one_line
from weir.console.history.series import Values
from weir.schemas.core.names import model_identity, namespace_of, plain_name

_NOTHING: Values = {}
_UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model now. `key` is its identity. Values that are not known, or had no request, are None."""

    key: str
    state: str
    requests_per_s: float | None = None
    failures_per_s: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    queue_depth: float | None = None
    queue_oldest_s: float | None = None
    batch_size: float | None = None
    utilization: float | None = None
    workers: int = 0

    @property
    def name(self) -> str:
        """Its name, with its namespace in brackets if it has one."""
        namespace, name = namespace_of(self.key), plain_name(self.key)
        return one_line(f"{name} [{namespace}]" if namespace else name)


class Column(NamedTuple):
    """A column of the table: its title, its width in characters, what it shows, and the value that it is sorted by."""

    title: str
    width: int
    text: Callable[[ModelRow], str]
    order: Callable[[ModelRow], float | str | None]
    is_text: bool = False


def rows_of(models: Mapping[str, Values], status: ClusterStatus | None) -> list[ModelRow]:
    """A row for each model that the load or the state names; `models` is the load by identity."""
    states = {model_identity(model.name, model.namespace): model for model in status.models} if status else {}
    return [_row(key, models.get(key, _NOTHING), states.get(key)) for key in sorted({*models, *states})]


def _row(key: str, load: Values, model: ModelStatus | None) -> ModelRow:
    names = (
        "requests_per_s", "failures_per_s", "p50_ms", "p99_ms", "queue_depth", "queue_oldest_s", "batch_size",
        "utilization",
    )  # fmt: skip
    values = {name: load.get(name) for name in names}
    return ModelRow(key, state_of(model), workers=len(model.workers) if model is not None else 0, **values)


def state_of(model: ModelStatus | None) -> str:
    """The state of a model in one word."""
    if model is None:
        return ""
    if model.scaled_to_zero:
        return "zero"
    states = {version.state for version in model.versions}
    if "READY" in states:
        return "ready" if model.workers and not model.rejected else "partly"
    if "LOADING" in states:
        return "loads"
    return "down"


def number_text(value: float | None, width: int = 6) -> str:
    """A count or a rate in at most `width` characters: 0, 0.25, 12.3, 1234, 12.3k."""
    if value is None or math.isnan(value):
        return ""
    for unit in ("", "k", "M", "G"):
        if value < 9999.5 or unit == "G":
            break
        value /= 1000
    digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:.{digits}f}{unit}"[:width]


def duration_text(ms: float | None) -> str:
    """A duration in at most six characters: 0.61, 12.3, 842, 1.84s, 125s, 12m, 3h."""
    if ms is None or math.isnan(ms):
        return ""
    if ms < 999.5:
        return number_text(ms)
    seconds = ms / 1000
    if seconds < 999.5:
        return f"{number_text(seconds, 4)}s"
    return f"{seconds / 60:.0f}m" if seconds < 36_000 else f"{seconds / 3600:.0f}h"


def share_text(share: float | None) -> str:
    """A share (0 to 1) in percent."""
    return "" if share is None or math.isnan(share) else f"{share:.0%}"


def _age_text(row: ModelRow) -> str:
    return duration_text(row.queue_oldest_s * 1000) if row.queue_depth and row.queue_oldest_s else ""


COLUMNS = (
    Column("MODEL", 17, lambda row: row.name, lambda row: row.name.lower(), is_text=True),
    Column("REQ/S", 6, lambda row: number_text(row.requests_per_s), lambda row: row.requests_per_s),
    Column("FAIL/S", 6, lambda row: number_text(row.failures_per_s or None), lambda row: row.failures_per_s),
    Column("P50", 6, lambda row: duration_text(row.p50_ms), lambda row: row.p50_ms),
    Column("P99", 6, lambda row: duration_text(row.p99_ms), lambda row: row.p99_ms),
    Column("QUEUE", 5, lambda row: number_text(row.queue_depth, 5), lambda row: row.queue_depth),
    Column("AGE", 5, _age_text, lambda row: row.queue_oldest_s),
    Column("BATCH", 5, lambda row: number_text(row.batch_size, 5), lambda row: row.batch_size),
    Column("USED", 4, lambda row: share_text(row.utilization), lambda row: row.utilization),
    Column("WRK", 3, lambda row: str(row.workers), lambda row: row.workers),
    Column("STATE", 6, lambda row: row.state, lambda row: row.state, is_text=True),
)
"""The columns. With one character between two of them they take 79. Durations are milliseconds, or have a unit."""

TABLE_WIDTH = sum(column.width for column in COLUMNS) + len(COLUMNS) - 1


def sort_rows(rows: Iterable[ModelRow], column: int, reverse: bool) -> list[ModelRow]:
    """The rows in the order of a column: numbers with the largest first, texts from a to z; `reverse`: the other way.

    Rows without a value come last either way. Rows with equal values are in the order of their names.
    """
    by = COLUMNS[column]
    named = sorted(rows, key=lambda row: row.name.lower())
    known = [row for row in named if by.order(row) not in (None, "")]
    unknown = [row for row in named if by.order(row) in (None, "")]
    known.sort(key=by.order, reverse=by.is_text == reverse)  # type: ignore[arg-type]  # of one type in a column
    return [*known, *unknown]


def filter_rows(rows: Iterable[ModelRow], text: str) -> list[ModelRow]:
    """The rows whose name contains `text`, or whose state is `text`; in any case of letters."""
    wanted = text.strip().lower()
    return [row for row in rows if wanted in row.name.lower() or wanted == row.state]


def problems_text(status: ClusterStatus | None, width: int) -> list[str]:
    """A line with the state and the number of findings, and one with the gravest of them, each of at most `width`."""
    if status is None:
        return ["collecting the state of the cluster…"]
    if status.state == "unreachable":
        return [_cut(one_line(f"unreachable: {status.error}"), width)]
    notes = sum(finding.level == "note" for finding in status.findings)
    lines = [f"{status.state}: {_count(len(status.findings) - notes, 'warning')}, {_count(notes, 'note')}"]
    if status.findings:
        lines.append(_cut(one_line(status.findings[0].text), width))
    return lines


def totals_text(cluster: Values, status: ClusterStatus | None) -> str:
    """The totals of all models and hosts, in one line of at most 80 characters."""
    parts = [
        f"{number_text(cluster.get('requests_per_s')) or _UNKNOWN} req/s",
        f"{number_text(cluster.get('failures_per_s')) or _UNKNOWN} fail/s",
    ]
    if p50 := duration_text(cluster.get("p50_ms")):
        parts.append(f"p50 {p50} p99 {duration_text(cluster.get('p99_ms'))} ms")
    parts.append(f"queue {number_text(cluster.get('queue_depth')) or _UNKNOWN}")
    for title, name in (("used", "utilization"), ("cpu", "cpu_utilization"), ("gpu", "gpu_utilization")):
        if text := share_text(cluster.get(name)):
            parts.append(f"{title} {text}")
    if status is not None and (letters := sum(dead.letters for dead in status.dead)):
        parts.append(f"dead {number_text(letters)}")
    return _cut("  ".join(parts), 80)


def roles_text(status: ClusterStatus | None) -> str:
    """How many processes of each role there are."""
    if status is None:
        return ""
    counts = {name: sum(role.role == name for role in status.roles) for name in ("gateway", "scheduler", "worker")}
    return ", ".join(_count(number, name) for name, number in counts.items())


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def cut_name(text: str, width: int) -> str:
    """`text` cut to `width`: its middle goes, because the end of a name often differs."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def table_lines(rows: Sequence[ModelRow], width: int = 80) -> list[str]:
    """The table as lines of plain text, at most `width` characters wide: the names get what the numbers leave."""
    name_width = COLUMNS[0].width + max(0, width - TABLE_WIDTH)
    widths = [name_width, *(column.width for column in COLUMNS[1:])]

    def line(texts: Iterable[str]) -> str:
        cells = [
            text.ljust(size) if column.is_text else text.rjust(size)
            for text, size, column in zip(texts, widths, COLUMNS, strict=True)
        ]
        return " ".join(cells).rstrip()

    lines = [line(column.title for column in COLUMNS)]
    for row in rows:
        lines.append(line([cut_name(row.name, name_width), *(column.text(row) for column in COLUMNS[1:])]))
    return lines

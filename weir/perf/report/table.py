"""`print_report`: a load test as tables for people, with what they should know about the figures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weir.perf.measurement.client_load import BUSY_MACHINE
from weir.perf.measurement.distribution import error_kind
from weir.perf.report.document import Durations, LevelReport, PerfReport

_SHORTFALL = 0.95


def print_report(report: PerfReport, console: Console, is_local: bool) -> None:
    """Prints the tables and the notes. `is_local`: the server runs on the client's machine."""
    console.print(Text(_title(report)))
    console.print(_main_table(report))
    if report.streaming:
        console.print(_stream_table(report))
    for line in notes(report, is_local):
        console.print(Text(line))


def _title(report: PerfReport) -> str:
    version = f" version {report.model_version}" if report.model_version else ""
    facts = [
        f"model {report.model}{version}",
        f"{report.protocol} {report.url} ({report.server})",
        f"batch size {report.batch_size}, {report.request_bytes} bytes a request",
    ]
    if report.arrivals:
        facts.append(f"{report.arrivals} arrivals")
    if report.sequence_length:
        facts.append(f"sequences of {report.sequence_length}")
    if report.streaming:
        facts.append("streams")
    if report.shared_memory != "none":
        facts.append(f"{report.shared_memory} shared memory")
    return "; ".join(facts)


def _main_table(report: PerfReport) -> Table:
    first = "in flight" if report.mode == "concurrency" else "rate"
    with_rows = report.batch_size > 1
    columns = [first, "req/s", *(["rows/s"] if with_rows else []), "avg ms", "p50", "p90", "p95", "p99", "failed"]
    columns += ["batch", "queue", "comp."]
    table = _table(*columns)
    for level in report.levels:
        server = level.server
        table.add_row(
            level.load,
            _number(level.requests_per_s),
            *([_number(level.inferences_per_s)] if with_rows else []),
            *_durations(level.latency_ms, "avg", "p50", "p90", "p95", "p99"),
            str(level.failed),
            _number(server.batch_size) if server else "",
            _number(server.queue_ms) if server else "",
            _number(server.compute_input_ms + server.compute_infer_ms + server.compute_output_ms) if server else "",
        )
    return table


def _stream_table(report: PerfReport) -> Table:
    first = "in flight" if report.mode == "concurrency" else "rate"
    table = _table(first, "responses/s", "first p50 ms", "p90", "p99", "between p50 ms", "p90", "p99")
    for level in report.levels:
        table.add_row(
            level.load,
            _number(level.responses_per_s),
            *_durations(level.first_response_ms, "p50", "p90", "p99"),
            *_durations(level.between_responses_ms, "p50", "p90", "p99"),
        )
    return table


def notes(report: PerfReport, is_local: bool) -> Iterator[str]:
    """What a reader should know about the figures, one line each: errors, the client's limits, unsettled levels."""
    yield from _failures(report)
    for level in report.levels:
        if level.unanswered:
            yield f"{_name(level)}: {level.unanswered} requests had no answer when the level ended"
    for text, applies in _FINDINGS:
        found = [level.load for level in report.levels if applies(level)]
        if found:
            yield f"{report.mode} {', '.join(found)}: {text}"
    for level in report.levels:
        for reason in level.client.limits:
            yield f"{_name(level)}: the client did not keep up, so the server may do better: {reason}"
    if is_local and any(level.client.machine_cpu >= BUSY_MACHINE for level in report.levels):
        yield "all processors of this machine were busy: client and server take them from each other"
    if report.interrupted:
        yield "the test was interrupted: the last level is incomplete"


def _failures(report: PerfReport) -> Iterator[str]:
    """One line for each kind of error, whatever the number of levels that have it."""
    counts: Counter[str] = Counter()
    texts: dict[str, str] = {}
    loads = defaultdict[str, list[str]](list)
    for level in report.levels:
        for error in level.errors:
            kind = error_kind(error.text)
            counts[kind] += error.count
            texts.setdefault(kind, error.text)
            loads[kind].append(level.load)
    for kind, count in counts.most_common():
        requests = "1 request" if count == 1 else f"{count} requests"
        yield f"{report.mode} {', '.join(loads[kind])}: {requests} failed: {texts[kind]}"


def _falls_short(level: LevelReport) -> bool:
    return level.rate is not None and level.succeeded > 0 and level.requests_per_s < _SHORTFALL * level.rate


_FINDINGS: list[tuple[str, Callable[[LevelReport], bool]]] = [
    ("fewer requests were answered than were due, so latency grows with time", _falls_short),
    (
        "not stable: the last windows differ; measure for longer (--measure), or with less load",
        lambda level: not level.stable and not level.interrupted and level.succeeded > 0 and not _falls_short(level),
    ),
    (
        "the server's statistics could not be read: no batch sizes and no times of the server",
        lambda level: level.server is None and not level.interrupted,
    ),
]


def _name(level: LevelReport) -> str:
    return f"{'rate' if level.concurrency is None else 'concurrency'} {level.load}"


def _durations(durations: Durations | None, *names: str) -> list[str]:
    return [_number(getattr(durations, name)) if durations else "" for name in names]


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _number(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}"

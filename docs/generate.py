"""Writes the parts of the documentation that follow from the code: `make docs`.

Each lies between two marker lines of a page. A test compares pages with what is generated here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import get_args

import weir.worker.python_stub
from docs import asyncapi, metrics, openapi, rights
from docs.bounds import BOUNDS
from docs.compatibility_rows import ABSENT, DIFFERENT, ENDPOINTS, METHODS, METRICS, SAME, Row, config_fields
from docs.scheduler_pictures import SCENARIOS, part_of, pictures
from docs.status_page import fields_of, status_advice, status_example, status_fields
from weir.commands.doctor.checks import CHECKS
from weir.options import SERVE, Option, options_of
from weir.options.secret import Secret
from weir.perf.report.document import PerfReport
from weir.schemas.wire.batches import BatchCompletion, BatchEntry, BatchMessage, CancelledRequests, DirectRuns
from weir.schemas.wire.calls import RequestEnvelope
from weir.schemas.wire.gateway_api import ApiRequest, ApiResponse
from weir.schemas.wire.observation import (
    BatchedRequest,
    BatchEndReport,
    BatchReport,
    ObserveRequest,
    TraceReport,
)

DOCS = Path(__file__).parent
_FROM_FILE = "[`@FILE`](../operations.md#keep-secrets-out-of-command-lines): the first line of that file."
_STATES = (SAME, DIFFERENT, ABSENT)

# Modules of the stub import each other as top-level modules, as they do in a model's process.
sys.path.append(weir.worker.python_stub.__path__[0])


def serve_options() -> str:
    """Tables of the options of `weir serve`, by group."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for option in options_of(SERVE).values():
        names = ", ".join(f"`{name}`" for name in option.names)
        meaning = f"{option.help} {_FROM_FILE}" if isinstance(option.value, Secret) else option.help
        groups.setdefault(option.panel, []).append((names, _default(option), meaning))
    tables = []
    for group, rows in groups.items():
        if any(default for _, default, _ in rows):
            table = _table(("option", "default", "meaning"), rows)
        else:
            table = _table(("option", "meaning"), [(names, meaning) for names, _, meaning in rows])
        tables.append(f"**{group}**\n\n{table}")
    return "\n\n".join(tables)


def option_rows() -> list[Row]:
    """Triton's options: which are the same, which are not and how, which are absent and why."""
    rows = []
    for option in options_of(SERVE).values():
        if option.refused:
            state, how = ABSENT, f"Refused: {option.refused}."
        elif option.ineffective:
            state, how = ABSENT, f"Accepted without effect: {option.ineffective}."
        elif option.differs:
            state, how = DIFFERENT, option.differs
        else:
            state, how = SAME, ""
        if not option.ours:
            rows.append(Row("`, `".join(option.names), state, how))
    return rows


def compatibility_counts() -> str:
    """How many rows of each generated table of `compatibility.md` are the same, different and absent."""
    tables = {
        "HTTP endpoints": ENDPOINTS,
        "gRPC methods": METHODS,
        "fields of `config.pbtxt`": config_fields(),
        "metrics": METRICS,
        "options": option_rows(),
    }
    return _table(
        ("of Triton's", *_STATES),
        ((name, *(str(sum(row.state == state for row in rows)) for state in _STATES)) for name, rows in tables.items()),
    )


def _default(option: Option) -> str:
    if option.shown_default is not None:
        return f"`{option.shown_default}`" if "$" in option.shown_default else option.shown_default
    return "" if option.default in (None, "") else f"`{option.value.write(option.default)}`"


def message_fields() -> str:
    """The messages between roles, with their fields."""
    envelope, entry, batch, cancelled, runs = (
        ", ".join(fields)
        for fields in (
            RequestEnvelope._fields,
            BatchEntry._fields,
            BatchMessage.__struct_fields__,
            CancelledRequests._fields,
            DirectRuns._fields,
        )
    )
    completion = " or ".join(
        f"({', '.join((str(kind.__struct_config__.tag), *kind.__struct_fields__))})"
        for kind in get_args(BatchCompletion)
    )
    api_request, api_response, observe, batch_report, batch_end, trace_report = (
        ", ".join(record.__struct_fields__)
        for record in (ApiRequest, ApiResponse, ObserveRequest, BatchReport, BatchEndReport, TraceReport)
    )
    batched = ", ".join(BatchedRequest._fields)
    rows = [
        ("frame", "gateway → scheduler", f"gateway, [envelope …] with envelope = ({envelope})"),
        ("batches", "scheduler → worker", f"[batch …] with batch = ({batch}) and entry = ({entry})"),
        (
            "responses",
            "worker → gateway",
            "version, [response …] with response = (key, outputs, parameters) or (key, code, text), followed by is_final, "
            "timestamps, run and number if there are several responses or a trace",
        ),
        (
            "completions",
            "worker → scheduler",
            f"worker, [completion …], [direct runs …] with completion = {completion} and direct runs = ({runs}), which "
            "few messages have",
        ),
        ("cancel", "gateway → scheduler", "gateway, keys"),
        ("cancelled requests", "scheduler → worker", f"scheduler, [({cancelled}) …]"),
        ("lost attempts", "scheduler → gateway", "keys of durable requests that run again, reason"),
        ("release", "gateway → worker", "[(segment, slot, generation) …]"),
        (
            "drain",
            "worker → scheduler, and its answer",
            "sender, model, versions to unload, or that may be unloaded, partition of the answer",
        ),
        (
            "started sequences",
            "scheduler → worker, and its answer",
            "model, partition; the answer is worker, [(version, correlation id, age in us) …], whether these are all",
        ),
        (
            "fetch",
            "gateway, worker → the owner of a payload, on a link",
            "(segment, slot, generation, offset, size) of a piece",
        ),
        ("readiness", "gateway, worker → worker", "model, version; the answer is whether it is ready"),
        ("API request", "console → gateway, and its answer", f"{api_request}; the answer is {api_response}"),
        ("observe request", "console → gateways, schedulers", observe),
        ("batch report", "scheduler → console", f"{batch_report} with request = ({batched})"),
        ("batch end report", "scheduler → console", batch_end),
        ("trace report", "gateway → console", trace_report),
        ("repository view", "worker → gateway", "worker, the problem of each model by name (empty: none)"),
    ]
    return _table(("message", "way", "fields"), rows)


def bounds() -> str:
    """The bounds, with their values, by package."""
    parts = []
    for title, group in BOUNDS.items():
        rows = []
        for bound in group:
            value = getattr(import_module(bound.module), bound.constant)
            rows.append((bound.what, _with_unit(bound.constant, value), bound.beyond, f"`{bound.constant}`"))
        parts.append(f"## {title}\n\n{_table(('what', 'limit', 'beyond it', 'constant'), rows)}")
    return "\n\n".join(parts)


def _with_unit(name: str, value: float) -> str:
    if name.endswith("_S"):
        return f"{value:g} s"
    if not name.endswith("BYTES") and name != "MAX_PAYLOAD":
        return f"{value:,}".replace(",", " ")
    return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"


def doctor_checks() -> str:
    """A table of the checks of `weir doctor`."""
    return _table(("check", "looks at", "wants"), [(check.name, check.looks_at, check.wants) for check in CHECKS])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _rows(rows: Iterable[Row], head: str) -> Callable[[], str]:
    """A table of `rows`, made when the page is."""
    return lambda: _table((head, "state", "how, or why not"), [(f"`{row.name}`", row.state, row.how) for row in rows])


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "reference/messages.md": {"messages": message_fields},
    "reference/bounds.md": {"bounds": bounds},
    "reference/access.md": {"rights": rights.tables},
    "reference/http-api.md": {"operations": openapi.endpoints},
    "reference/nats-api.md": {"channels": asyncapi.channels},
    "reference/errors.md": {"errors": openapi.errors},
    "reference/metrics.md": {"metrics": metrics.table},
    "reference/options.md": {"serve options": serve_options},
    "doctor.md": {"doctor checks": doctor_checks},
    "status.md": {"status example": status_example, "status advice": status_advice, "status fields": status_fields},
    "perf.md": {"perf fields": partial(fields_of, PerfReport)},
    "schedulers.md": {scenario.name: partial(part_of, scenario) for scenario in SCENARIOS},
    "compatibility.md": {
        "counts": compatibility_counts,
        "endpoints": _rows(ENDPOINTS, "endpoint"),
        "methods": _rows(METHODS, "method"),
        "configuration fields": _rows(config_fields(), "field"),
        "metrics": _rows(METRICS, "metric"),
        "options": _rows(option_rows(), "option"),
    },
}
"""Generated parts by page and marker."""


def with_parts(page: str, text: str) -> str:
    """`text` of `page` with its generated parts as they are now. Raises ValueError when a marker is missing."""
    for marker, make in PARTS[page].items():
        begin, end = f"<!-- generated: {marker} -->", f"<!-- end: {marker} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page} has no part {marker!r}")
        part = f"{begin}\n\n{make()}\n\n{end}"
        text = pattern.sub(lambda _, part=part: part, text)
    return text


def main() -> None:
    """Writes what is stale. With `--check` it writes nothing, and fails if a page, picture or contract is stale."""
    stale = []
    wanted = {page: with_parts(page, (DOCS / page).read_text()) for page in PARTS}
    wanted |= {f"pictures/{name}": picture for name, picture in pictures().items()}
    for name, contract in (("openapi", openapi.document()), ("asyncapi", asyncapi.document())):
        wanted[f"reference/{name}.json"] = json.dumps(contract, indent=1, ensure_ascii=False) + "\n"
    for name, after in wanted.items():
        path = DOCS / name
        if path.exists() and path.read_text() == after:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(after)
    if stale and "--check" in sys.argv:
        sys.exit(f"not as generated, so run make docs: {', '.join(stale)}")


if __name__ == "__main__":
    main()

"""`findings_of`: puts alike problems into one line each, so that one cause does not fill a page."""

from __future__ import annotations

from collections.abc import Sequence

from weir.cluster.status.snapshot import Finding, Kind, Level, Problem

JOINED_FROM = 3
"""So many alike problems become one line; fewer stay as they are, with all they say."""

SHOWN_NAMES = 3
"""Names in a line of several problems."""

_SEVERAL: dict[Kind, str] = {
    "silent process": "{} processes do not reply",
    "leaving": "{} processes are leaving",
    "model without worker": "{} models have no worker",
    "scaled to zero": "{} models are scaled to zero",
    "overloaded": "{} models are overloaded",
    "repository unreadable": "{} repositories of workers can't be read",
    "model fails": "{} models fail",
    "split version not ready": "{} models have versions in their traffic rules that are not ready",
    "change rejected": "{} models still serve the versions loaded before: their changed files can't be loaded",
    "queue without owner": "{} queues have no scheduler that owns them",
    "queue with two owners": "{} queues are claimed by several schedulers",
    "queue waits": "{} queues have live requests that have waited for long",
    "stream stores nothing": "{} streams store nothing",
    "stream nearly full": "{} streams are nearly full",
    "stream without leader": "{} streams have no leader: they accept no messages",
    "replica behind": "{} NATS servers are offline or behind",
    "dead letters": "{} models have dead letters",
}
"""The line for several problems of a kind. Kinds that are not here occur once."""


def findings_of(problems: Sequence[Problem]) -> list[Finding]:
    """The problems in their order, with those of one kind and level in one line where there are `JOINED_FROM` or more."""
    found: list[Finding] = []
    alike: dict[tuple[Level, Kind], list[Problem]] = {}
    for problem in problems:
        alike.setdefault((problem.level, problem.kind), []).append(problem)
    for (level, kind), of_kind in alike.items():
        if len(of_kind) < JOINED_FROM or kind not in _SEVERAL:
            found += [_single(problem) for problem in of_kind]
            continue
        about = sorted({problem.about for problem in of_kind})
        text = f"{_SEVERAL[kind].format(len(of_kind))}: {_names(about)}"
        texts = [problem.text for problem in of_kind]
        found.append(Finding(level=level, kind=kind, about=about, text=text, advice=of_kind[0].advice, texts=texts))
    return found


def _single(problem: Problem) -> Finding:
    about = [problem.about] if problem.about else []
    return Finding(level=problem.level, kind=problem.kind, about=about, text=problem.text, advice=problem.advice)


def _names(names: Sequence[str]) -> str:
    left = len(names) - SHOWN_NAMES
    if left <= 0:
        return ", ".join(names)
    return f"{', '.join(names[:SHOWN_NAMES])} and {left} more"

"""Families of metrics, and Prometheus's text format as Triton writes it.

Not prometheus_client's exposition: that adds `_total` to the names of counters and writes whole numbers as `5.0`; Triton
does neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

CONTENT_TYPE = "text/plain; charset=utf-8"

Labels = Mapping[str, str]
NO_LABELS: Labels = {}


class Sample(NamedTuple):
    """One line: `suffix` is appended to the family's name."""

    labels: Labels
    value: float
    suffix: str = ""


class Family(NamedTuple):
    """A metric: its name, help text and type, and its samples, of which there may be none yet."""

    name: str
    help: str
    kind: str
    samples: Sequence[Sample] = ()


def counter(name: str, help: str, samples: Iterable[Sample] = ()) -> Family:
    """A family of counters."""
    return Family(name, help, "counter", list(samples))


def gauge(name: str, help: str, samples: Iterable[Sample] = ()) -> Family:
    """A family of gauges."""
    return Family(name, help, "gauge", list(samples))


def histogram_samples(labels: Labels, bounds: Sequence[float], counts: Sequence[int], total: float) -> Iterable[Sample]:
    """The samples of one histogram; `counts` has one more than there are `bounds`, and none of them is cumulative."""
    reached = 0
    yield Sample(labels, sum(counts), "_count")
    yield Sample(labels, total, "_sum")
    for bound, count in zip(bounds, counts, strict=False):
        reached += count
        if bound != math.inf:  # the last one stands for that, whether or not somebody named it
            yield Sample({**labels, "le": _number(bound)}, reached, "_bucket")
    yield Sample({**labels, "le": "+Inf"}, sum(counts), "_bucket")


def render(families: Iterable[Family]) -> bytes:
    """The page: HELP and TYPE of every family, and its samples."""
    lines: list[str] = []
    for name, help, kind, samples in families:
        lines.append(f"# HELP {name} {_escaped(help)}")
        lines.append(f"# TYPE {name} {kind}")
        lines += [f"{name}{suffix}{_labels(labels)} {_number(value)}" for labels, value, suffix in samples]
    lines.append("")
    return "\n".join(lines).encode()


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped_value(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escaped_value(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1 << 53 else repr(value)

"""Families of metrics, and Prometheus's text format as Triton writes it.

The exposition of prometheus_client adds `_total` to the names of counters and writes whole numbers as `5.0`; Triton does
neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

CONTENT_TYPE = "text/plain; charset=utf-8"

Labels = Mapping[str, str]
NO_LABELS: Labels = {}


class Sample(NamedTuple):
    """One line of the page: `suffix` is appended to the family's name."""

    labels: Labels
    value: float
    suffix: str = ""


class MetricFamily(NamedTuple):
    """A metric: its name, help text, type, and samples, of which there may be none."""

    name: str
    help: str
    kind: str
    samples: Sequence[Sample] = ()


def counter(name: str, help: str, samples: Iterable[Sample] = ()) -> MetricFamily:
    """A family of counters."""
    return MetricFamily(name, help, "counter", list(samples))


def gauge(name: str, help: str, samples: Iterable[Sample] = ()) -> MetricFamily:
    """A family of gauges."""
    return MetricFamily(name, help, "gauge", list(samples))


def histogram_samples(labels: Labels, bounds: Sequence[float], counts: Sequence[int], total: float) -> Iterable[Sample]:
    """The samples of one histogram; `counts` has one more than there are `bounds`, and none of them is cumulative."""
    reached = 0
    yield Sample(labels, sum(counts), "_count")
    yield Sample(labels, total, "_sum")
    for bound, count in zip(bounds, counts, strict=False):
        reached += count
        if bound != math.inf:  # the last bucket is +Inf, whether or not it is in `bounds`
            yield Sample({**labels, "le": _number(bound)}, reached, "_bucket")
    yield Sample({**labels, "le": "+Inf"}, sum(counts), "_bucket")


def render(families: Iterable[MetricFamily]) -> bytes:
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

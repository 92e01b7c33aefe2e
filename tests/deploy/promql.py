"""PromQL as Prometheus reads it: which metrics an expression asks for, by a parser that is not ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser

_GRAFANA = {"$__rate_interval": "5m", "$__interval": "1m", "$__range": "1h"}
_CHILDREN = ("expr", "lhs", "rhs", "param", "vector_selector")


def asked(expression: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels that are matched) for each selector. Raises ValueError for what is no PromQL."""
    for name, value in _GRAFANA.items():
        expression = expression.replace(name, value)
    yield from _selectors(promql_parser.parse(re.sub(r"\$\{?model\b\}?", ".*", expression)))


def _selectors(node: Any) -> Iterator[tuple[str, set[str]]]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name, {matcher.name for matcher in node.matchers.matchers}
        return
    for name in _CHILDREN:
        child = getattr(node, name, None)
        if child is not None:
            yield from _selectors(child)
    for argument in getattr(node, "args", None) or ():
        yield from _selectors(argument)

"""`Level`: one amount of load; `parse_levels`: the levels of a sweep from text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

MAX_LEVELS = 100
MAX_CONCURRENCY = 10_000


class Mode(StrEnum):
    """How requests are sent: the next when one is answered (concurrency), or by the clock (rate)."""

    CONCURRENCY = "concurrency"
    RATE = "rate"


class Level(NamedTuple):
    """`value` requests in flight, or `value` requests per second."""

    mode: Mode
    value: float

    def __str__(self) -> str:
        return f"concurrency {self.value:g}" if self.mode is Mode.CONCURRENCY else f"{self.value:g} requests/s"


def parse_levels(mode: Mode, text: str) -> list[Level]:
    """The levels that `text` names: `4`, `1,2,8`, `FIRST:LAST`, `FIRST:LAST:STEP` or `FIRST:LAST:xFACTOR`.

    `1:8` has step 1, `1:64:x2` doubles. The last value is included if a step ends there. Raises ValueError.
    """
    try:
        values = list(itertools.islice(_values(text), MAX_LEVELS + 1))
    except ValueError as error:
        raise ValueError(
            f"{text!r} names no levels: {error}. Give a number, a list as 1,2,8, or a range as 1:8, 100:1000:100 or 1:64:x2"
        ) from None
    if len(values) > MAX_LEVELS:
        raise ValueError(f"{text!r} names more than {MAX_LEVELS} levels")
    if mode is Mode.CONCURRENCY:
        wrong = next((value for value in values if value != int(value) or value > MAX_CONCURRENCY), None)
        if wrong is not None:
            raise ValueError(f"a concurrency must be a whole number from 1 to {MAX_CONCURRENCY}, not {wrong:g}")
    return [Level(mode, value) for value in values]


def _values(text: str) -> Iterator[float]:
    if ":" not in text:
        yield from map(_positive, text.split(","))
        return
    first_text, last_text, *more = text.split(":")
    if len(more) > 1:
        raise ValueError("a range has at most three parts")
    first, last = _positive(first_text), _positive(last_text)
    step_text = more[0] if more else "1"
    grows_by_factor = step_text.startswith("x")
    step = _positive(step_text.removeprefix("x"))
    if last < first:
        raise ValueError(f"{last:g} is below {first:g}")
    if grows_by_factor and step <= 1:
        raise ValueError(f"the factor must be above 1, not {step:g}")
    for number in itertools.count():
        value = first * step**number if grows_by_factor else first + step * number
        if value > last * (1 + 1e-9):
            return
        yield value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{text} is not above 0")
    return value

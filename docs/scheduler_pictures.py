"""The pictures of `docs/schedulers.md`: what the scheduler's own policies do with a few requests, on a made-up clock.

The configuration of each picture is the one that stands beside it on the page, so neither can be wrong alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

from docs.timeline import Bar, Mark, Timeline
from weir.repository.completion import normalize
from weir.repository.config_text import parse_config
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.request import NO_FRAME, QueuedRequest, requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START
from weir.schemas.wire.batches import BatchEnded
from weir.schemas.wire.calls import RequestEnvelope

_WITHOUT_OWNER = 5
_ANY_TENSORS = """
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
backend: "python"
"""


class Asked(NamedTuple):
    """A request of the picture: when it comes, what it is called, and what its caller said."""

    at_us: int
    label: str
    colour: int = 0
    rows: int = 1
    priority: int = 0
    timeout_us: int = 0
    sequence: int = 0
    flags: int = 0


class Scenario(NamedTuple):
    """A picture: `config` is what stands in `config.pbtxt`, `service_us` how long a batch of so many rows takes."""

    name: str
    title: str
    config: str
    asked: list[Asked]
    service_us: Callable[[int], int]
    end_us: int
    instances: int = 1


def sequence(number: int, label: str, times_us: Iterable[int]) -> list[Asked]:
    """The requests of one sequence, begun with the first and ended with the last."""
    times = list(times_us)
    return [
        Asked(
            at_us,
            f"{label}{place}",
            (number - 1) % _WITHOUT_OWNER,
            sequence=number,
            flags=(SEQUENCE_START if place == 0 else 0) | (SEQUENCE_END if place == len(times) - 1 else 0),
        )
        for place, at_us in enumerate(times)
    ]


SCENARIOS = (
    Scenario(
        "default",
        "Default scheduler: requests run alone, in the order they came, on whichever instance is free",
        "max_batch_size: 0\ninstance_group [ { count: 2 kind: KIND_CPU } ]\n",
        [Asked(at_us, name) for at_us, name in zip(range(0, 3500, 500), "abcdefg", strict=True)],
        lambda _rows: 1500,
        6000,
        instances=2,
    ),
    Scenario(
        "dynamic",
        "Dynamic batcher: what waits together runs together, and a batch may wait a little for company",
        """max_batch_size: 8
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 1000
}
instance_group [ { count: 1 kind: KIND_CPU } ]
""",
        [
            *(Asked(at_us, name) for at_us, name in zip((0, 200, 400, 600), "abcd", strict=True)),
            *(Asked(at_us, name) for at_us, name in zip((900, 1100, 1300, 1500, 1700), "efghi", strict=True)),
            Asked(5200, "j"),
            Asked(5600, "k", rows=2),
        ],
        lambda rows: 1000 + 150 * rows,
        8500,
    ),
    Scenario(
        "priority",
        "Priorities and timeouts: level 1 goes first; what has waited too long is refused, or goes last",
        """max_batch_size: 2
dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy {
    timeout_action: DELAY
    default_timeout_microseconds: 3000
  }
  priority_queue_policy {
    key: 1
    value { timeout_action: REJECT default_timeout_microseconds: 2500 }
  }
}
instance_group [ { count: 1 kind: KIND_CPU } ]
""",
        [
            *(
                Asked(at_us, f"low {name}", 0, priority=2)
                for name, at_us in zip("abcdef", range(0, 600, 100), strict=True)
            ),
            *(Asked(at_us, f"high {at}", 1, priority=1) for at, at_us in enumerate((500, 700, 900, 1100, 1300, 1500))),
            Asked(4700, "low g", 0, priority=2),
        ],
        lambda _rows: 1500,
        10000,
    ),
    Scenario(
        "direct",
        "Sequence batcher, direct: each sequence has a row of one instance until its end; idle rows are filled",
        """max_batch_size: 3
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  direct { }
}
instance_group [ { count: 1 kind: KIND_CPU } ]
""",
        [
            *sequence(1, "A", (0, 1500, 3000)),
            *sequence(2, "B", (0, 3000, 5500)),
            *sequence(3, "C", (0, 1500, 3000, 5500)),
            *sequence(4, "D", (2000, 5500)),
        ],
        lambda _rows: 1200,
        8000,
    ),
    Scenario(
        "oldest",
        "Sequence batcher, oldest: one request of each sequence at a time, the oldest first, in batches without gaps",
        """max_batch_size: 2
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  oldest { max_candidate_sequences: 4 }
}
instance_group [ { count: 1 kind: KIND_CPU } ]
""",
        [
            *sequence(1, "A", (0, 100, 200)),
            *sequence(2, "B", (300, 400)),
            *sequence(3, "C", (500, 2800)),
            *sequence(4, "D", (700, 900)),
        ],
        lambda _rows: 1200,
        7500,
    ),
)


class _Run:
    """One scenario, event by event: arrivals, ends of batches, and the times at which the policy wants to be asked."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        text = f'name: "model"\n{scenario.config}{_ANY_TENSORS}'
        config = normalize(parse_config(text.encode(), "config.pbtxt"), [])
        self._model = ModelScheduler("model")
        self._model.configure(1, config)
        self._model.set_instances("worker", {1: scenario.instances})
        instances = [f"instance {number}" for number in range(scenario.instances)]
        self._rows = instances
        self.timeline = Timeline(["requests", *instances], scenario.end_us)
        self._free_us = [0] * scenario.instances
        self._asked: dict[int, Asked] = {}
        self._order = count()
        self._events: list[tuple[int, int, Callable[[int], None]]] = []

    def draw(self) -> None:
        """Runs it to the end."""
        for key, asked in enumerate(self._scenario.asked):
            self._asked[key] = asked
            self.timeline.add(Mark("requests", asked.at_us, asked.label, asked.colour))
            self._at(asked.at_us, lambda now_us, key=key: self._come(now_us, key))
        while self._events:
            now_us = self._events[0][0]
            while self._events and self._events[0][0] == now_us:
                heapq.heappop(self._events)[2](now_us)
            self._dispatch(now_us)

    def _at(self, at_us: int, what: Callable[[int], None]) -> None:
        heapq.heappush(self._events, (at_us, next(self._order), what))

    def _come(self, now_us: int, key: int) -> None:
        asked = self._asked[key]
        part = RequestEnvelope(
            key, -1, asked.rows, "", asked.priority, asked.timeout_us, 0, asked.sequence, asked.flags, "", b""
        )
        self._refused(
            now_us,
            [failure.request for failure in self._model.enqueue(requests_of("gateway", [part], now_us, NO_FRAME))],
        )

    def _dispatch(self, now_us: int) -> None:
        self._refused(now_us, [failure.request for failure in self._model.overdue(now_us)[1]])
        batches, wake_us = self._model.dispatch(now_us)
        for batch in batches:
            number = batch.instance.number
            start_us = max(now_us, self._free_us[number])
            took_us = self._scenario.service_us(sum(request.batch_size for request in batch.requests))
            self._free_us[number] = start_us + took_us
            self.timeline.add(Bar(self._rows[number], start_us, start_us + took_us, self._cells(batch)))
            self._at(start_us + took_us, lambda now_us, batch=batch, took_us=took_us: self._end(now_us, batch, took_us))
        if wake_us is not None and wake_us > now_us:
            self._at(wake_us, lambda _now_us: None)

    def _end(self, now_us: int, batch: Batch, took_us: int) -> None:
        self._model.complete(now_us, BatchEnded(batch.id, took_us))

    def _refused(self, now_us: int, requests: Iterable[QueuedRequest]) -> None:
        for request in requests:
            asked = self._asked[request.key]
            self.timeline.add(Mark("requests", now_us, asked.label, asked.colour, is_end=True))

    def _cells(self, batch: Batch) -> tuple[tuple[str, int], ...]:
        cells = [(self._text(request), self._asked[request.key].colour) for request in batch.requests]
        for row in batch.padding_rows:
            cells.insert(row, ("·", _WITHOUT_OWNER))
        return tuple(cells)

    def _text(self, request: QueuedRequest) -> str:
        asked = self._asked[request.key]
        return asked.label if asked.rows == 1 else f"{asked.label} ×{asked.rows}"


def pictures() -> dict[str, str]:
    """The pictures by file name."""
    drawn: dict[str, str] = {}
    for scenario in SCENARIOS:
        run = _Run(scenario)
        run.draw()
        drawn[f"{scenario.name}.svg"] = run.timeline.svg(scenario.title)
    return drawn


def part_of(scenario: Scenario) -> str:
    """The configuration and the picture of a scenario, as they stand on the page."""
    return f"```text\n{scenario.config}```\n\n![{scenario.title}](pictures/{scenario.name}.svg)\n\n*{scenario.title}.*"

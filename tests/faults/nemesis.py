"""`Nemesis`: decides by a seed which fault happens when. Sans-IO: it receives the time and returns actions."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Kinds of actions on processes."""

    KILL = "kill"
    STOP = "stop"
    CONTINUE = "continue"
    END = "end"


class Action(NamedTuple):
    """An action on processes. With `step` they are killed while a request is at that step."""

    kind: Kind
    names: tuple[str, ...]
    step: str = ""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Faults start `every_s` apart on average, until `until_s`; a pause lasts up to `longest_pause_s`."""

    every_s: float = 2.0
    until_s: float = 60.0
    longest_pause_s: float = 3.0
    steps: tuple[str, ...] = ()
    """Steps at which some kills happen."""


_MIX = {"kill": 6, "kill at a step": 6, "pause": 3, "end": 2, "kill several": 2, "kill twice": 1}
_SHORTEST_PAUSE_S = 0.1
_TWICE_S = 0.3


class Nemesis:
    """Decides which fault happens when. `names` are the processes it may affect."""

    def __init__(self, seed: int, names: Sequence[str], habits: Habits) -> None:
        self._draw = random.Random(seed)
        self._names = sorted(names)
        self._habits = habits
        self._next_s = 0.0
        self._draw_next(0.0)
        self._later: list[tuple[float, int, Action]] = []
        self._count = 0
        self.faults = 0
        """Number of faults started."""

    @property
    def next_s(self) -> float | None:
        """Time of the next call; None when all faults are over and all suspended processes run again."""
        times = [when for when, _, _ in self._later[:1]]
        if self._next_s < self._habits.until_s:
            times.append(self._next_s)
        return min(times, default=None)

    def due(self, now_s: float) -> list[Action]:
        """The actions due by now, in order. Overdue actions are spread out."""
        actions: list[Action] = []
        while self._later and self._later[0][0] <= now_s:
            actions.append(heapq.heappop(self._later)[2])
        if self._next_s <= now_s and self._next_s < self._habits.until_s:
            self.faults += 1
            actions.append(self._begin(now_s))
            self._draw_next(now_s)
        return actions

    def _draw_next(self, now_s: float) -> None:
        self._next_s = now_s + self._habits.every_s * self._draw.uniform(0.5, 1.5)

    def _begin(self, now_s: float) -> Action:
        draw = self._draw
        kind = draw.choices(list(_MIX), list(_MIX.values()))[0]
        name = draw.choice(self._names)
        if kind == "kill several":
            return Action(Kind.KILL, tuple(draw.sample(self._names, draw.randint(2, len(self._names)))))
        if kind == "kill at a step" and self._habits.steps:
            return Action(Kind.KILL, (name,), draw.choice(self._habits.steps))
        if kind == "pause":
            lasts_s = draw.uniform(min(_SHORTEST_PAUSE_S, self._habits.longest_pause_s), self._habits.longest_pause_s)
            self._do_later(now_s + lasts_s, Action(Kind.CONTINUE, (name,)))
            return Action(Kind.STOP, (name,))
        if kind == "end":
            return Action(Kind.END, (name,))
        if kind == "kill twice":
            self._do_later(now_s + _TWICE_S, Action(Kind.KILL, (name,)))
        return Action(Kind.KILL, (name,))

    def _do_later(self, when_s: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._later, (when_s, self._count, action))

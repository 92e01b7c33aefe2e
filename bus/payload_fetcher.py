"""`PayloadFetcher`: brings payloads from their owners on other hosts by core NATS: no stream, no scheduler sees them.

What is asked for, and when a payload is given up, is `FetchPlan`'s matter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from bus import subjects
from bus.connection import Bus, Message
from bus.fetch_plan import PIECE_BYTES, Ask, Ended, FetchPlan, Outcome
from bus.identity import owner_of
from schemas.fetches import pack_fetch
from schemas.tensors import PayloadRef

_TICK_S = 0.05
_SPARE_BYTES = 4096


class PayloadFetcher:
    """See the module. `reader` is this process; all of it is in the event loop."""

    def __init__(self, bus: Bus, reader: str) -> None:
        self._bus = bus
        self._reader = reader
        self._plan: FetchPlan | None = None
        self._listeners: dict[int, Callable[[Outcome], None]] = {}
        self._tick: asyncio.TimerHandle | None = None
        self.fetched_bytes = 0
        self.lost = 0

    async def start(self) -> None:
        """Listens for pieces."""
        await self._bus.subscribe(f"{subjects.fetched(self._reader)}.*.*", self._on_piece)

    def fetch(self, ref: PayloadRef, on_end: Callable[[Outcome], None]) -> int:
        """Calls `on_end` once with the bytes behind `ref`, or why there are none, later and from the event loop."""
        if self._plan is None:
            self._plan = FetchPlan(max(_SPARE_BYTES, min(PIECE_BYTES, self._bus.max_payload_bytes - _SPARE_BYTES)))
        number, actions = self._plan.begin(ref, time.monotonic())
        self._listeners[number] = on_end
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(_TICK_S, self._on_tick)
        if actions and isinstance(actions[0], Ended):
            asyncio.get_running_loop().call_soon(self._do, actions)
        else:
            self._do(actions)
        return number

    def give_up(self, number: int) -> None:
        """Nobody wants what this fetch brings."""
        self._listeners.pop(number, None)
        if self._plan is not None:
            self._do(self._plan.give_up(number))

    def _do(self, actions: Sequence[Ask | Ended]) -> None:
        for action in actions:
            if isinstance(action, Ask):
                owner = owner_of(action.piece.segment)
                reply = f"{subjects.fetched(self._reader)}.{action.fetch}.{action.number}"
                self._bus.publish(subjects.fetch(owner), pack_fetch(action.piece), reply)
        for action in actions:
            if isinstance(action, Ended) and (listener := self._listeners.pop(action.fetch, None)) is not None:
                if isinstance(action.outcome, (bytes, memoryview)):
                    self.fetched_bytes += len(action.outcome)
                else:
                    self.lost += 1
                listener(action.outcome)

    def _on_piece(self, message: Message) -> None:
        *_, fetch, piece = message.subject.split(".")
        if self._plan is None or not (fetch.isdecimal() and piece.isdecimal()):
            return
        now_s = time.monotonic()
        if message.status:
            self._do(self._plan.nobody(int(fetch), now_s))
        else:
            self._do(self._plan.received(int(fetch), int(piece), message.data, now_s))

    def _on_tick(self) -> None:
        self._tick = None
        if self._plan is None:
            return
        self._do(self._plan.tick(time.monotonic(), self._bus.is_connected))
        if len(self._plan):
            self._tick = asyncio.get_running_loop().call_later(_TICK_S, self._on_tick)

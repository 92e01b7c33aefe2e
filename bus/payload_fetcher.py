"""`PayloadFetcher`: brings payloads from their owners on other hosts: no stream, no scheduler sees them.

They come on a connection to the owner itself (`DirectLinks`), where there is one, else in pieces by core NATS: what is
asked for there, and when a payload is given up, is `FetchPlan`'s matter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count

from bus import subjects
from bus.connection import Bus, Message
from bus.direct_links import ADDRESS_FETCH, DirectLinks
from bus.fetch_plan import MAX_FETCHED_BYTES, PIECE_BYTES, Ask, Ended, FetchPlan, Outcome
from bus.identity import owner_of
from runtime.containment import call_each, contained
from schemas.fetches import pack_fetch
from schemas.tensors import PayloadRef

_TICK_S = 0.05
_IDLE_TICK_S = 5.0
_SPARE_BYTES = 4096


class PayloadFetcher:
    """See the module. `reader` is this process; all of it is in the event loop."""

    def __init__(self, bus: Bus, reader: str) -> None:
        self._bus = bus
        self._reader = reader
        self._plan: FetchPlan | None = None
        self._links: DirectLinks | None = None
        self._numbers = count(ADDRESS_FETCH + 1)
        self._listeners: dict[int, Callable[[Outcome], None]] = {}
        self._tick: asyncio.TimerHandle | None = None
        self._is_busy = False
        self.fetched_bytes = 0
        """By the broker."""
        self.lost = 0

    @property
    def direct_bytes(self) -> int:
        """What came on connections to owners themselves."""
        return 0 if self._links is None else self._links.fetched_bytes

    async def start(self, background: asyncio.TaskGroup | None = None) -> None:
        """Listens for pieces. Without `background` there are no connections to owners."""
        if background is not None:
            self._links = DirectLinks(self._bus, self._reader, background, self._do, self._by_broker)
        await self._bus.subscribe(f"{subjects.fetched(self._reader)}.*.*", self._on_piece)

    def fetch(self, ref: PayloadRef, on_end: Callable[[Outcome], None]) -> int:
        """Calls `on_end` once with the bytes behind `ref`, or why there are none, later and from the event loop."""
        number = next(self._numbers)
        self._listeners[number] = on_end
        links = self._links
        is_direct = links is not None and 0 < ref.size <= MAX_FETCHED_BYTES
        if not (is_direct and links is not None and links.takes(number, owner_of(ref.segment), ref)):
            self._by_broker([(number, ref)])
        if self._tick is None or not self._is_busy:
            self._tick_after(_TICK_S)
        return number

    def give_up(self, number: int) -> None:
        """Nobody wants what this fetch brings."""
        self._listeners.pop(number, None)
        if self._links is not None:
            self._links.give_up(number)
        if self._plan is not None:
            self._do(self._plan.give_up(number))

    def close(self) -> None:
        """Ends the connections to owners; nothing comes any more."""
        if self._tick is not None:
            self._tick.cancel()
        if self._links is not None:
            self._links.close()

    def _by_broker(self, fetches: Sequence[tuple[int, PayloadRef]]) -> None:
        if self._plan is None:
            self._plan = FetchPlan(max(_SPARE_BYTES, min(PIECE_BYTES, self._bus.max_payload_bytes - _SPARE_BYTES)))
        for number, ref in fetches:
            actions = self._plan.begin(number, ref, time.monotonic())
            if actions and isinstance(actions[0], Ended):
                asyncio.get_running_loop().call_soon(self._count, actions)
            else:
                self._count(actions)

    def _count(self, actions: Sequence[Ask | Ended]) -> None:
        for action in actions:
            if isinstance(action, Ended) and isinstance(action.outcome, (bytes, memoryview)):
                self.fetched_bytes += len(action.outcome)
        self._do(actions)

    def _do(self, actions: Sequence[Ask | Ended]) -> None:
        for action in actions:
            if isinstance(action, Ask):
                owner = owner_of(action.piece.segment)
                reply = f"{subjects.fetched(self._reader)}.{action.fetch}.{action.number}"
                self._bus.publish(subjects.fetch(owner), pack_fetch(action.piece), reply)
        for action in actions:
            if isinstance(action, Ended) and (listener := self._listeners.pop(action.fetch, None)) is not None:
                self.lost += not isinstance(action.outcome, (bytes, memoryview))
                call_each(
                    "bus.payload_fetcher: the request that a payload was fetched for", (listener,), action.outcome
                )

    def _on_piece(self, message: Message) -> None:
        *_, fetch, piece = message.subject.split(".")
        if not (fetch.isdecimal() and piece.isdecimal()):
            return
        now_s = time.monotonic()
        if int(fetch) == ADDRESS_FETCH:
            if self._links is not None:
                self._links.on_address(int(piece), message)
        elif self._plan is None:
            return
        elif message.status:
            self._count(self._plan.nobody(int(fetch), now_s))
        else:
            self._count(self._plan.received(int(fetch), int(piece), message.data, now_s))

    def _tick_after(self, delay_s: float) -> None:
        if self._tick is not None:
            self._tick.cancel()
        self._is_busy = delay_s == _TICK_S
        self._tick = asyncio.get_running_loop().call_later(delay_s, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        self._advance()  # contained: without the next tick, no fetch would ever be given up again
        if self._plan or (self._links is not None and self._links.is_busy):
            self._tick_after(_TICK_S)
        elif self._links:
            self._tick_after(_IDLE_TICK_S)

    @contained()
    def _advance(self) -> None:
        if self._plan is not None:
            self._count(self._plan.tick(time.monotonic(), self._bus.is_connected))
        if self._links is not None:
            self._links.tick()


def fetched_bytes(fetcher: PayloadFetcher | None) -> dict[str, int]:
    """What it has brought, by the way on which it came: "nats" or "tcp"."""
    return {} if fetcher is None else {"nats": fetcher.fetched_bytes, "tcp": fetcher.direct_bytes}

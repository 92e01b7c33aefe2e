"""`PayloadFetcher`: fetches payloads from their owners on other hosts, without streams or schedulers.

They come on a link to the owner (`OwnerLinks`), if there is one, else by core NATS: `FetchPlan` decides which pieces are
requested, and when a fetch fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count

from weir.bus.naming import subjects
from weir.bus.naming.identity import owner_of
from weir.bus.nats.connection import Bus, Message
from weir.bus.payloads.fetch_plan import MAX_FETCHED_BYTES, PIECE_BYTES, FetchEnd, FetchPlan, Outcome, PieceRequest
from weir.bus.payloads.owner_links import ADDRESS_FETCH, OwnerLinks
from weir.runtime.containment import call_each, contained
from weir.schemas.core.tensors import PayloadRef
from weir.schemas.wire.transfers import PayloadFetch

_TICK_S = 0.05
_IDLE_TICK_S = 5.0
_SPARE_BYTES = 4096


class PayloadFetcher:
    """Fetches payloads for process `reader`. Everything runs in one event loop."""

    def __init__(self, bus: Bus, reader: str) -> None:
        self._bus = bus
        self._reader = reader
        self._plan: FetchPlan | None = None
        self._links: OwnerLinks | None = None
        self._numbers = count(ADDRESS_FETCH + 1)
        self._listeners: dict[int, Callable[[Outcome], None]] = {}
        self._tick: asyncio.TimerHandle | None = None
        self._is_busy = False
        self.fetched_bytes = 0
        """Bytes fetched through the broker."""
        self.lost = 0

    @property
    def direct_bytes(self) -> int:
        """Bytes fetched on links to owners."""
        return 0 if self._links is None else self._links.fetched_bytes

    async def start(self, background: asyncio.TaskGroup | None = None) -> None:
        """Subscribes to pieces. Without `background` there are no links to owners."""
        if background is not None:
            self._links = OwnerLinks(self._bus, self._reader, background, self._execute, self._fetch_by_broker)
        await self._bus.subscribe(f"{subjects.fetched(self._reader)}.*.*", self._on_piece)

    def fetch(self, ref: PayloadRef, on_end: Callable[[Outcome], None]) -> int:
        """Fetches a payload; calls `on_end` once, later in the event loop, with its bytes or the reason for the failure."""
        number = next(self._numbers)
        self._listeners[number] = on_end
        links = self._links
        is_direct = links is not None and 0 < ref.size <= MAX_FETCHED_BYTES
        if not (is_direct and links is not None and links.starts(number, owner_of(ref.segment), ref)):
            self._fetch_by_broker([(number, ref)])
        if self._tick is None or not self._is_busy:
            self._tick_after(_TICK_S)
        return number

    def cancel(self, number: int) -> None:
        """Ends a fetch without a call of `on_end`."""
        self._listeners.pop(number, None)
        if self._links is not None:
            self._links.cancel(number)
        if self._plan is not None:
            self._execute(self._plan.cancel(number))

    def close(self) -> None:
        """Closes the links to owners; no fetch ends any more."""
        if self._tick is not None:
            self._tick.cancel()
        if self._links is not None:
            self._links.close()

    def _fetch_by_broker(self, fetches: Sequence[tuple[int, PayloadRef]]) -> None:
        if self._plan is None:
            self._plan = FetchPlan(max(_SPARE_BYTES, min(PIECE_BYTES, self._bus.max_payload_bytes - _SPARE_BYTES)))
        for number, ref in fetches:
            actions = self._plan.begin(number, ref, time.monotonic())
            if actions and isinstance(actions[0], FetchEnd):
                asyncio.get_running_loop().call_soon(self._count, actions)
            else:
                self._count(actions)

    def _count(self, actions: Sequence[PieceRequest | FetchEnd]) -> None:
        for action in actions:
            if isinstance(action, FetchEnd) and isinstance(action.outcome, (bytes, memoryview)):
                self.fetched_bytes += len(action.outcome)
        self._execute(actions)

    def _execute(self, actions: Sequence[PieceRequest | FetchEnd]) -> None:
        for action in actions:
            if isinstance(action, PieceRequest):
                owner = owner_of(action.piece.segment)
                reply = f"{subjects.fetched(self._reader)}.{action.fetch}.{action.number}"
                self._bus.publish(subjects.fetch(owner), PayloadFetch(action.piece).pack(), reply)
        for action in actions:
            if isinstance(action, FetchEnd) and (listener := self._listeners.pop(action.fetch, None)) is not None:
                self.lost += not isinstance(action.outcome, (bytes, memoryview))
                call_each(
                    "weir.bus.payloads.fetcher: the request that a payload was fetched for", (listener,), action.outcome
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
            self._count(self._plan.no_responder(int(fetch), now_s))
        else:
            self._count(self._plan.received(int(fetch), int(piece), message.data, now_s))

    def _tick_after(self, delay_s: float) -> None:
        if self._tick is not None:
            self._tick.cancel()
        self._is_busy = delay_s == _TICK_S
        self._tick = asyncio.get_running_loop().call_later(delay_s, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        self._advance()  # contained: without the next tick no fetch would ever time out again
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
    """The fetched bytes by transport: "nats" or "tcp"."""
    return {} if fetcher is None else {"nats": fetcher.fetched_bytes, "tcp": fetcher.direct_bytes}

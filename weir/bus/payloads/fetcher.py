"""`PayloadFetcher`: fetches payloads from their owners on other hosts, without streams or schedulers.

A reader has one link to each owner (`weir.bus.links.tcp`), on which a `FetchPlan` requests pieces; they are received in
their final place. It asks the owner for its address over the broker, so the broker's permissions decide who may read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count

from weir.bus.links.framing import MalformedFrame
from weir.bus.links.link import Frames, LinkEnd
from weir.bus.links.tcp import open_link
from weir.bus.links.tcp_link import TcpLink
from weir.bus.naming import subjects
from weir.bus.naming.identity import owner_of
from weir.bus.nats.connection import Bus
from weir.bus.nats.remote_links import context_for
from weir.bus.nats.replies import ReplyInbox
from weir.bus.payloads.fetch_plan import MAX_FETCHED_BYTES, PIECE_BYTES, FetchEnd, FetchPlan, Loss, Outcome
from weir.runtime.containment import call_each, report
from weir.runtime.log_limiter import LogLimiter
from weir.schemas.core.tensors import PayloadRef
from weir.schemas.wire.transfers import ADDRESS_REQUEST, FREED, KEPT, OwnerAddress, PayloadFetch

logger = logging.getLogger("weir.bus")
_limiter = LogLimiter(logger)

MAX_TCP_LINKS_OPENED = 1024
"""Links of one reader; beyond it an idle one is closed."""

LINK_SILENCE_TIMEOUT_S = 2.0
"""How long no byte may arrive while pieces are requested before the link counts as broken, and at most half more."""

ADDRESS_TIMEOUT_S = 5.0
"""How long an owner may take to tell its address, without the time in which the broker is away."""

_SILENT_CHECKS = 2
_REQUEST_TIMEOUT_S = 1.0
_ABSENCES = 10
_ABSENCE_WAIT_S = 0.05
"""How often nats-server must report that the owner does not subscribe, and how long apart: it may be about to reconnect."""

_SUBJECT = "piece".ljust(59, "-")
"""The subject of requests and pieces: responses come in order. With it the header of a frame has 64 bytes, as slots are
aligned to. Behind a shorter header the kernel copies content several times slower: its page begins with the header, so the
content lies a few bytes further than in the page that it is copied from.
"""

_PIECE, _KEPT, _FREED = _SUBJECT.encode(), KEPT.encode(), FREED.encode()


class PayloadFetcher:
    """Fetches payloads for process `reader`. Everything runs in one event loop."""

    def __init__(self, bus: Bus, reader: str) -> None:
        self.bus = bus
        self.replies = ReplyInbox(bus, subjects.fetched(reader))
        self.background: asyncio.TaskGroup | None = None
        self._numbers = count(1)
        self._listeners: dict[int, Callable[[Outcome], None]] = {}
        self._owners: dict[str, _Owner] = {}
        self._of_fetches: dict[int, _Owner] = {}
        self.fetched_bytes = 0
        self.lost = 0

    def __len__(self) -> int:
        """The number of owners to which there is a link, or is to be one."""
        return len(self._owners)

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Subscribes to addresses. Links are opened in tasks of `background`."""
        self.background = background
        await self.replies.start()

    def fetch(self, ref: PayloadRef, on_end: Callable[[Outcome], None]) -> int:
        """Fetches a payload; calls `on_end` once, later in the event loop, with its bytes or the reason for the failure."""
        number = next(self._numbers)
        self._listeners[number] = on_end
        loss = self._begin(number, ref) if ref.size else b""
        if loss is not None:
            asyncio.get_running_loop().call_soon(self.end, [FetchEnd(number, loss)])
        return number

    def _begin(self, number: int, ref: PayloadRef) -> Outcome | None:
        name = owner_of(ref.segment)
        if not (name and 0 < ref.size <= MAX_FETCHED_BYTES):
            return Loss.STALE
        owner = self._owners.get(name)
        if owner is None:
            if len(self._owners) >= MAX_TCP_LINKS_OPENED and not self._close_idle():
                return Loss.UNREACHABLE
            owner = self._owners[name] = _Owner(self, name)
        try:
            owner.plan.begin(number, ref)
        except MemoryError:
            return Loss.UNREACHABLE
        self._of_fetches[number] = owner
        owner.advance()
        return None

    def _close_idle(self) -> bool:
        idle = next((owner for owner in self._owners.values() if not len(owner.plan)), None)
        if idle is not None:
            self.forget(idle)
            idle.close()
        return idle is not None

    def cancel(self, number: int) -> None:
        """Ends a fetch without a call of `on_end`."""
        self._listeners.pop(number, None)
        owner = self._of_fetches.pop(number, None)
        if owner is not None:
            owner.plan.cancel(number)

    def close(self) -> None:
        """Closes the links to owners; no fetch ends any more."""
        owners, self._owners = self._owners, {}
        for owner in owners.values():
            owner.close()

    def forget(self, owner: _Owner) -> None:
        """Removes an owner to which there is no link."""
        if self._owners.get(owner.name) is owner:
            del self._owners[owner.name]

    def end(self, ends: Sequence[FetchEnd]) -> None:
        """Reports fetches that have ended."""
        for number, outcome in ends:
            self._of_fetches.pop(number, None)
            listener = self._listeners.pop(number, None)
            if listener is None:
                continue
            if isinstance(outcome, Loss):
                self.lost += 1
            else:
                self.fetched_bytes += len(outcome)
            call_each("weir.bus.payloads.fetcher: the request that a payload was fetched for", (listener,), outcome)


class _Owner:
    """The fetches from one owner, and the link to it."""

    def __init__(self, fetcher: PayloadFetcher, name: str) -> None:
        self.name = name
        self.plan = FetchPlan()
        self._fetcher = fetcher
        self._link: TcpLink | None = None
        self._opening: asyncio.Task[None] | None = None
        self._check: asyncio.TimerHandle | None = None
        self._heard: tuple[TcpLink, int] | None = None  # the link and the bytes that had arrived at the last check
        self._silent_checks = 0
        self._is_closed = False

    def advance(self) -> None:
        """Requests pieces, or opens a link."""
        if self._link is not None:
            pieces = self.plan.requests()
            if pieces:
                self._link.send([(_SUBJECT, PayloadFetch(piece).pack()) for piece in pieces])
            if self._check is None and self.plan.is_waiting:
                self._heard = None
                self._check_later()
        elif self._opening is None and not self._is_closed:
            assert self._fetcher.background is not None  # noqa: S101 - it was started
            self._opening = self._fetcher.background.create_task(self._open())

    def close(self) -> None:
        """Closes the link."""
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._check is not None:
            self._check.cancel()
        if self._link is not None:
            self._link.close()

    async def _open(self) -> None:
        loss = Loss.UNREACHABLE
        try:
            address = await self._find()
            if address.port:
                context = context_for(self._fetcher.bus, address)
                self._link = await open_link(
                    self.name, address, context, self._on_frames, self._on_end, self._place, PIECE_BYTES
                )
            else:
                loss = Loss.NO_ADDRESS
                _limiter.warning(self.name, "payloads of %s can't be fetched: it has no --payload-listen", self.name)
        except (OSError, TimeoutError, ValueError) as error:
            _limiter.warning(self.name, "no link to %s, whose payloads are lost: %s", self.name, error or "timeout")
        except Exception as error:  # noqa: BLE001 - contained: an address from the bus must not end the role
            report("weir.bus.payloads.fetcher: opening a link to an owner of payloads", error)
        self._opening = None
        if self._link is not None:
            self.advance()
        else:
            self._fetcher.forget(self)
            self._fetcher.end(self.plan.fail(loss))

    async def _find(self) -> OwnerAddress:
        """Returns the address of the owner, an empty one if it has none. Raises OSError, and ValueError."""
        fetcher, absences, silent_s = self._fetcher, 0, 0.0
        while absences < _ABSENCES and silent_s < ADDRESS_TIMEOUT_S:
            if not fetcher.bus.is_connected:
                await asyncio.sleep(_ABSENCE_WAIT_S)
                continue
            try:
                reply = await fetcher.replies.request(
                    subjects.fetch(self.name), ADDRESS_REQUEST, timeout_s=_REQUEST_TIMEOUT_S
                )
            except TimeoutError:
                silent_s += _REQUEST_TIMEOUT_S
                continue
            if not reply.status:
                return OwnerAddress.unpack(reply.data)
            absences += 1
            await asyncio.sleep(_ABSENCE_WAIT_S)
        raise OSError("it does not tell its address" if silent_s else "it is not connected to nats-server")

    # The link

    def _place(self, subject: bytes, size: int) -> memoryview:
        try:
            if subject != _PIECE:
                raise ValueError(f"{size} bytes on {subject!r} instead of the next piece")
            return self.plan.place(size)
        except (ValueError, MemoryError) as error:
            raise MalformedFrame(str(error)) from error

    def _on_frames(self, _link: TcpLink, frames: Frames) -> None:
        """Takes pieces, and what became of their slots. Raises MalformedFrame."""
        for subject, data in frames:
            if subject == _KEPT or subject == _FREED:  # noqa: SIM109 - faster
                try:
                    ends = self.plan.end_piece(subject == _KEPT)
                except ValueError as error:
                    raise MalformedFrame(str(error)) from error
                self.advance()
                self._fetcher.end(ends)
            elif subject:
                self._place(subject, len(data))[:] = data

    def _on_end(self, _link: TcpLink, _end: LinkEnd) -> None:
        """Goes on with another link, once."""
        self._link = None
        ends = self.plan.lost()
        if self._is_closed:
            return
        if len(self.plan):
            self.advance()
        else:
            self._fetcher.forget(self)
        self._fetcher.end(ends)

    def _check_later(self) -> None:
        self._check = asyncio.get_running_loop().call_later(LINK_SILENCE_TIMEOUT_S / 2, self._check_silence)

    def _check_silence(self) -> None:
        """Breaks the link off if nothing arrives on it. What was requested comes on the next one."""
        self._check = None
        if self._link is None or not self.plan.is_waiting:
            return
        heard = self._link, self._link.read_bytes
        self._silent_checks = self._silent_checks + 1 if heard == self._heard else 0
        self._heard = heard
        if self._silent_checks == _SILENT_CHECKS:
            logger.warning("link to %s: requested pieces did not arrive in time; closing the link", self.name)
            self._link.break_off()
        else:
            self._check_later()


def fetched_bytes(fetcher: PayloadFetcher | None) -> dict[str, int]:
    """The fetched bytes, as counted by transport: "tcp"."""
    return {} if fetcher is None else {"tcp": fetcher.fetched_bytes}

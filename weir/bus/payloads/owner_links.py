"""`OwnerLinks`: a reader's links to owners of payloads on other hosts.

`DialPolicy` decides when to open a link, and a `FetchPlan` for each link which pieces are requested on it. Pieces are
received in their final place. Any error ends the link, and its fetches are returned to the caller, which fetches through
the broker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from weir.bus.links.dial_policy import DialPolicy
from weir.bus.links.framing import MalformedFrame, Outgoing
from weir.bus.links.link import Frames, LinkEnd
from weir.bus.links.tcp import open_link
from weir.bus.links.tcp_link import TcpLink
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.remote_links import context_for
from weir.bus.payloads.fetch_plan import FetchEnd, FetchPlan, PieceRequest
from weir.runtime.containment import report
from weir.schemas.core.tensors import PayloadRef
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.transfers import ADDRESS_REQUEST, FREED, KEPT, OwnerAddress, PayloadFetch

logger = logging.getLogger("weir.bus")

LINK_PIECE_BYTES = 2 << 20
"""The size of a piece on a link; small, so that a payload of 2 GB does not delay small ones for long."""

MAX_OUTSTANDING_ON_LINK = 4
"""Requested pieces on one link."""

LINK_PIECE_TIMEOUT_S = 20.0
"""How long no requested piece may arrive before the link counts as broken."""

LINK_SILENCE_TIMEOUT_S = 2.0
"""How long no byte may arrive while pieces are requested, likewise."""

ADDRESS_FETCH = 0
"""The number of replies with addresses, which no fetch has."""

_SUBJECT = "piece".ljust(59, "-")
"""The subject of requests and pieces: responses come in order. With it the header of a frame has 64 bytes, as slots are
aligned to. Behind a shorter header the kernel copies content several times slower: its page begins with the header, so the
content lies a few bytes further than in the page that it is copied from.
"""

_PIECE, _KEPT, _FREED = _SUBJECT.encode(), KEPT.encode(), FREED.encode()

Fetches = Sequence[tuple[int, PayloadRef]]


class OwnerLinks:
    """Fetches payloads on links. `ended` is called with results, `lost` with fetches that are to go through the broker."""

    def __init__(
        self,
        bus: Bus,
        reader: str,
        background: asyncio.TaskGroup,
        ended: Callable[[Sequence[FetchEnd]], None],
        lost: Callable[[Fetches], None],
    ) -> None:
        self._bus = bus
        self._reader = reader
        self._background = background
        self._ended = ended
        self._lost = lost
        self._policy = DialPolicy()
        self._links: dict[str, _OwnerLink] = {}
        self._trying: dict[int, asyncio.Task[None]] = {}
        self.fetched_bytes = 0

    def __len__(self) -> int:
        """The number of links and tries."""
        return self._policy.connections

    @property
    def is_busy(self) -> bool:
        """Whether a fetch is running."""
        return any(map(len, (owner.plan for owner in self._links.values())))

    def starts(self, number: int, owner: str, ref: PayloadRef) -> bool:
        """Starts the fetch if there is a link to its owner; else returns False, and may try to open one for later ones."""
        now_s = time.monotonic()
        if self._policy.is_open(owner):
            self._links[owner].begin(number, ref, now_s)
            return True
        attempt = self._policy.wanted(owner, now_s)
        if attempt:
            reply = f"{subjects.fetched(self._reader)}.{ADDRESS_FETCH}.{attempt}"
            self._bus.publish(subjects.fetch(owner), ADDRESS_REQUEST, reply)
        return False

    def cancel(self, number: int) -> None:
        """Ends a fetch without a result."""
        for owner in self._links.values():
            owner.take(owner.plan.cancel(number))

    def on_address(self, attempt: int, message: Message) -> None:
        """Takes the address of an owner, or "no responders" from nats-server."""
        owner = self._policy.owner_of(attempt)
        if not owner or attempt in self._trying:
            return
        try:
            address = OwnerAddress() if message.status else OwnerAddress.unpack(message.data)
        except MalformedMessage as error:
            logger.warning("dropped a malformed address of an owner of payloads: %s", error)
            address = OwnerAddress()
        if address.port:
            self._trying[attempt] = self._background.create_task(self._try(attempt, owner, address))
        else:
            self._policy.failed(attempt, time.monotonic())

    def tick(self) -> None:
        """Handles timeouts."""
        now_s = time.monotonic()
        for name, owner in self._links.items():
            if len(owner.plan):
                self._policy.used(name, now_s)
        for name in self._policy.tick(now_s):
            self._links.pop(name).link.close()
        for name, owner in list(self._links.items()):
            if owner.is_overdue(now_s):
                logger.warning("link to %s: requested pieces did not arrive in time; closing the link", name)
                owner.link.break_off()

    def close(self) -> None:
        """Closes all links; their fetches never end."""
        for task in self._trying.values():
            task.cancel()
        links, self._links = self._links, {}
        for owner in links.values():
            owner.link.close()

    def on_ended(self, name: str, ended: Sequence[FetchEnd]) -> None:
        """Reports fetches that have ended."""
        self._policy.served(name, time.monotonic())
        self.fetched_bytes += sum(len(end.outcome) for end in ended if isinstance(end.outcome, (bytes, memoryview)))
        self._ended(ended)

    def on_lost(self, name: str, attempt: int, owner: _OwnerLink) -> None:
        """A link has ended."""
        if self._links.get(name) is owner:
            del self._links[name]
            self._policy.failed(attempt, time.monotonic())
            self._lost(owner.plan.unfinished())

    async def _try(self, attempt: int, name: str, address: OwnerAddress) -> None:
        owner = _OwnerLink(self, name, attempt)
        try:
            context = context_for(self._bus, address)
            owner.link = await open_link(
                name, address, context, owner.on_frames, owner.on_end, owner.place, LINK_PIECE_BYTES
            )
        except (OSError, TimeoutError, ValueError) as error:
            logger.info("no link to %s at %s:%d: %s", name, address.host, address.port, error or "timeout")
            self._policy.failed(attempt, time.monotonic())
        except Exception as error:  # noqa: BLE001 - contained: an address from the bus must not end the role
            report("weir.bus.payloads.owner_links: opening a link to an owner of payloads", error)
            self._policy.failed(attempt, time.monotonic())
        else:
            if self._policy.opened(attempt, time.monotonic()):
                self._links[name] = owner
            else:
                owner.link.close()
        finally:
            del self._trying[attempt]


class _OwnerLink:
    """One link, with the fetches on it."""

    link: TcpLink

    def __init__(self, links: OwnerLinks, name: str, attempt: int) -> None:
        self._links = links
        self._name = name
        self._attempt = attempt
        self._requested: deque[tuple[int, int]] = deque()  # fetches and pieces
        self._is_placed = False  # whether the first of them lies in its place
        self._progress_s = self._heard_s = 0.0
        self._read_bytes = 0
        self.plan = FetchPlan(LINK_PIECE_BYTES, MAX_OUTSTANDING_ON_LINK)

    def begin(self, number: int, ref: PayloadRef, now_s: float) -> None:
        """Starts a fetch."""
        if not len(self.plan):
            self._progress_s = self._heard_s = now_s
        self.take(self.plan.begin(number, ref, now_s))

    def take(self, actions: Sequence[PieceRequest | FetchEnd]) -> None:
        """Requests pieces, and reports results."""
        requests: list[Outgoing] = []
        ended: list[FetchEnd] = []
        for action in actions:
            if isinstance(action, PieceRequest):
                requests.append((_SUBJECT, PayloadFetch(action.piece).pack()))
                self._requested.append((action.fetch, action.number))
            else:
                ended.append(action)
        if requests:
            self.link.send(requests)
        if ended:
            self._links.on_ended(self._name, ended)

    def is_overdue(self, now_s: float) -> bool:
        """Whether requested pieces are overdue."""
        if self._read_bytes != self.link.read_bytes:
            self._read_bytes, self._heard_s = self.link.read_bytes, now_s
        return bool(self.plan.outstanding) and (
            now_s - self._heard_s >= LINK_SILENCE_TIMEOUT_S or now_s - self._progress_s >= LINK_PIECE_TIMEOUT_S
        )

    def place(self, subject: bytes, size: int) -> memoryview | None:
        """Returns where a piece is received. Raises MalformedFrame for one that was not requested, or not in this size."""
        if subject != _PIECE or not self._requested or self._is_placed:
            raise MalformedFrame(f"{size} bytes on {subject!r} instead of the next piece")
        self._is_placed = True
        fetch, piece = self._requested[0]
        try:
            buffer = self.plan.place(fetch, piece, size)
        except (ValueError, MemoryError) as error:
            raise MalformedFrame(str(error)) from error
        return (
            memoryview(bytearray(size)) if buffer is None else buffer
        )  # the piece of a cancelled fetch is thrown away

    def on_frames(self, _link: TcpLink, frames: Frames) -> None:
        """Takes pieces, and what became of their slots. Raises MalformedFrame."""
        for subject, data in frames:
            if subject == _KEPT or subject == _FREED:  # noqa: SIM109 - faster
                self._end_piece(subject == _KEPT)
            elif subject:
                buffer = self.place(subject, len(data))
                if buffer is not None:
                    buffer[:] = data

    def _end_piece(self, is_kept: bool) -> None:
        if not self._requested or (is_kept and not self._is_placed):
            raise MalformedFrame("the end of a piece that was not sent")
        fetch, piece = self._requested.popleft()
        self._is_placed = False
        self._progress_s = now_s = time.monotonic()
        self.take(self.plan.placed(fetch, piece, now_s) if is_kept else self.plan.received(fetch, piece, b"", now_s))

    def on_end(self, _link: TcpLink, _end: LinkEnd) -> None:
        """Hands the fetches over."""
        self._links.on_lost(self._name, self._attempt, self)

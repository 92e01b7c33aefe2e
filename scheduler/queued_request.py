"""`QueuedRequest`: one request while a scheduler is responsible for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

from schemas.frames import Row
from schemas.lanes import Lane
from schemas.wire import MalformedMessage


class Frame(Protocol):
    """A bus message that brought requests; told once of each of them, when it has had its terminal answer."""

    def delegate(self, batch_id: int, requests: int) -> str | None:
        """The ack subject, if this batch with so many of the frame's requests ends it."""

    def requests_ended(self, requests: int, batch_id: int) -> None:
        """So many requests of the frame have ended, in this batch (0: without having run)."""


class _NoFrame:
    """Stands for the message a request came in, where there is none or it has ended."""

    def delegate(self, batch_id: int, requests: int) -> str | None:
        """See `Frame`."""
        return None

    def requests_ended(self, requests: int, batch_id: int) -> None:
        """See `Frame`."""


NO_FRAME = _NoFrame()
"""In the place of a frame where there is no bus, and for what runs again for nobody."""


class BothFrames:
    """What a request holds in the place of its frame once it was sent again: one frame that stands for two."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Frame, second: Frame) -> None:
        self._first = first
        self._second = second

    def delegate(self, batch_id: int, requests: int) -> str | None:
        """See `Frame`: never, the scheduler acknowledges each of the two when it ends."""
        return None

    def requests_ended(self, requests: int, batch_id: int) -> None:
        """See `Frame`."""
        self._first.requests_ended(requests, batch_id)
        self._second.requests_ended(requests, batch_id)


class Terms(NamedTuple):
    """What a request asks of the queue; 0 is not given.

    `priority`, `timeout_us`, `correlation_id`, `sequence_flags` and `lane` are those of `schemas.messages.Part`.
    `deadline_ms` is unix time, and `deadline_us` the same moment on the policy clock.
    """

    priority: int = 0
    timeout_us: int = 0
    deadline_ms: int = 0
    deadline_us: int = 0
    correlation_id: int | str = 0
    sequence_flags: int = 0
    lane: int = Lane.LIVE.value


NO_TERMS = Terms()
"""Of a request that asks for nothing: this very object, so that most requests are told apart by one comparison."""


class QueuedRequest:
    """A request and what the scheduler knows of it; made by `requests_of`.

    `key` (unique within `gateway`), `version` (-1: the latest), `batch_size`, `shape_key`, `body` and `payload_host`
    are those of `schemas.messages.Part`. `enqueued_us` is the policy clock when it came. `attempts` counts the batches
    that were lost with it in them. Only requests with equal shape keys share a batch. `terms` is what it asks of the
    queue; whoever reads them has checked nothing but their types. `place` is where a `ModelScheduler` has it: the
    scheduler of a version whose queue it is in, the id of the batch it runs in (the batch itself would make a circle,
    which only the collector ends), or None before there is a version.
    """

    __slots__ = (
        "attempts",
        "batch_size",
        "body",
        "cancelled",
        "enqueued_us",
        "frame",
        "gateway",
        "key",
        "payload_host",
        "place",
        "shape_key",
        "terms",
        "version",
    )

    gateway: str
    key: int
    version: int
    batch_size: int
    shape_key: object
    terms: Terms
    body: bytes
    payload_host: str
    enqueued_us: int
    frame: Frame
    attempts: int
    cancelled: bool
    place: object

    def __repr__(self) -> str:
        return f"QueuedRequest({self.gateway}, {self.key})"

    @property
    def timeout_us(self) -> int:
        """See `Terms`."""
        return self.terms.timeout_us

    @property
    def correlation_id(self) -> int | str:
        """See `Terms`."""
        return self.terms.correlation_id

    @property
    def sequence_flags(self) -> int:
        """See `Terms`."""
        return self.terms.sequence_flags

    @property
    def lane(self) -> int:
        """See `Terms`."""
        return self.terms.lane

    @property
    def is_sent(self) -> bool:
        """Whether it was sent to a worker, and has not come back to a queue since."""
        return type(self.place) is int

    @property
    def runs_alone(self) -> bool:
        """Whether it shares its batch with nobody, whatever the batcher."""
        return type(self.shape_key) is object

    def run_alone(self) -> None:
        """From now on it shares its batch with nobody: its shape is like no other."""
        self.shape_key = object()


_TYPES = (int, int, int, str, bytes, str)
_TERM_TYPES = (int, int, int, int, int)
_FIELDS = 13
_DEFAULTS = (0, "")  # of the last fields, which older gateways don't send
_LANES = frozenset(lane.value for lane in Lane)
_CORRELATION_ID_TYPES = (int, str)


def _us_of_ms(unix_ms: int) -> int:
    return unix_ms * 1000


def requests_of(
    gateway: str,
    rows: Iterable[Row],
    enqueued_us: int,
    frame: Frame,
    policy_us: Callable[[int], int] = _us_of_ms,
    on_malformed: Callable[[int | None, MalformedMessage], None] | None = None,
) -> list[QueuedRequest]:
    """The requests that `frame` brought, one for each row.

    A row that is none is passed to `on_malformed`, with the request's key where that can be read; without `on_malformed`
    it raises MalformedMessage. `policy_us` tells when unix milliseconds are on the policy clock. One loop and no
    constructor: this runs for every request of the cluster, and a call costs as much as the rest of it.
    """
    requests: list[QueuedRequest] = []
    for row in rows:
        try:
            fields = row if len(row) >= _FIELDS else (*row, *_DEFAULTS[len(row) - _FIELDS :])
            (
                key,
                version,
                batch_size,
                shape_key,
                priority,
                timeout_us,
                deadline_ms,
                correlation_id,
                flags,
                _,
                body,
                lane,
                payload_host,
            ) = fields
            if (
                type(key),
                type(version),
                type(batch_size),
                type(shape_key),
                type(body),
                type(payload_host),
            ) != _TYPES or batch_size < 1:
                raise TypeError("wrong types or no batch size")
            request = QueuedRequest()
            request.terms = (
                _terms(priority, timeout_us, deadline_ms, correlation_id, flags, lane, policy_us)
                if priority or timeout_us or deadline_ms or correlation_id or flags or lane
                else NO_TERMS
            )
        except (TypeError, ValueError) as error:
            malformed = MalformedMessage(f"not a request: {error}")
            if on_malformed is None:
                raise malformed from error
            on_malformed(row[0] if isinstance(row, list | tuple) and row and type(row[0]) is int else None, malformed)
            continue
        request.gateway = gateway
        request.key = key
        request.version = version
        request.batch_size = batch_size
        request.shape_key = shape_key
        request.body = body
        request.payload_host = payload_host
        request.enqueued_us = enqueued_us
        request.frame = frame
        request.attempts = 0
        request.cancelled = False
        request.place = None
        requests.append(request)
    return requests


def _terms(
    priority: int,
    timeout_us: int,
    deadline_ms: int,
    correlation_id: int | str,
    flags: int,
    lane: int,
    policy_us: Callable[[int], int],
) -> Terms:
    if (type(priority), type(timeout_us), type(deadline_ms), type(flags), type(lane)) != _TERM_TYPES or (
        type(correlation_id) not in _CORRELATION_ID_TYPES or lane not in _LANES
    ):
        raise TypeError("terms of wrong types")
    deadline_us = policy_us(deadline_ms) if deadline_ms > 0 else 0
    return Terms(priority, timeout_us, max(0, deadline_ms), deadline_us, correlation_id, flags, lane)


arrival = attrgetter("enqueued_us", "key")
"""Orders requests as they came: those of one frame came at once, in the order of their keys."""

_frame_of = attrgetter("frame")


def by_frame(requests: Sequence[QueuedRequest]) -> Iterable[tuple[Frame, int]]:
    """The frames that brought these requests, in their order, each with how many of it stand together."""
    if len(requests) == 1:
        return ((requests[0].frame, 1),)
    return [(frame, len(list(of))) for frame, of in groupby(requests, _frame_of)]


def rows_of(requests: Iterable[QueuedRequest]) -> int:
    """The size of a batch of these."""
    return sum(request.batch_size for request in requests)

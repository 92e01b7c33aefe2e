"""`QueuedRequest`: one request from the moment a scheduler receives it until it ends.

The life of a request in a scheduler:

    frame from the stream
      | requests_of
      v
    QueuedRequest --------> waits in the `Queue` of its lane (`request.place` is its `Version`)
      ^                       | `Former.next`, `Dispatch`
      |                       v
      |                     `Batch` in `BatchesInFlight`, sent to a worker (`request.place` is the batch's id)
      |                       | outcome of the batch, or the loss of its worker
      |                       v
      +-- lost, returned --- `complete`: ended (a worker responded, or the caller left) or `Failure` (an error response)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

from msgspec import Struct

from weir.schemas.core.requests import Lane
from weir.schemas.wire.calls import ANYBODY, Caller, RequestEnvelope


class Frame(Protocol):
    """A bus message that brought requests. It is notified of each of them when that request has had its final response."""

    def requests_ended(self, requests: int) -> None:
        """`requests` requests of the frame have ended."""


class _NoFrame:
    """The frame of a request that came without a bus message, or whose frame has ended."""

    def requests_ended(self, requests: int) -> None:
        """Does nothing."""


NO_FRAME = _NoFrame()
"""The frame of requests without a bus message, and of requests that run again without a caller."""


class DuplicateDelivery:
    """The frame of a request that its gateway sent twice: it forwards to the frames of both deliveries."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Frame, second: Frame) -> None:
        self._first = first
        self._second = second

    def requests_ended(self, requests: int) -> None:
        """Notifies both frames."""
        self._first.requests_ended(requests)
        self._second.requests_ended(requests)


class Terms(NamedTuple):
    """Scheduling parameters of a request; 0 means not given.

    `priority`, `timeout_us`, `correlation_id`, `sequence_flags` and `lane` are those of the request envelope.
    `deadline_ms` is unix time, `deadline_us` the same instant on the policy clock.
    """

    priority: int = 0
    timeout_us: int = 0
    deadline_ms: int = 0
    deadline_us: int = 0
    correlation_id: int | str = 0
    sequence_flags: int = 0
    lane: int = Lane.LIVE.value


NO_TERMS = Terms()
"""The terms of a request without any. Requests share this object, so that one identity comparison detects them."""


class QueuedRequest(Struct, eq=False):
    """A request and what the scheduler knows about it. `requests_of` creates it.

    `key` (unique within `gateway`), `version` (-1: the latest), `batch_size`, `shape_key`, `body` and `payload_host`
    come from the request envelope. `enqueued_us` is the time of arrival on the policy clock. `attempts` counts the
    lost batches that held the request. Only requests with equal shape keys share a batch. `terms` holds the
    scheduling parameters, of which only the types have been checked.

    `caller` is for whom it counts, `ANYBODY` for nobody.

    `place` is where a `ModelScheduler` keeps the request: the version in whose queue it waits, the
    id of the batch in which it runs (an id, because a reference to the batch would be a reference cycle), or None
    before it has a version.
    """

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
    attempts: int = 0
    cancelled: bool = False
    place: object = None
    caller: Caller = ANYBODY

    def __repr__(self) -> str:
        return f"QueuedRequest({self.gateway}, {self.key})"

    @property
    def correlation_id(self) -> int | str:
        """The id of the request's sequence; 0 or "" without one."""
        return self.terms.correlation_id

    @property
    def sequence_flags(self) -> int:
        """START and END flags of the request in its sequence."""
        return self.terms.sequence_flags

    @property
    def lane(self) -> int:
        """The value of the request's `Lane`."""
        return self.terms.lane

    @property
    def is_sent(self) -> bool:
        """Whether the request is in a batch that was sent to a worker."""
        return type(self.place) is int

    @property
    def runs_alone(self) -> bool:
        """Whether the request must be the only one of its batch."""
        return type(self.shape_key) is object

    def run_alone(self) -> None:
        """Makes the request run in a batch of its own from now on: its shape key equals no other."""
        self.shape_key = object()


def _us_of_ms(unix_ms: int) -> int:
    return unix_ms * 1000


def requests_of(
    gateway: str,
    envelopes: Iterable[RequestEnvelope],
    enqueued_us: int,
    frame: Frame,
    policy_us: Callable[[int], int] = _us_of_ms,
) -> list[QueuedRequest]:
    """Returns the requests that `frame` brought, in order. `policy_us` converts unix milliseconds to the policy clock.

    This is one loop, because it runs for every request of the cluster.
    """
    requests: list[QueuedRequest] = []
    for envelope in envelopes:
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
            owner,
            in_flight_limit,
            weight,
        ) = envelope
        terms = NO_TERMS
        if priority or timeout_us or deadline_ms or correlation_id or flags or lane:
            deadline_us = policy_us(deadline_ms) if deadline_ms > 0 else 0
            terms = Terms(priority, timeout_us, max(0, deadline_ms), deadline_us, correlation_id, flags, lane)
        request = QueuedRequest(
            gateway, key, version, batch_size, shape_key, terms, body, payload_host, enqueued_us, frame
        )
        if owner:
            request.caller = Caller(owner, in_flight_limit, weight)
        requests.append(request)
    return requests


arrival = attrgetter("enqueued_us", "key")
"""Sort key: the order of arrival. Requests of one frame arrived at the same time, in the order of their keys."""

_frame_of = attrgetter("frame")


def by_frame(requests: Sequence[QueuedRequest]) -> Iterable[tuple[Frame, int]]:
    """Returns the frames of these requests, in order, each with how many consecutive requests it brought."""
    if len(requests) == 1:
        return ((requests[0].frame, 1),)
    return [(frame, len(list(of))) for frame, of in groupby(requests, _frame_of)]


def total_rows(requests: Iterable[QueuedRequest]) -> int:
    """Returns the batch size of these requests together."""
    return sum(request.batch_size for request in requests)

"""`DurableQueue`: the requests of one lane of a model that are held here, what each waits for, and which one runs next.

```text
 RECEIVED ─▶ READ ─▶ PARKED | READY ─▶ RUNNING ─▶ ENDING ─▶ ENDED
               ▲                          │
               └────── BACKING_OFF ◀──────┘
```

Requests are admitted in the order of the stream, because one request of a sequence must not overtake another. Requests
whose version is away are parked; one that is away for days delays no other version. Ready ones run in their tenants'
turns. A request whose outcome is known (ENDING) is skipped wherever it waited. Sans-IO.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from weir.durable.requests.fair_queue import FairQueue
from weir.durable.requests.ordering import SequenceQueues
from weir.durable.requests.queue_limits import QueueLimiter
from weir.durable.requests.request import DurableRequest, Stage
from weir.schemas.config.parameters import QueueBounds
from weir.schemas.core.errors import WeirError

MAX_CANCELLED = 10_000
"""Cancelled ids that are remembered until their requests arrive."""

ROW_BYTES = 64 << 10  # of a body cost as much as one request, when tenants share a model


class DurableQueue:
    """The requests of one lane. `weights` and `tenant_limits` are by tenant."""

    def __init__(self, model: str, weights: Mapping[str, float], tenant_limits: Mapping[str, int]) -> None:
        self._weights = weights
        self._held: dict[int, DurableRequest] = {}  # by sequence in the stream, in its order
        self._arriving: deque[DurableRequest] = deque()  # not admitted yet
        self._away: set[str] = set()  # versions of parked requests
        self._ready: FairQueue[DurableRequest] = FairQueue(weights)
        self._limits = QueueLimiter(model, tenant_limits)
        self._named: dict[str, DurableRequest] = {}
        self._cancelled: dict[str, None] = {}
        self._expiries_ms: dict[int, int] = {}  # by sequence in the stream
        self.sequences: SequenceQueues[DurableRequest] = SequenceQueues()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[DurableRequest]:
        """The requests in the order of the stream."""
        return iter(self._held.values())

    def find(self, sequence: int) -> DurableRequest | None:
        """The request with this sequence in the stream, if it is held."""
        return self._held.get(sequence)

    # Arrival

    def receive(self, request: DurableRequest) -> None:
        """Adds the latest request of the stream."""
        self._held[request.delivery.sequence] = request
        self._arriving.append(request)

    def admit(self) -> DurableRequest | None:
        """Takes the next request that no earlier one holds up any more; those that have ended are left out."""
        while self._arriving and self._arriving[0].stage is not Stage.RECEIVED:
            request = self._arriving.popleft()
            if request.stage is Stage.READ:
                return request
        return None

    def register(self, request: DurableRequest) -> bool:
        """Notes the request's id; False where the id was cancelled, so that the request must not run."""
        if request.id in self._cancelled:
            del self._cancelled[request.id]
            return False
        self._named[request.id] = request
        return True

    def cancel(self, id: str) -> DurableRequest | None:
        """Returns the request with this id; without one, its id is remembered until the request arrives."""
        if id not in self._named:
            self._cancelled[id] = None
            if len(self._cancelled) > MAX_CANCELLED:
                del self._cancelled[next(iter(self._cancelled))]
        return self._named.get(id)

    def count(self, request: DurableRequest, bounds: QueueBounds | None) -> WeirError | None:
        """Counts a request, or returns the error if that would exceed a bound. Without `bounds` only the tenant's limit
        applies. A request that an earlier owner may have started always has room.
        """
        tenant = request.headers.tenant
        error = None if request.maybe_started else self._limits.rejection(tenant, request.size_bytes, bounds)
        if error is None:
            request.is_counted = True
            self._limits.add(tenant, request.size_bytes)
        return error

    # Waiting

    def is_away(self, version: str) -> bool:
        """Whether requests for this version are parked; later ones must wait behind them."""
        return version in self._away

    def park(self, request: DurableRequest) -> None:
        """The request waits until its version is served."""
        request.stage = Stage.PARKED
        self._away.add(request.version)
        self.note_expiry(request)

    def retry(self) -> Iterator[DurableRequest]:
        """Yields parked requests, READ, until one of their version is parked again: those behind it stay parked."""
        away, self._away = self._away, set()
        for request in list(self._held.values()) if away else ():
            if request.stage is Stage.PARKED and request.version not in self._away:
                request.stage = Stage.READ
                yield request

    def note_expiry(self, request: DurableRequest) -> None:
        """Has `expired` return the request once it has expired, if it ever does."""
        if request.attempt_history.expires_ms:
            self._expiries_ms[request.delivery.sequence] = request.attempt_history.expires_ms

    def expired(self, now_ms: int) -> list[DurableRequest]:
        """The requests that have expired and do not run."""
        due = [self._held[sequence] for sequence, at_ms in self._expiries_ms.items() if at_ms <= now_ms]
        return [request for request in due if request.stage < Stage.RUNNING]

    def make_ready(self, request: DurableRequest) -> None:
        """The request waits for its tenant's turn."""
        request.stage = Stage.READY
        self._ready.add(request.headers.tenant, request, 1 + len(request.body) // ROW_BYTES)

    def next(self) -> DurableRequest | None:
        """Takes the request whose turn it is; None if no request is ready."""
        while (request := self._ready.pop()) is not None and request.stage is not Stage.READY:
            pass
        return request

    # The end

    def remove(self, request: DurableRequest) -> bool:
        """Removes a request; False where it is not held."""
        sequence = request.delivery.sequence
        if self._held.get(sequence) is not request:
            return False
        del self._held[sequence]
        self._expiries_ms.pop(sequence, None)
        self._ready.remove(request)
        if request.is_counted:
            self._limits.remove(request.headers.tenant, request.size_bytes)
        if self._named.get(request.id) is request:
            del self._named[request.id]
        return True

    def clear(self) -> None:
        """Removes all requests: they belong to another owner."""
        for each in (self._held, self._arriving, self._away, self._limits, self._named, self._expiries_ms):
            each.clear()
        self.sequences.clear()
        self._ready = FairQueue(self._weights)

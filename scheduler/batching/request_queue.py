"""`Queue`: the requests of one lane that wait for a model version, and those of them that its next batch is formed of.

The queue alone handles cancelled requests: it never returns one as a request to run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from weir.scheduler.batching.ordered_queue import NEVER_US, FairOrderedQueue, OrderedQueue
from weir.scheduler.batching.queue_rules import QueueRules
from weir.scheduler.batching.request import NO_TERMS, QueuedRequest, arrival
from weir.schemas.wire.calls import Caller

_MIN_CANCELLED = 64


class Forming(Struct, eq=False):
    """The first requests of a queue, which a `Former` has taken for the next batch. They still wait.

    It notes what it knows of them, so that it examines no request twice: their rows (`size`) and bytes, how many of them
    may be sent before their delay is over (`preferred_length`, 0: none), the next request if that can not join
    (`closed_by`), whether the batch can not become better (`is_complete`), and what the model's own strategy noted.
    """

    requests: list[QueuedRequest] = []
    size: int = 0
    size_bytes: int = 0
    preferred_length: int = 0
    closed_by: QueuedRequest | None = None
    is_complete: bool = False
    noted: object = None


class Queue:
    """Waiting requests, ordered by `rules`. Times are microseconds of the policy clock.

    While requests only need to run in the order of arrival, which is the common and cheapest case, they wait in a plain
    deque. As soon as one has a deadline, or if the rules require it, the queue `is_timed`: they wait in an `OrderedQueue`,
    and in a fair one once requests of several owners wait. When all have left, it is as simple again as the rules allow.
    """

    __slots__ = ("_cancelled", "_fifo", "_max_size", "_ordered", "_owner", "_queue", "forming", "is_timed", "rules")

    def __init__(self, rules: QueueRules) -> None:
        self.rules = rules
        self._max_size = rules.of_level(1).max_size
        self._fifo: deque[QueuedRequest] = deque()
        self._cancelled = 0  # cancelled requests still in `_fifo`, skipped at its front
        self._ordered = OrderedQueue(rules)
        self._queue: deque[QueuedRequest] | OrderedQueue = self._fifo if rules.is_plain else self._ordered
        self.is_timed = not rules.is_plain
        self._owner = ""  # of all that wait, unless they wait in a fair queue
        self.forming = Forming()

    def __len__(self) -> int:
        """Requests waiting."""
        return len(self._queue) + len(self.forming.requests) - self._cancelled

    def enqueue(self, requests: list[QueuedRequest], is_plain: bool = False) -> list[QueuedRequest]:
        """Adds requests as long as there is room; returns those that are rejected. `is_plain`: no terms, no owner."""
        if (self.is_timed or not is_plain or self._owner) and not self._uses_fifo(requests):
            return self._ordered.add(requests)
        fifo = self._fifo
        room = self._max_size - len(fifo) - len(self.forming.requests) + self._cancelled
        if room >= len(requests):
            fifo.extend(requests)
            return []
        room = max(0, room)  # requests that were put back may exceed the maximum size
        fifo.extend(requests[:room])
        return requests[room:]

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """Adds requests that were in a queue before, at their original positions, regardless of the queue's size."""
        first = list(requests)
        if not self._uses_fifo(first):
            self._ordered.put_back(first)
            return
        self.return_forming()
        queue = self._fifo
        last = max(map(arrival, first), default=None)
        while last is not None and queue and arrival(queue[0]) < last:
            first.append(queue.popleft())
        queue.extendleft(sorted(first, key=arrival, reverse=True))

    def wait_of(self, caller: Caller) -> tuple[int, float]:
        """How many requests a new one of `caller` waits for, and how many times as long each of them takes as alone.

        That is all that wait, or its own if others take turns with it.
        """
        waiting = len(self)
        if isinstance(self._ordered, FairOrderedQueue):
            own, times = self._ordered.turns_of(caller)
        elif waiting and caller.owner != self._owner:
            own, times = 0, 2.0
        else:
            return waiting, 1.0
        return (own, times) if own * times < waiting else (waiting, 1.0)

    # For a batch

    def front(self, most: int) -> deque[QueuedRequest] | OrderedQueue:
        """Returns the waiting requests for a caller that takes at most `most` of them, by `popleft`.

        They still wait until `leave` or `take_formed`; `extendleft` returns them.
        """
        if self._cancelled:
            live: list[QueuedRequest] = []
            while self._cancelled and self._fifo and len(live) < most:
                request = self._fifo.popleft()
                if request.cancelled:
                    self._cancelled -= 1
                else:
                    live.append(request)
            self._fifo.extendleft(reversed(live))
        return self._queue

    def leave(self, requests: Iterable[QueuedRequest]) -> None:
        """Removes requests that were taken: they run."""
        if self.is_timed:
            self._ordered.leave(requests)

    def take_formed(self, length: int) -> list[QueuedRequest]:
        """Removes and returns the first `length` requests of the forming batch: they run. The others return."""
        batch = self.forming.requests
        self.forming = Forming()
        if length < len(batch):
            self._queue.extendleft(reversed(batch[length:]))
            del batch[length:]
        if self.is_timed:
            self._ordered.leave(batch)
        return batch

    def return_forming(self) -> None:
        """Returns the requests of the forming batch: the queue changes."""
        if self.forming.requests:
            self._queue.extendleft(reversed(self.forming.requests))
            self.forming = Forming()

    def is_overtaken(self) -> bool:
        """Whether another request than those of the forming batch is now the first, or the one that closed it is gone."""
        first, forming = self._ordered.first(), self.forming
        if forming.closed_by is not None:
            return first is not forming.closed_by
        return first is not None and self._ordered.is_before(first, forming.requests[-1])

    # Other ends of waiting

    def take_arrived_by(self, arrived_by_us: int, most: int) -> list[QueuedRequest]:
        """Removes and returns at most `most` requests from the front of the queue that arrived by `arrived_by_us`."""
        self.return_forming()
        waiting, taken = self.front(most + 1), list[QueuedRequest]()
        while waiting and len(taken) < most:
            request = waiting.popleft()
            if request.enqueued_us > arrived_by_us:
                waiting.extendleft((request,))
                break
            taken.append(request)
        self.leave(taken)
        return taken

    def take_all_arrived_by(self, arrived_by_us: int) -> list[QueuedRequest]:
        """Removes and returns all requests that arrived by `arrived_by_us`."""
        waiting = self.drain()
        self.put_back(request for request in waiting if request.enqueued_us > arrived_by_us)
        return [request for request in waiting if request.enqueued_us <= arrived_by_us]

    def drop_cancelled(self, requests: list[QueuedRequest]) -> None:
        """Removes these waiting requests, which were cancelled."""
        self.return_forming()  # one of them may be in the forming batch, or limit it
        if self.is_timed:
            self._ordered.drop(requests)
            return
        self._cancelled += len(requests)
        if self._cancelled > len(self._fifo) // 2 + _MIN_CANCELLED:
            # Searching for each request would be quadratic, and without this purge they might stay forever.
            self._purge_cancelled()

    def drain(self) -> list[QueuedRequest]:
        """Empties the queue and returns all requests in order."""
        self.return_forming()
        if self.is_timed:
            return self._ordered.drain()
        self._purge_cancelled()
        requests = list(self._fifo)
        self._fifo.clear()
        return requests

    @property
    def next_timeout_us(self) -> int:
        """When `overdue` will have work if nothing else happens; `NEVER_US` if never."""
        return self._ordered.next_expiry_us if self.is_timed else NEVER_US

    def overdue(self, now_us: int) -> list[QueuedRequest]:
        """Removes and returns the requests whose timeout or deadline has passed."""
        if self.next_timeout_us > now_us:
            return []
        self.return_forming()
        return self._ordered.overdue(now_us)

    def _purge_cancelled(self) -> None:
        live = [request for request in self._fifo if not request.cancelled]
        self._fifo.clear()
        self._fifo.extend(live)
        self._cancelled = 0

    def _uses_fifo(self, coming: Iterable[QueuedRequest]) -> bool:
        """Whether the plain queue still suffices with these requests; switches to another one and back as needed."""
        if not len(self):
            self._start_again()
            self._owner = next((request.caller.owner for request in coming), "")
        if isinstance(self._ordered, FairOrderedQueue):
            return False
        needs_order = self.is_timed
        for request in coming:
            if request.caller.owner != self._owner:
                self._switch(FairOrderedQueue(self.rules))
                return False
            if request.terms is not NO_TERMS and request.terms.deadline_us:
                needs_order = True
        if needs_order and not self.is_timed:
            self._switch(self._ordered)
        return not needs_order

    def _start_again(self) -> None:
        """Has the queue, which is empty, be as simple as the rules allow."""
        if isinstance(self._ordered, FairOrderedQueue):
            self._ordered = OrderedQueue(self.rules)
            self._queue = self._ordered
        if self.is_timed and self.rules.is_plain:
            self._queue = self._fifo
            self.is_timed = False

    def _switch(self, to: OrderedQueue) -> None:
        waiting = self.drain()
        self._queue = self._ordered = to
        self.is_timed = True
        to.put_back(waiting)

"""`Batcher`: the queue of one model version, and the rule by which batches are taken from it.

`DefaultBatcher` is the simplest rule: requests run alone, in the order they came.
Source: Triton's default scheduler (a client's own batch runs as it is, nothing is combined, no queue policy applies).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

from scheduler.ordered_queue import NEVER_US, OrderedQueue
from scheduler.queue_rules import DEFAULT_MAX_QUEUE_SIZE, LevelRules, QueueRules
from scheduler.queued_request import NO_TERMS, QueuedRequest, arrival

_LEAST_GONE = 64


class Batcher(ABC):
    """Requests that wait for one version, by `rules`; a subclass says what a batch is.

    Times are microseconds of the policy clock. Where requests need only be run in the order they came, they wait in a
    plain queue, for that is what most do and what costs least; as soon as one comes with a deadline, or where the rules
    ask for more, in an `OrderedQueue`.
    """

    has_steps = False
    """Whether what is run asks other models, which may keep states of sequences."""

    def __init__(self, rules: QueueRules) -> None:
        self.rules = rules
        self._max_size = rules.of_level(1).max_size
        self._fifo: deque[QueuedRequest] = deque()
        self._gone = 0  # cancelled requests that are still in `_fifo`: passed over when they come up
        self._ordered = OrderedQueue(rules)
        self._queue: deque[QueuedRequest] | OrderedQueue = self._fifo if rules.is_plain else self._ordered
        self.is_timed = not rules.is_plain  # requests may have timeouts or deadlines; if not, none is `overdue`
        self._forming: list[QueuedRequest] = []  # taken off the queue for the next batch; they are waiting all the same

    def __len__(self) -> int:
        """Requests waiting."""
        return len(self._queue) + len(self._forming) - self._gone

    @abstractmethod
    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """The batch to run on a free instance now, or None; with `full_only`, only one that could not grow any more.

        What is overdue may be in it: `overdue` comes first.
        """

    @abstractmethod
    def ready_at_us(self) -> int:
        """From when on `next_batch` has a batch for a free instance, if nothing else happens; the queue is not empty."""

    @abstractmethod
    def another(self) -> Batcher:
        """One by the same rules, with an empty queue."""

    @property
    def largest(self) -> int:
        """So many requests make a batch, at most."""
        return 1

    def companions(self, batch: list[QueuedRequest], most_rows: int) -> list[QueuedRequest]:
        """Takes out what can join `batch`, which another batcher by the same rules has formed; in all `most_rows`."""
        return []

    def long_waiting(self, came_by_us: int, most: int) -> list[QueuedRequest]:
        """Takes out the first requests, `most` of them, as far as they came by then."""
        self._unform()
        queue, taken = self._queue, list[QueuedRequest]()
        while queue and len(taken) < most:
            request = queue.popleft()
            if request.cancelled:
                self._gone -= 1
                continue
            if request.enqueued_us > came_by_us:
                queue.extendleft((request,))
                break
            taken.append(request)
        if queue is self._ordered:
            self._ordered.leave(taken)
        return taken

    def came_by(self, came_by_us: int) -> list[QueuedRequest]:
        """Takes out all requests that came by then."""
        if self._queue is self._fifo:
            return self.long_waiting(came_by_us, len(self))
        waiting = self.drain()
        self.put_back(request for request in waiting if request.enqueued_us > came_by_us)
        return [request for request in waiting if request.enqueued_us <= came_by_us]

    def enqueue(self, requests: list[QueuedRequest]) -> list[QueuedRequest]:
        """Takes requests in, as many as there is room for; returns the others."""
        if not self._stays_plain(requests):
            return self._ordered.add(requests)
        # What was put back is more than there is room for.
        room = max(0, self._max_size - len(self))
        if room >= len(requests):
            self._fifo.extend(requests)
            return []
        self._fifo.extend(requests[:room])
        return requests[room:]

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """Takes requests in again that were in a queue before, whatever the queue's size, at the places they had."""
        first = list(requests)
        if not self._stays_plain(first):
            self._ordered.put_back(first)
            return
        self._unform()
        queue = self._fifo
        last = max(map(arrival, first), default=None)
        while last is not None and queue and arrival(queue[0]) < last:
            first.append(queue.popleft())
        queue.extendleft(sorted(first, key=arrival, reverse=True))

    def drop_cancelled(self, requests: Iterable[QueuedRequest]) -> None:
        """Forgets these requests, which wait here and were cancelled."""
        requests = list(requests)
        self._unform()  # one of them may be in it, or be why it can't grow
        if self._queue is self._ordered:
            self._ordered.drop(requests)
            return
        self._gone += len(requests)
        if self._gone > len(self._fifo) // 2 + _LEAST_GONE:
            # Looking for each would make it quadratic; none may stay for long, for nothing need ever come up.
            self._drop_gone()

    def drain(self) -> list[QueuedRequest]:
        """Empties the queue: all requests, in order."""
        self._unform()
        if self._queue is self._ordered:
            return self._ordered.drain()
        self._drop_gone()
        requests = list(self._fifo)
        self._fifo.clear()
        return requests

    @property
    def next_timeout_us(self) -> int:
        """When `overdue` will have something to do, if nothing else happens; NEVER_US: not at all."""
        return self._ordered.next_expiry_us if self._queue is self._ordered else NEVER_US

    def overdue(self, now_us: int) -> list[QueuedRequest]:
        """Takes out the requests that have waited for longer than they may, or than anybody waits for them."""
        if self.next_timeout_us > now_us:
            return []
        self._unform()
        return self._ordered.overdue(now_us)

    def _unform(self) -> None:
        """What was taken off the queue for the next batch stands in it again."""
        if self._forming:
            self._queue.extendleft(reversed(self._forming))
            self._forming = []

    def _drop_gone(self) -> None:
        live = [request for request in self._fifo if not request.cancelled]
        self._fifo.clear()
        self._fifo.extend(live)
        self._gone = 0

    def _stays_plain(self, coming: Iterable[QueuedRequest]) -> bool:
        """Whether the plain queue still does with these; goes over to the other one, and back when that is empty."""
        if self._queue is self._fifo:
            for request in coming:
                if request.terms is not NO_TERMS and request.terms.deadline_us:
                    break
            else:
                return True
            waiting = self.drain()
            self._queue = self._ordered
            self.is_timed = True
            self._ordered.put_back(waiting)
            return False
        if self.rules.is_plain and not len(self):
            self._queue = self._fifo
            self.is_timed = False
            return self._stays_plain(coming)
        return False


class DefaultBatcher(Batcher):
    """Each request is a batch."""

    def __init__(self, max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE) -> None:
        super().__init__(QueueRules(LevelRules(max_queue_size), is_deadline_first=False))

    def another(self) -> DefaultBatcher:
        """See `Batcher`."""
        return type(self)(self._max_size)

    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """See `Batcher`: a batch of one can never grow."""
        while self._queue:
            request = self._queue.popleft()
            if not request.cancelled:
                if self._queue is self._ordered:
                    self._ordered.leave((request,))
                return [request]
            self._gone -= 1
        return None

    def ready_at_us(self) -> int:
        """See `Batcher`: there is nothing to wait for."""
        return 0

"""`Batcher`: the queue of one lane of a model version, and the rule by which batches are taken from it.

`DefaultBatcher` is the simplest rule: each request runs alone, in the order of arrival. Source: Triton's default
scheduler (a client's own batch runs as it is, requests are not combined, no queue policy applies).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

from weir.scheduler.batching.request import NO_TERMS, QueuedRequest, arrival
from weir.scheduler.batching.request_queue import DEFAULT_MAX_QUEUE_SIZE, NEVER_US, LevelRules, OrderedQueue, QueueRules
from weir.schemas.wire.observation import BatchReason

_MIN_CANCELLED = 64


class Batcher(ABC):
    """Requests that wait for one version, ordered by `rules`. A subclass defines what a batch is.

    Times are microseconds of the policy clock. While requests only need to run in the order of arrival, which is the
    common and cheapest case, they wait in a plain deque. As soon as one has a deadline, or if the rules require it,
    they wait in an `OrderedQueue`.
    """

    has_steps = False
    """Whether requests run steps on other models, which may keep states of sequences."""

    runs_singly = False
    """Whether each request is a batch, of which an instance may hold many (`Window`)."""

    def __init__(self, rules: QueueRules) -> None:
        self.rules = rules
        self._max_size = rules.of_level(1).max_size
        self._fifo: deque[QueuedRequest] = deque()
        self._cancelled = 0  # cancelled requests still in `_fifo`, skipped at its front
        self._ordered = OrderedQueue(rules)
        self._queue: deque[QueuedRequest] | OrderedQueue = self._fifo if rules.is_plain else self._ordered
        self.is_timed = not rules.is_plain  # some requests may have timeouts or deadlines
        self._forming: list[QueuedRequest] = []  # taken off the queue for the next batch, but still waiting
        self.reason = BatchReason.SINGLE
        """Why the last batch that `next_batch` returned was complete."""

    def __len__(self) -> int:
        """Requests waiting."""
        return len(self._queue) + len(self._forming) - self._cancelled

    @property
    def forming(self) -> int:
        """Requests that were taken off the queue for the next batch. They still wait."""
        return len(self._forming)

    @abstractmethod
    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """Returns the batch to run on a free instance now, or None; with `full_only`, only a batch that can not grow.

        Call `overdue` first: a batch may contain overdue requests.
        """

    @abstractmethod
    def ready_at_us(self) -> int:
        """Returns when `next_batch` will have a batch for a free instance if nothing else happens. The queue is not
        empty.
        """

    @property
    def starts_at_once(self) -> bool:
        """Whether the first requests of the queue start as soon as an instance is free, in the order of arrival."""
        return self.rules.is_plain and self.rules.may_stage and not self.has_steps

    @abstractmethod
    def another(self) -> Batcher:
        """Returns an empty batcher with the same rules."""

    @property
    def largest(self) -> int:
        """The largest number of requests in a batch."""
        return 1

    def take_joinable(self, batch: list[QueuedRequest], most_rows: int) -> list[QueuedRequest]:
        """Takes out requests that can join `batch`, formed by another batcher with the same rules, up to `most_rows`
        rows.
        """
        return []

    def take_aged(self, arrived_by_us: int, most: int) -> list[QueuedRequest]:
        """Takes out at most `most` requests from the front of the queue that arrived by `arrived_by_us`."""
        self._return_forming()
        queue, taken = self._queue, list[QueuedRequest]()
        while queue and len(taken) < most:
            request = queue.popleft()
            if request.cancelled:
                self._cancelled -= 1
                continue
            if request.enqueued_us > arrived_by_us:
                queue.extendleft((request,))
                break
            taken.append(request)
        if queue is self._ordered:
            self._ordered.leave(taken)
        return taken

    def take_arrived_by(self, arrived_by_us: int) -> list[QueuedRequest]:
        """Takes out all requests that arrived by `arrived_by_us`."""
        if self._queue is self._fifo:
            return self.take_aged(arrived_by_us, len(self))
        waiting = self.drain()
        self.put_back(request for request in waiting if request.enqueued_us > arrived_by_us)
        return [request for request in waiting if request.enqueued_us <= arrived_by_us]

    def enqueue(self, requests: list[QueuedRequest]) -> list[QueuedRequest]:
        """Adds requests as long as there is room; returns those without room."""
        if not self._uses_fifo(requests):
            return self._ordered.add(requests)
        # Requests that were put back may exceed the maximum size.
        room = max(0, self._max_size - len(self))
        if room >= len(requests):
            self._fifo.extend(requests)
            return []
        self._fifo.extend(requests[:room])
        return requests[room:]

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """Adds requests that were in a queue before, at their original positions, regardless of the queue's size."""
        first = list(requests)
        if not self._uses_fifo(first):
            self._ordered.put_back(first)
            return
        self._return_forming()
        queue = self._fifo
        last = max(map(arrival, first), default=None)
        while last is not None and queue and arrival(queue[0]) < last:
            first.append(queue.popleft())
        queue.extendleft(sorted(first, key=arrival, reverse=True))

    def drop_cancelled(self, requests: Iterable[QueuedRequest]) -> None:
        """Removes these waiting requests, which were cancelled."""
        requests = list(requests)
        self._return_forming()  # one of them may be in the forming batch, or limit it
        if self._queue is self._ordered:
            self._ordered.drop(requests)
            return
        self._cancelled += len(requests)
        if self._cancelled > len(self._fifo) // 2 + _MIN_CANCELLED:
            # Searching for each request would be quadratic, and without this purge they might stay forever.
            self._purge_cancelled()

    def drain(self) -> list[QueuedRequest]:
        """Empties the queue and returns all requests in order."""
        self._return_forming()
        if self._queue is self._ordered:
            return self._ordered.drain()
        self._purge_cancelled()
        requests = list(self._fifo)
        self._fifo.clear()
        return requests

    @property
    def next_timeout_us(self) -> int:
        """When `overdue` will have work if nothing else happens; `NEVER_US` if never."""
        return self._ordered.next_expiry_us if self._queue is self._ordered else NEVER_US

    def overdue(self, now_us: int) -> list[QueuedRequest]:
        """Takes out the requests whose timeout or deadline has passed."""
        if self.next_timeout_us > now_us:
            return []
        self._return_forming()
        return self._ordered.overdue(now_us)

    def _return_forming(self) -> None:
        """Returns requests that were taken for the next batch to the queue."""
        if self._forming:
            self._queue.extendleft(reversed(self._forming))
            self._forming = []

    def _purge_cancelled(self) -> None:
        live = [request for request in self._fifo if not request.cancelled]
        self._fifo.clear()
        self._fifo.extend(live)
        self._cancelled = 0

    def _uses_fifo(self, coming: Iterable[QueuedRequest]) -> bool:
        """Whether the plain queue still suffices with these requests; switches to the ordered queue and back as needed."""
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
            return self._uses_fifo(coming)
        return False


class DefaultBatcher(Batcher):
    """Each request is a batch of its own; `runs_singly` as in `Batcher`."""

    def __init__(self, max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE, runs_singly: bool = False) -> None:
        super().__init__(QueueRules(LevelRules(max_queue_size), is_deadline_first=False))
        self.runs_singly = runs_singly

    def another(self) -> DefaultBatcher:
        """Returns an empty batcher with the same queue size."""
        return DefaultBatcher(self._max_size, self.runs_singly)

    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """Returns the next request as a batch, or None; such a batch can never grow."""
        while self._queue:
            request = self._queue.popleft()
            if not request.cancelled:
                if self._queue is self._ordered:
                    self._ordered.leave((request,))
                return [request]
            self._cancelled -= 1
        return None

    def ready_at_us(self) -> int:
        """Returns 0: a request is ready at once."""
        return 0

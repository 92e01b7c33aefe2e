"""`Series`: requests that came in one message and are executed one after another, each as a batch of its own.

Instances know nothing of it: each request is a `RunningBatch` with an id that exists in this worker alone, and what comes
of it is collected here. Answers leave together, with one end of the whole and one set of acks; but they wait for later
requests only as long as those are quick. While one takes its time, or its model asks others, which may be waiting for what
else is in the series, what is answered leaves, and what has not begun goes back to the scheduler.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from bus.thread_publisher import Outgoing
from runtime.containment import contained
from schemas.messages import BatchMessage, BatchOutcome, Done, join_answers
from worker.batch_execution import FinishedBatch
from worker.model_instance import ModelInstance
from worker.running_batch import RunningBatch

MAX_HELD_S = 0.005
"""How long answers of a series wait for those after them."""

MAX_STUCK_S = 0.05
"""How long those of a series that have not begun wait while none before them ends."""


class Series:
    """See the module. `submit` has `instance` run its `parts`, in order; what comes of each is for `ended`.

    `ids` gives ids for them, below 0, where those of schedulers are not. `publish` gets what is to leave, in any thread.
    `before` is the batch that this is the series of, where it has waited for payloads of other hosts.
    """

    def __init__(
        self,
        message: BatchMessage,
        instance: ModelInstance,
        ids: Iterator[int],
        publish: Callable[[FinishedBatch], None],
        before: RunningBatch | None = None,
    ) -> None:
        self.instance = instance
        self.message = message
        self._publish = publish
        self.parts = [
            RunningBatch(message._replace(batch_id=next(ids), entries=[entry], acks=[], is_series=False))
            for entry in message.entries
        ]
        if before is not None:
            for position, part in enumerate(self.parts):
                part.fetched = before.fetched
                part.cancelled = frozenset((0,)) if position in before.cancelled else frozenset()
        self._positions = {part.message.batch_id: position for position, part in enumerate(self.parts)}
        self._running = set(self._positions)  # neither ended nor released
        self._open = len(self.parts)  # not ended
        self._unanswered: dict[int, BatchOutcome] = {}
        self._handed_back: list[int] = []
        self._answers: dict[str, list[bytes]] = {}
        self._first: list[Outgoing] = []
        self._busy_us = 0
        self._is_released = False
        self._progress_s = time.monotonic()
        self._is_hasty = False
        # Its parts end in the thread of an instance, or wherever their models answer; the event loop flushes.
        self._lock = threading.Lock()

    def submit(self) -> None:
        """Hands all to the instance."""
        for part in self.parts:
            self.instance.submit(part)

    def cancel(self, gateway: str, keys: Iterable[int]) -> None:
        """See `RunningBatch`."""
        keys = list(keys)
        for part in self.parts:
            part.cancel(gateway, keys)

    @property
    def is_over(self) -> bool:
        """Whether all have ended."""
        return self._open == 0

    @property
    def is_stuck(self) -> bool:
        """Whether none has ended for long."""
        return time.monotonic() - self._progress_s > MAX_STUCK_S

    def flush(self) -> None:
        """What is answered leaves now."""
        with self._lock:
            if self._answers:
                self._leave(None)

    def make_haste(self) -> list[int]:
        """What is answered leaves now, what has not begun goes back, to run elsewhere.

        In the event loop. Returns the ids of parts that went back: they are over.
        """
        withdrawn = [part.message.batch_id for part in self.instance.withdraw(self._positions)]
        with self._lock:
            back = [self._positions[part] for part in withdrawn]
            self._is_hasty = True  # what ends from now on leaves at once
            self._open -= len(back)
            self._running.difference_update(withdrawn)
            self._handed_back += back
            if back and self._open:
                self._leave(Done(self.message.batch_id, BatchOutcome.HANDED_BACK, 0, back))
            if back or self._answers:
                self._leave_if_due()
        return withdrawn

    def ended(self, part: FinishedBatch) -> None:
        """One of the parts has ended, or left its instance; `done` says which."""
        done = part.done
        if done is None:
            return
        with self._lock:
            self._progress_s = time.monotonic()
            for gateway, answers in part.answers:
                self._answers.setdefault(gateway, []).append(answers)
            self._first += part.first
            self._busy_us += done.busy_us
            self._running.discard(done.batch_id)
            if done.outcome != BatchOutcome.RELEASED:
                self._open -= 1
                if done.outcome != BatchOutcome.ANSWERED:
                    self._unanswered[self._positions[done.batch_id]] = BatchOutcome(done.outcome)
            self._leave_if_due()

    def _leave_if_due(self) -> None:
        if self._open == 0:
            self._leave(self._end())
        elif not self._running and not self._is_released:
            # The instance takes the next batch, while models have answers still to give.
            self._is_released = self._is_hasty = True
            self._leave(Done(self.message.batch_id, BatchOutcome.RELEASED, self._busy_us))
        elif self._answers and (self._is_hasty or self._unanswered):
            self._leave(None)

    def _end(self) -> Done:
        busy_us = 0 if self._is_released else self._busy_us
        lost = self._unanswered
        if not lost:
            return Done(self.message.batch_id, BatchOutcome.ANSWERED, busy_us, self._handed_back)
        was_begun = BatchOutcome.UNANSWERED in lost.values()
        outcome = BatchOutcome.UNANSWERED if was_begun else BatchOutcome.NOT_RUN
        positions = sorted([*lost, *self._handed_back])
        return Done(self.message.batch_id, outcome, busy_us, positions)

    def _leave(self, done: Done | None) -> None:
        """With the lock held, so that no answer leaves after the end."""
        answers = [
            (gateway, message) for gateway, messages in self._answers.items() for message in self._joined(messages)
        ]
        # A frame is acknowledged when all of its requests have answers.
        has_answered_all = done is not None and done.outcome == BatchOutcome.ANSWERED and not done.rescheduled
        acks: Sequence[str] = self.message.acks if has_answered_all else ()
        first, self._first, self._answers = self._first, [], {}
        self._publish(FinishedBatch(self.message.scheduler, done, answers, acks, first))

    @contained(on_error="_joining_failed")
    def _joined(self, messages: list[bytes]) -> list[bytes]:
        return messages if len(messages) == 1 else [join_answers(self.message.version, messages)]

    def _joining_failed(self, _error: Exception, messages: list[bytes]) -> list[bytes]:
        return messages  # each leaves by itself

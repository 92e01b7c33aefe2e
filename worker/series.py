"""`Series`: requests that came in one message and are executed one after another, each as a batch of its own.

Instances know nothing of it: each request is a `RunningBatch` with an id that exists in this worker alone, and what comes
of it is collected here. Answers leave together, with one end of the whole and one set of acks; but they wait for later
requests only as long as those are quick, and never while a model asks others, for what it asks may be waiting for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from bus.thread_publisher import Outgoing
from schemas.messages import BatchMessage, BatchOutcome, Done, join_answers
from worker.batch_execution import FinishedBatch
from worker.running_batch import RunningBatch

MAX_HELD_S = 0.005
"""How long answers of a series wait for those after them."""

_MAX_HELD_NS = int(MAX_HELD_S * 1e9)


class Series:
    """See the module. `parts` are to be run, in order; each is told to `ended`, as often as it is said to be.

    `ids` gives ids for them, below 0, where those of schedulers are not. `publish` gets what is to leave, in any thread.
    """

    def __init__(self, message: BatchMessage, ids: Iterator[int], publish: Callable[[FinishedBatch], None]) -> None:
        self._message = message
        self._publish = publish
        self.parts = [
            RunningBatch(message._replace(batch_id=next(ids), entries=[entry], acks=[], is_series=False))
            for entry in message.entries
        ]
        self._positions = {part.message.batch_id: position for position, part in enumerate(self.parts)}
        self._running = set(self._positions)  # neither ended nor released
        self._open = len(self.parts)  # not ended
        self._unanswered: dict[int, BatchOutcome] = {}
        self._answers: dict[str, list[bytes]] = {}
        self._first: list[Outgoing] = []
        self._busy_us = 0
        self._is_released = False
        self._held_since_ns = time.monotonic_ns()
        self._is_hasty = False
        # Its parts end in the thread of an instance, or wherever their models answer; the event loop flushes.
        self._lock = threading.Lock()

    def cancel(self, gateway: str, keys: Iterable[int]) -> None:
        """See `RunningBatch`."""
        keys = list(keys)
        for part in self.parts:
            part.cancel(gateway, keys)

    def flush(self) -> None:
        """What is answered leaves now, and what is answered from now on leaves at once."""
        with self._lock:
            self._is_hasty = True
            if self._answers:
                self._leave(None)

    def ended(self, part: FinishedBatch) -> None:
        """One of the parts has ended, or left its instance; `done` says which."""
        done = part.done
        if done is None:
            return
        now_ns = time.monotonic_ns()
        with self._lock:
            for gateway, answers in part.answers:
                self._answers.setdefault(gateway, []).append(answers)
            self._first += part.first
            self._busy_us += done.busy_us
            self._running.discard(done.batch_id)
            if done.outcome != BatchOutcome.RELEASED:
                self._open -= 1
                if done.outcome != BatchOutcome.ANSWERED:
                    self._unanswered[self._positions[done.batch_id]] = BatchOutcome(done.outcome)
            if self._open == 0:
                self._leave(self._end())
            elif not self._running and not self._is_released:
                # The instance takes the next batch, while models have answers still to give.
                self._is_released = self._is_hasty = True
                self._leave(Done(self._message.batch_id, BatchOutcome.RELEASED, self._busy_us))
            elif self._answers and (self._is_hasty or self._unanswered or now_ns - self._held_since_ns > _MAX_HELD_NS):
                self._leave(None)

    def _end(self) -> Done:
        busy_us = 0 if self._is_released else self._busy_us
        lost = self._unanswered
        if not lost:
            return Done(self._message.batch_id, BatchOutcome.ANSWERED, busy_us)
        was_begun = BatchOutcome.UNANSWERED in lost.values()
        outcome = BatchOutcome.UNANSWERED if was_begun else BatchOutcome.NOT_RUN
        positions = sorted(lost) if len(lost) < len(self.parts) else ()
        return Done(self._message.batch_id, outcome, busy_us, positions)

    def _leave(self, done: Done | None) -> None:
        """With the lock held, so that no answer leaves after the end."""
        answers = [(gateway, self._joined(messages)) for gateway, messages in self._answers.items()]
        acks: Sequence[str] = self._message.acks if done is not None and done.outcome == BatchOutcome.ANSWERED else ()
        first, self._first, self._answers = self._first, [], {}
        self._held_since_ns = time.monotonic_ns()
        self._publish(FinishedBatch(self._message.scheduler, done, answers, acks, first))

    def _joined(self, messages: list[bytes]) -> bytes:
        return messages[0] if len(messages) == 1 else join_answers(self._message.version, messages)

"""`Microbatch`: requests that came in one message and run one after another, each as a batch of its own.

Instances that run in a process of their own get all requests in one message instead (`MicrobatchExecution`).

Each request is a *part*: a `RunningBatch` with an id that is valid in this worker only. The instance runs it like any other
batch, and its update is collected here. Responses leave together, with one completion and one set of acknowledgements, as
long as the parts are quick. If one takes long, or its model calls other models (which may wait for later parts), the
responses so far are sent and the parts that have not started are requeued at the scheduler.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from weir.bus.links.framing import Outgoing
from weir.bus.payloads.reach import process_reach
from weir.runtime.containment import contained
from weir.schemas.wire.messages import BatchCompletion, BatchMessage, BatchOutcome, join_responses
from weir.worker.execution.batch_execution import MAX_STUCK_S, BatchUpdate
from weir.worker.execution.instance import ModelInstance
from weir.worker.execution.running_batch import RunningBatch


class Microbatch:
    """The `parts` of one batch message on their way through `instance`. Thread-safe where methods do not say otherwise.

    `ids` yields ids below 0 for the parts, which no scheduler uses. `publish` gets the updates of the whole, in any thread.
    `fetched` is the batch with its remote payloads, if it had to wait for them. `worker` is the id of this worker.
    """

    def __init__(  # noqa: PLR0913 - a batch, and what it needs of its worker
        self,
        message: BatchMessage,
        instance: ModelInstance,
        ids: Iterator[int],
        publish: Callable[[BatchUpdate], None],
        fetched: RunningBatch | None = None,
        worker: str = "",
    ) -> None:
        self.instance = instance
        self.message = message
        self._publish = publish
        self.parts = [
            RunningBatch(replace(message, batch_id=next(ids), entries=[entry], is_series=False), worker, message)
            for entry in message.entries
        ]
        if fetched is not None:
            for position, part in enumerate(self.parts):
                part.fetched = fetched.fetched
                part.cancelled = frozenset((0,)) if position in fetched.cancelled else frozenset()
        self._positions = {part.message.batch_id: position for position, part in enumerate(self.parts)}
        self._running = set(self._positions)  # neither ended nor released
        self._open = len(self.parts)  # not ended
        self._lost: dict[int, BatchOutcome] = {}
        self._requeued: list[int] = []
        self._responses: dict[str, list[bytes]] = {}
        self._first: list[Outgoing] = []
        self._busy_us = 0
        self._is_released = False
        self._progress_s = time.monotonic()
        self._sends_at_once = False
        # Parts end in the instance's thread, or where their models send responses; the event loop flushes.
        self._lock = threading.Lock()

    def submit(self) -> None:
        """Submits all parts to the instance, in order."""
        for part in self.parts:
            self.instance.submit(part)

    def cancel(self, gateway: str, keys: Iterable[int]) -> None:
        """Marks the requests of `gateway` with these keys as cancelled."""
        keys = list(keys)
        for part in self.parts:
            part.cancel(gateway, keys)

    @property
    def is_complete(self) -> bool:
        """Whether all parts have ended."""
        return self._open == 0

    @property
    def is_stuck(self) -> bool:
        """Whether no part has ended for `MAX_STUCK_S`."""
        return time.monotonic() - self._progress_s > MAX_STUCK_S

    def flush(self) -> None:
        """Publishes the responses so far."""
        with self._lock:
            if self._responses:
                self._send(None)

    def requeue(self) -> list[int]:
        """Publishes the responses so far, and requeues the parts that have not started; returns their ids, which end.

        Called in the event loop.
        """
        withdrawn = [part.message.batch_id for part in self.instance.withdraw(self.parts)]
        with self._lock:
            back = [self._positions[part] for part in withdrawn]
            self._sends_at_once = True
            self._open -= len(back)
            self._running.difference_update(withdrawn)
            self._requeued += back
            if back and self._open:
                self._send(BatchCompletion(self.message.batch_id, BatchOutcome.HANDED_BACK, 0, back))
            if back or self._responses:
                self._publish_if_due()
        return withdrawn

    def part_updated(self, part: BatchUpdate) -> None:
        """Collects an update of a part; called in any thread. A part ends or is released with its completion."""
        completion = part.completion
        if completion is None:
            return
        with self._lock:
            self._progress_s = time.monotonic()
            for gateway, responses in part.responses:
                self._responses.setdefault(gateway, []).append(responses)
            self._first += part.first
            self._busy_us += completion.busy_us
            self._running.discard(completion.batch_id)
            if completion.outcome != BatchOutcome.RELEASED:
                self._open -= 1
                if completion.outcome != BatchOutcome.ANSWERED:
                    self._lost[self._positions[completion.batch_id]] = BatchOutcome(completion.outcome)
            self._publish_if_due()

    def _publish_if_due(self) -> None:
        if self._open == 0:
            self._send(self._completion())
        elif not self._running and not self._is_released:
            # The instance takes the next batch, while models still send responses.
            self._is_released = self._sends_at_once = True
            self._send(BatchCompletion(self.message.batch_id, BatchOutcome.RELEASED, self._busy_us))
        elif self._responses and (self._sends_at_once or self._lost):
            self._send(None)

    def _completion(self) -> BatchCompletion:
        busy_us = 0 if self._is_released else self._busy_us
        lost = self._lost
        if not lost:
            return BatchCompletion(self.message.batch_id, BatchOutcome.ANSWERED, busy_us, self._requeued)
        has_started = BatchOutcome.UNANSWERED in lost.values()
        outcome = BatchOutcome.UNANSWERED if has_started else BatchOutcome.NOT_RUN
        positions = sorted([*lost, *self._requeued])
        return BatchCompletion(self.message.batch_id, outcome, busy_us, positions)

    def _send(self, completion: BatchCompletion | None) -> None:
        """Publishes the responses so far, with the lock held: no response may leave after the completion."""
        responses = [
            (gateway, message) for gateway, messages in self._responses.items() for message in self._joined(messages)
        ]
        first, self._first, self._responses = self._first, [], {}
        self._publish(BatchUpdate(self.message.scheduler, completion, responses, first))

    @contained(on_error="_joining_failed")
    def _joined(self, messages: list[bytes]) -> list[bytes]:
        if len(messages) == 1 or sum(map(len, messages)) > process_reach().message_bytes:
            return messages
        return [join_responses(self.message.version, messages)]

    def _joining_failed(self, _error: Exception, messages: list[bytes]) -> list[bytes]:
        return messages  # each is sent by itself

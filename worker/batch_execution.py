"""`BatchExecution`: one batch on an instance, answered at once, in pieces, or long after the model has run.

What a model sends by response senders leaves as it comes, one message for each response: nothing is kept here. When
`execute` has returned and requests of the batch are still open, the instance is released for the next batch, and this
one ends with its last answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from bus.payloads import PayloadReader
from bus.thread_publisher import Outgoing
from runtime.containment import contained
from schemas.errors import ErrorCode, WeirError
from schemas.messages import NOBODY, BatchEntry, BatchOutcome, Done, Moments, Run, pack_answers, pack_end
from schemas.requests import InferRequest
from worker.answer_packer import AnswerPacker, pack_rows, packing_failed
from worker.backend import RESCHEDULED, Execution, Result
from worker.reshape import Reshaper
from worker.running_batch import RunningBatch
from worker.statistics import ModelStatistics
from worker.trace_moments import moments_of

MAX_PAUSED = 10_000
"""Rescheduled requests of an instance whose responses are counted on; those that never run again are forgotten."""


class FinishedBatch(NamedTuple):
    """What is to be published of a batch: (gateway, answers message) each, its end for its scheduler, and acks.

    `done` is None while the batch goes on. `first` are messages that leave before the answers.
    """

    scheduler: str
    done: Done | None
    answers: list[tuple[str, bytes]]
    acks: Sequence[str] = ()
    first: Sequence[Outgoing] = ()


class OpenBatches:
    """The batches of one instance that have left it and have requests without a last answer; and how all are answered.

    `decoupled`: the model may send any number of responses, which are counted by their number. `deliver` puts outputs
    into memory that their callers share, where they asked for that. `failures` gets the text of each error that a model
    sends itself, where somebody wants to know.
    """

    def __init__(
        self,
        version: int,
        decoupled: bool,
        packer: AnswerPacker,
        reshaper: Reshaper | None,
        statistics: ModelStatistics,
        publish: Callable[[FinishedBatch], None],
        deliver: Callable[[InferRequest, Result], None],
        failures: list[str] | None = None,
    ) -> None:
        self.version = version
        self.decoupled = decoupled
        self.packer = packer
        self.reshaper = reshaper
        self.statistics = statistics
        self.publish = publish
        self.deliver = deliver
        self.failures = failures
        # By the run of a sequence that is to go on: how many responses it had. Its next batch numbers on from there.
        self._paused: dict[str, int] = {}
        self._changed = threading.Condition()
        self._open: set[BatchExecution] = set()

    def add(self, execution: BatchExecution) -> None:
        """The batch has left the instance."""
        with self._changed:
            self._open.add(execution)

    def remove(self, execution: BatchExecution) -> None:
        """The batch has ended; it need not have been open."""
        with self._changed:
            self._open.discard(execution)
            self._changed.notify_all()

    def pause(self, run: str, responses: int) -> None:
        """The request of this run is rescheduled, after so many responses."""
        self._paused[run] = responses
        if len(self._paused) > MAX_PAUSED:
            del self._paused[next(iter(self._paused))]

    def resume(self, run: str) -> int:
        """How many responses the request of this run had when it was rescheduled."""
        return self._paused.pop(run, 0)

    def wait(self) -> None:
        """Returns when none is open."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open)


class _Stream:
    """A request that has no last answer: how many responses it had, and when the last of them was sent.

    `run` is what its run is called; only streams have one.
    """

    __slots__ = ("last_ns", "responses", "run")

    def __init__(self, start_ns: int, run: str, responses: int) -> None:
        self.run = run
        self.responses = responses
        self.last_ns = start_ns


class BatchExecution(Execution):
    """See the module. `begin` says which entries of the batch the instance is given, `settle` what it returned."""

    __slots__ = (
        "_batch",
        "_batches",
        "_entries",
        "_fillers",
        "_has_returned",
        "_lock",
        "_requests",
        "_rescheduled",
        "_rows",
        "_streams",
        "_uncounted",
    )

    def __init__(self, batch: RunningBatch, batches: OpenBatches, reader: PayloadReader) -> None:
        super().__init__(reader)
        self._batch = batch
        self._batches = batches
        self._entries: Sequence[int] = ()
        self._fillers: Collection[int] = ()
        self._rows: Sequence[int] = ()
        self._requests: Sequence[InferRequest] = ()
        self._lock = threading.Lock()
        self._streams: dict[int, _Stream] | None = None
        self._has_returned = False
        self._uncounted = True
        self._rescheduled: list[int] = []

    def begin(
        self,
        entries: Sequence[int],
        rows: Sequence[int],
        requests: Sequence[InferRequest],
        fillers: Collection[int] = (),
    ) -> None:
        """The instance is given these entries of the batch, with so many rows each, as these requests.

        Those among `fillers` only stand in the place of requests that can't be run: what it says to them is nobody's.
        """
        self._entries = entries
        self._fillers = fillers
        self._requests = requests
        self._rows = rows

    @property
    def has_responded(self) -> bool:
        """See `Execution`."""
        return self._streams is not None

    def is_cancelled(self, position: int) -> bool:
        """See `Execution`."""
        entry = self._entries[position]
        return entry in self._batch.cancelled or self._batch.is_late(entry)

    def may_run_again(self, position: int) -> bool:
        """See `Execution`."""
        if self.is_cancelled(position) or not self._is_somebody_s(position):
            return False
        with self._lock:
            stream = None if self._streams is None else self._streams.get(position)
            return self._streams is None or (stream is not None and stream.responses == 0)

    def has_run_alone(self, position: int, run: Execution) -> None:
        """See `Execution`."""
        now_ns = time.monotonic_ns()
        phases_ns = run.input_end_ns - run.start_ns, now_ns - run.input_end_ns, 0
        self._batches.statistics.record_execution(self._rows[position], phases_ns, time.time_ns() // 1_000_000)

    @contained(on_error="_response_failed")
    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """See `Execution`."""
        with self._lock:
            stream = self._open_streams().get(position)
            if stream is not None:
                self._send(position, stream, result, is_final)

    def _response_failed(self, error: Exception, position: int, _result: Result | None, _is_final: bool) -> None:
        """A response can't be sent: its request ends with an error, the others of the batch go on."""
        with self._lock:
            stream = self._open_streams().get(position)
            if stream is not None:
                self._send(position, stream, Result(error=packing_failed(error)), is_final=True)

    def _send(self, position: int, stream: _Stream, result: Result | None, is_final: bool) -> None:
        batches = self._batches
        entry = self._entry(position)
        began_ns = time.monotonic_ns()
        if batches.failures is not None and result is not None and result.error is not None:
            batches.failures.append(result.error.message)
        if result is None:
            row = pack_end(entry.key, self._moments(position), self._run_of(stream))
        else:
            if batches.reshaper is not None:
                batches.reshaper.to_client(result)
            if entry.gateway != NOBODY:
                batches.deliver(self._requests[position], result)
            moments = self._moments(position) if is_final else None
            row = batches.packer.packed(entry.gateway, entry.key, result, is_final, moments, self._run_of(stream))
        message = pack_answers(batches.version, [row])
        self._count_response(position, stream, result, began_ns)
        if is_final:
            self._end(position, has_failed=_has_failed(result))
        self._leave([(entry.gateway, message)])

    def fail(self, error: WeirError) -> None:
        """See `Execution`."""
        with self._lock:
            streams = self._open_streams()
            if self._batches.failures is not None:
                self._batches.failures += [error.message] * len(streams)
            if streams:
                self._leave(self._answers({self._entries[position]: Result(error=error) for position in streams}))

    def settle(self, results: Sequence[Result | None], first: Sequence[Outgoing] = ()) -> None:
        """The instance is done with the batch; `results` are those of all its entries, None for what is still open.

        `first` are messages that leave before the answers.
        """
        with self._lock:
            streams = self._open_streams()
            self._has_returned = True
            answers = self._answers(
                {i: result for i, result in enumerate(results) if result is not None and result is not RESCHEDULED}
            )
            for position in [position for position in streams if results[self._entries[position]] is RESCHEDULED]:
                stream = streams.pop(position)
                self._rescheduled.append(self._entries[position])
                if stream.run:
                    self._batches.pause(stream.run, stream.responses)
            self._count_execution()
            if streams:
                self._batches.add(self)
            self._leave(answers, (time.monotonic_ns() - self.start_ns) // 1000, first)

    def _open_streams(self) -> dict[int, _Stream]:
        if self._streams is None:
            # What a model says to null rows is nobody's, but for samples: those are nothing else.
            is_warm_up = self._batches.failures is not None
            self._streams = {
                position: self._stream(self._entry(position))
                for position in range(len(self._entries))
                if is_warm_up or self._is_somebody_s(position)
            }
        return self._streams

    def _is_somebody_s(self, position: int) -> bool:
        return self._entry(position).gateway != NOBODY and self._entries[position] not in self._fillers

    def _stream(self, entry: BatchEntry) -> _Stream:
        if not self._batches.decoupled:
            return _Stream(self.input_end_ns, "", 0)
        message = self._batch.message
        run = f"{message.scheduler}.{message.batch_id}"
        if entry.place is not None:
            run = f"{message.scheduler}.sequence.{entry.place.run}.{entry.key}"
        return _Stream(self.input_end_ns, run, self._batches.resume(run))

    def _run_of(self, stream: _Stream) -> Run | None:
        """What tells this run's answers from those of others, and their order; only streams have it."""
        return (stream.run, stream.responses) if stream.run else None

    @contained()
    def _moments(self, position: int) -> Moments | None:
        if not self._requests[position].wants_moments:
            return None
        return moments_of(self._batch, self._entries[position], self)

    def _entry(self, position: int) -> BatchEntry:
        return self._batch.message.entries[self._entries[position]]

    def _answers(self, results: dict[int, Result]) -> list[tuple[str, bytes]]:
        """The messages with the last answers to these entries, less those that have it already."""
        positions = {index: position for position, index in enumerate(self._entries) if index not in self._fillers}
        streams = self._open_streams()
        by_gateway: dict[str, list[tuple[Any, ...]]] = {}
        for index, result in results.items():
            position = positions.get(index)
            run: Run | None = None
            moments: Moments | None = None
            if position is not None:
                stream = streams.get(position)
                if stream is None:
                    continue
                run, moments = self._run_of(stream), self._moments(position)
                self._count_response(position, stream, result, time.monotonic_ns())
                self._end(position, has_failed=_has_failed(result))
            entry = self._batch.message.entries[index]
            row = self._batches.packer.packed(entry.gateway, entry.key, result, True, moments, run)
            by_gateway.setdefault(entry.gateway, []).append(row)
        return [(gateway, pack_rows(self._batches.version, rows)) for gateway, rows in by_gateway.items()]

    def _leave(
        self, answers: list[tuple[str, bytes]], busy_us: int | None = None, first: Sequence[Outgoing] = ()
    ) -> None:
        """Publishes answers, with the end of the execution (`busy_us`) or of the batch where they are it."""
        message = self._batch.message
        is_over = self._has_returned and not self._open_streams()
        done: Done | None = None
        if is_over or busy_us is not None:
            outcome = BatchOutcome.ANSWERED if is_over else BatchOutcome.RELEASED
            done = Done(message.batch_id, outcome, busy_us or 0, self._rescheduled if is_over else ())
        # What is to run again still holds its frame.
        acks = message.acks if is_over and not self._rescheduled else ()
        self._batches.publish(FinishedBatch(message.scheduler, done, answers, acks, first))
        if is_over:
            self._batches.remove(self)

    # Counting: before the answer leaves, so that who has read it finds it counted

    def _end(self, position: int, has_failed: bool) -> None:
        """The request has its last answer."""
        streams = self._open_streams()
        del streams[position]
        self._count_end(position, has_failed)
        if not streams:
            self._count_execution()

    @contained()
    def _count_end(self, position: int, has_failed: bool) -> None:
        now_ns = time.monotonic_ns()
        statistics = self._batches.statistics
        queue_ns = self._entry(position).queued_us * 1000 + self.start_ns - self._batch.received_ns
        is_abandoned = self._entries[position] in self._batch.cancelled
        if has_failed or is_abandoned:
            reason = "CANCELED" if is_abandoned else "BACKEND"
            statistics.record_failures(1, reason, queue_ns + now_ns - self.start_ns)
        else:
            phases = self._phases_ns(now_ns)
            staged_ns = self.start_ns - self._batch.received_ns
            statistics.record_requests(1, self._rows[position], queue_ns, phases, staged_ns)

    @contained()
    def _count_execution(self) -> None:
        if self._uncounted and self._entries:
            self._uncounted = False
            phases = self._phases_ns(time.monotonic_ns())
            rows = sum(size for at, size in enumerate(self._rows) if self._is_somebody_s(at))
            self._batches.statistics.record_execution(rows, phases, time.time_ns() // 1_000_000)

    def _count_response(self, position: int, stream: _Stream, result: Result | None, began_ns: int) -> None:
        now_ns = time.monotonic_ns()
        if self._batches.decoupled:
            self._count_stream_response(position, stream, result, began_ns, now_ns)
        stream.responses += 1
        stream.last_ns = now_ns

    @contained()
    def _count_stream_response(
        self, position: int, stream: _Stream, result: Result | None, began_ns: int, now_ns: int
    ) -> None:
        is_cancel = result is not None and result.error is not None and result.error.code is ErrorCode.CANCELLED
        if is_cancel or self._entries[position] in self._batch.cancelled:
            outcome = "cancel"
        elif result is None:
            outcome = "empty_response"
        else:
            outcome = "success" if result.error is None else "fail"
        self._batches.statistics.record_response(
            stream.responses, outcome, began_ns - stream.last_ns, now_ns - began_ns
        )

    def _phases_ns(self, now_ns: int) -> tuple[int, int, int]:
        """(input, infer, output) so far; what a model sends itself leaves while it infers."""
        infer_end_ns = self.infer_end_ns if self._has_returned else now_ns
        return self.input_end_ns - self.start_ns, max(0, infer_end_ns - self.input_end_ns), 0


def _has_failed(result: Result | None) -> bool:
    """Whether this end is a failure: a model's own error response counts as a success, as in Triton."""
    return result is not None and result.error is not None and not result.is_model_response

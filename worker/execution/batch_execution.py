"""`BatchExecution`: what a backend gets together with the requests of a batch, and how their responses leave.

A model may return its responses from `execute`, or send them itself, also after `execute` has returned. What it sends is
published at once, one message for each response; nothing is kept here. If requests are open when `execute` returns, the
instance is released for the next batch, and this batch ends with its last response.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from weir.bus.links.framing import Outgoing
from weir.bus.payloads.arena import PayloadReader
from weir.runtime.containment import contained
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.wire.messages import (
    NO_REPLY,
    BatchCompletion,
    BatchEnded,
    BatchEntry,
    BatchReleased,
    ResponseRun,
    Timestamps,
    pack_end,
    pack_responses,
)
from weir.worker.backend_api.interface import RESCHEDULED, Execution, Result
from weir.worker.execution.batch_tensors import Reshaper
from weir.worker.execution.response_writer import ResponseWriter, pack_by_gateway, packing_failed
from weir.worker.execution.running_batch import RunningBatch, trace_timestamps
from weir.worker.execution.sequences import ImplicitStates
from weir.worker.execution.shared_memory import SharedMemoryIO
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.updates import BatchUpdate

MAX_RESCHEDULED = 10_000
"""Rescheduled requests of an instance whose number of responses is remembered. The oldest are forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceContext:
    """What all batches of one instance share. `reshaper` and `states` are None for a model that does not need them."""

    name: str
    version: int
    config: ModelConfig
    writer: ResponseWriter
    shared_memory: SharedMemoryIO
    reshaper: Reshaper | None = None
    states: ImplicitStates | None = None


class StreamingBatches:
    """The batches that have left their instance while requests of theirs are open; and how their responses are sent.

    `publish` gets the updates, in any thread. `failures` gets the text of each error that a model sends itself, if given.
    """

    def __init__(
        self,
        context: InstanceContext,
        statistics: ModelStatistics,
        publish: Callable[[BatchUpdate], None],
        failures: list[str] | None = None,
    ) -> None:
        self.version = context.version
        self.is_decoupled = context.config.is_decoupled
        self.writer = context.writer
        self.reshaper = context.reshaper
        self.deliver = context.shared_memory.deliver
        self.statistics = statistics
        self.publish = publish
        self.failures = failures
        # Rescheduled sequences by run, with the number of their responses: the next batch continues the numbering.
        self._rescheduled: dict[str, int] = {}
        self._changed = threading.Condition()
        self._open: set[BatchExecution] = set()

    def add(self, execution: BatchExecution) -> None:
        """Adds a batch that has left its instance."""
        with self._changed:
            self._open.add(execution)

    def remove(self, execution: BatchExecution) -> None:
        """Removes a batch that has ended, if it was added."""
        with self._changed:
            self._open.discard(execution)
            self._changed.notify_all()

    def reschedule(self, run: str, responses: int) -> None:
        """Remembers the number of responses of a rescheduled request."""
        self._rescheduled[run] = responses
        if len(self._rescheduled) > MAX_RESCHEDULED:
            del self._rescheduled[next(iter(self._rescheduled))]

    def resume(self, run: str) -> int:
        """The number of responses that the request of this run had when it was rescheduled."""
        return self._rescheduled.pop(run, 0)

    def wait(self) -> None:
        """Returns when all batches have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open)


class _Stream:
    """An open request: how many responses it has, and when the last one was sent.

    `run` identifies the run of a decoupled request among those that were repeated; it is "" for other models.
    """

    __slots__ = ("last_ns", "responses", "run")

    def __init__(self, start_ns: int, run: str, responses: int) -> None:
        self.run = run
        self.responses = responses
        self.last_ns = start_ns


class BatchExecution(Execution):
    """One run of a batch: `begin` sets which entries run, `returned` what the instance returned. Thread-safe in between."""

    __slots__ = (
        "_batch",
        "_batches",
        "_entries",
        "_has_returned",
        "_lock",
        "_padding",
        "_requests",
        "_rescheduled",
        "_rows",
        "_streams",
        "_uncounted",
    )

    def __init__(self, batch: RunningBatch, batches: StreamingBatches, reader: PayloadReader) -> None:
        super().__init__(reader)
        self._batch = batch
        self._batches = batches
        self._entries: Sequence[int] = ()
        self._padding: Collection[int] = ()
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
        padding: Collection[int] = (),
    ) -> None:
        """Sets the entries of the batch that the instance gets as `requests`, with so many rows each.

        The entries in `padding` take the places of requests that can't run; responses to them are dropped.
        """
        self._entries = entries
        self._padding = padding
        self._requests = requests
        self._rows = rows

    @property
    def has_responded(self) -> bool:
        """Whether the model has sent a response itself."""
        return self._streams is not None

    def is_cancelled(self, position: int) -> bool:
        """Whether the request was cancelled or its deadline has passed."""
        entry = self._entries[position]
        return entry in self._batch.cancelled or self._batch.is_late(entry)

    def may_run_again(self, position: int) -> bool:
        """Whether the request is still wanted and its caller has no response to it."""
        if self.is_cancelled(position) or not self._has_caller(position):
            return False
        with self._lock:
            stream = None if self._streams is None else self._streams.get(position)
            return self._streams is None or (stream is not None and stream.responses == 0)

    def has_run_alone(self, position: int, run: Execution) -> None:
        """Counts the run of one request by itself."""
        now_ns = time.monotonic_ns()
        phases_ns = run.input_end_ns - run.start_ns, now_ns - run.input_end_ns, 0
        self._batches.statistics.record_execution(self._rows[position], phases_ns, time.time_ns() // 1_000_000)

    @contained(on_error="_response_failed")
    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """Publishes a response; one to a request that has its last response is dropped."""
        with self._lock:
            stream = self._open_streams().get(position)
            if stream is not None:
                self._send(position, stream, result, is_final)

    def _response_failed(self, error: Exception, position: int, _result: Result | None, _is_final: bool) -> None:
        """Ends the request of a response that can't be sent with an error; the others of the batch go on."""
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
            row = pack_end(entry.key, self._timestamps(position), self._run_of(stream))
        else:
            if batches.reshaper is not None:
                batches.reshaper.to_client(result)
            if entry.gateway != NO_REPLY:
                batches.deliver(self._requests[position], result)
            timestamps = self._timestamps(position) if is_final else None
            row = batches.writer.write(entry, result, is_final, timestamps, self._run_of(stream))
        message = pack_responses(batches.version, [row])
        self._count_response(position, stream, result, began_ns)
        if is_final:
            self._end(position, has_failed=_has_failed(result))
        self._publish([(entry.gateway, message)])

    def fail(self, error: WeirError) -> None:
        """Ends all open requests with `error`."""
        with self._lock:
            streams = self._open_streams()
            if self._batches.failures is not None:
                self._batches.failures += [error.message] * len(streams)
            if streams:
                self._publish(
                    self._final_responses({self._entries[position]: Result(error=error) for position in streams})
                )

    def returned(self, results: Sequence[Result | None], first: Sequence[Outgoing] = ()) -> None:
        """Publishes what `execute` has returned: a result for each entry of the batch, None for an open request.

        `first` are messages that are sent before the responses.
        """
        with self._lock:
            streams = self._open_streams()
            self._has_returned = True
            responses = self._final_responses(
                {i: result for i, result in enumerate(results) if result is not None and result is not RESCHEDULED}
            )
            for position in [position for position in streams if results[self._entries[position]] is RESCHEDULED]:
                stream = streams.pop(position)
                self._rescheduled.append(self._entries[position])
                if stream.run:
                    self._batches.reschedule(stream.run, stream.responses)
            self._count_execution()
            if streams:
                self._batches.add(self)
            self._publish(responses, (time.monotonic_ns() - self.start_ns) // 1000, first)

    def _open_streams(self) -> dict[int, _Stream]:
        if self._streams is None:
            # Responses to padding are dropped, except during a warm-up, whose samples have no caller either.
            is_warm_up = self._batches.failures is not None
            self._streams = {
                position: self._stream(self._entry(position))
                for position in range(len(self._entries))
                if is_warm_up or self._has_caller(position)
            }
        return self._streams

    def _has_caller(self, position: int) -> bool:
        return self._entry(position).gateway != NO_REPLY and self._entries[position] not in self._padding

    def _stream(self, entry: BatchEntry) -> _Stream:
        if not self._batches.is_decoupled:
            return _Stream(self.input_end_ns, "", 0)
        message = self._batch.message
        run = f"{message.scheduler}.{message.batch_id}"
        if entry.position is not None:
            run = f"{message.scheduler}.sequence.{entry.position.run}.{entry.key}"
        return _Stream(self.input_end_ns, run, self._batches.resume(run))

    def _run_of(self, stream: _Stream) -> ResponseRun | None:
        """Identifies and numbers the responses of this run of a decoupled request; None for other models."""
        return (stream.run, stream.responses) if stream.run else None

    @contained()
    def _timestamps(self, position: int) -> Timestamps | None:
        if not self._requests[position].wants_timestamps:
            return None
        return trace_timestamps(self._batch, self._entries[position], self)

    def _entry(self, position: int) -> BatchEntry:
        return self._batch.message.entries[self._entries[position]]

    def _final_responses(self, results: dict[int, Result]) -> list[tuple[str, bytes]]:
        """The messages with the last responses to these entries, except those that have one already."""
        positions = {index: position for position, index in enumerate(self._entries) if index not in self._padding}
        streams = self._open_streams()
        by_gateway: dict[str, list[tuple[Any, ...]]] = {}
        for index, result in results.items():
            position = positions.get(index)
            run: ResponseRun | None = None
            timestamps: Timestamps | None = None
            if position is not None:
                stream = streams.get(position)
                if stream is None:
                    continue
                run, timestamps = self._run_of(stream), self._timestamps(position)
                self._count_response(position, stream, result, time.monotonic_ns())
                self._end(position, has_failed=_has_failed(result))
            entry = self._batch.message.entries[index]
            row = self._batches.writer.write(entry, result, True, timestamps, run)
            by_gateway.setdefault(entry.gateway, []).append(row)
        return pack_by_gateway(self._batches.version, by_gateway)

    def _publish(
        self, responses: list[tuple[str, bytes]], busy_us: int | None = None, first: Sequence[Outgoing] = ()
    ) -> None:
        """Publishes responses, with the release of the instance (`busy_us`) or the completion of the batch if due."""
        message = self._batch.message
        is_over = self._has_returned and not self._open_streams()
        completion: BatchCompletion | None = None
        if is_over:
            completion = BatchEnded(message.batch_id, busy_us or 0, self._rescheduled)
        elif busy_us is not None:
            completion = BatchReleased(message.batch_id, busy_us)
        self._batches.publish(BatchUpdate(message.scheduler, (completion,) if completion else (), responses, first))
        if is_over:
            self._batches.remove(self)

    # Counting comes before publication, so that a client that has its response finds it in the statistics.

    def _end(self, position: int, has_failed: bool) -> None:
        """Removes the request, which has its last response, and counts it."""
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
        is_cancelled = self._entries[position] in self._batch.cancelled
        if has_failed or is_cancelled:
            reason = "CANCELED" if is_cancelled else "BACKEND"
            statistics.record_failures(1, reason, queue_ns + now_ns - self.start_ns)
        else:
            phases = self._phases_ns(now_ns)
            staged_ns = self.start_ns - self._batch.received_ns
            statistics.record_requests(1, self._rows[position], queue_ns, phases, staged_ns)
            if statistics.latencies is not None:
                statistics.latencies.observe([queue_ns], phases)

    @contained()
    def _count_execution(self) -> None:
        if self._uncounted and self._entries:
            self._uncounted = False
            phases = self._phases_ns(time.monotonic_ns())
            rows = sum(size for at, size in enumerate(self._rows) if self._has_caller(at))
            self._batches.statistics.record_execution(rows, phases, time.time_ns() // 1_000_000)

    def _count_response(self, position: int, stream: _Stream, result: Result | None, began_ns: int) -> None:
        now_ns = time.monotonic_ns()
        if self._batches.is_decoupled:
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
        statistics = self._batches.statistics
        statistics.record_response(stream.responses, outcome, began_ns - stream.last_ns, now_ns - began_ns)
        if statistics.latencies is not None and stream.responses == 0 and result is not None:
            queued_ns = self._entry(position).queued_us * 1000
            statistics.latencies.observe_first_responses([queued_ns + now_ns - self._batch.received_ns])

    def _phases_ns(self, now_ns: int) -> tuple[int, int, int]:
        """The durations of (input, infer, output) so far; a model that sends responses itself infers until it returns."""
        infer_end_ns = self.infer_end_ns if self._has_returned else now_ns
        return self.input_end_ns - self.start_ns, max(0, infer_end_ns - self.input_end_ns), 0


def _has_failed(result: Result | None) -> bool:
    """Whether the request has failed: an error response that the model made counts as a success, as in Triton."""
    return result is not None and result.error is not None and not result.is_model_response

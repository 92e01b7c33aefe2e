"""`Batch`: a batch from its arrival at a worker to the last response to the last of its requests, and how those leave.

A model may return its responses from `execute`, or send them itself, also after `execute` has returned. What it sends is
published at once, one message for each response; nothing is kept here. If requests are open when `execute` returns, the
instance is released for the next batch, and this batch ends with its last response.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from weir.bus.links.framing import Outgoing
from weir.bus.payloads.arena import PayloadReader
from weir.bus.payloads.fetch_plan import Outcome
from weir.runtime.containment import contained
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import PayloadRef
from weir.schemas.wire.batches import NO_REPLY, BatchCompletion, BatchEnded, BatchEntry, BatchMessage, BatchReleased
from weir.schemas.wire.calls import ResponseRun, Timestamps, pack_end, pack_responses
from weir.telemetry.tracing.trace import BATCH_SENT, WORKER_RECEIVED
from weir.worker.backend_api.interface import RESCHEDULED, Execution, ExecutionHandle, Result
from weir.worker.execution.response_writer import Ending, pack_by_gateway, packing_failed
from weir.worker.execution.shared_memory import InputBuffers
from weir.worker.execution.statistics import BatchRun
from weir.worker.execution.streaming import StreamingBatches
from weir.worker.execution.updates import BatchUpdate

_NO_SEQUENCES: Mapping[int, int | str] = MappingProxyType({})


class _Stream:
    """An open request: how many responses it has, and when the last one was sent.

    `run` identifies the run of a decoupled request among those that were repeated; it is "" for other models.
    """

    __slots__ = ("last_ns", "responses", "run")

    def __init__(self, start_ns: int, run: str, responses: int) -> None:
        self.run = run
        self.responses = responses
        self.last_ns = start_ns


class _Response(NamedTuple):
    """A response: the request's position, its number, its result, and when it was written; the model took `infer_ns`."""

    position: int
    number: int
    result: Result | None
    is_final: bool
    infer_ns: int
    began_ns: int
    written_ns: int


class Batch(Execution):
    """A batch message, and what becomes known of it on its way. It is also the `Execution` that its instance gets.

    1. It has arrived. The event loop creates and cancels it; any thread may look whether a request was `cancelled` or
       `is_late`. `has_deadlines` spares batches without deadlines, which most are, from looking at the clock. `fetched` has
       the payloads from other hosts, or the reasons why they were lost. For traces, `worker` is the id of this worker.
    2. An instance has begun it (`begin`): `requests` are those that run, at these `positions` of the message and with these
       `sizes` in rows. `results` has a result for each entry that does not run. Entries at the positions in `padding` only
       take the places of others. `first` are messages that are sent before the responses. `sequence_ids` are the
       correlation ids of its sequences, by position.
    3. The model has been called: `outcomes` are the outcomes of the requests, or the handle by which to wait for them.
       `content` is what the requests have in clients' memory, copied; it is valid until the batch leaves the instance.
    4. The instance is free, and requests may be open: `respond`, `returned` and `fail` are thread-safe.
    """

    __slots__ = (
        "_failure",
        "_has_returned",
        "_is_run_counted",
        "_lock",
        "_rescheduled",
        "_streaming",
        "_streams",
        "_uncounted",
        "cancelled",
        "content",
        "fetched",
        "first",
        "has_deadlines",
        "message",
        "on_cancel",
        "outcomes",
        "padding",
        "positions",
        "received_ns",
        "requests",
        "results",
        "sequence_ids",
        "sizes",
        "worker",
    )

    _streaming: StreamingBatches
    requests: list[InferRequest]
    positions: list[int]
    results: list[Result | None]
    first: list[Outgoing]

    def __init__(self, message: BatchMessage, worker: str = "") -> None:
        self.message = message
        self.worker = worker
        self.received_ns = time.monotonic_ns()
        self.has_deadlines = False
        for entry in message.entries:
            if entry.deadline_ms:
                self.has_deadlines = True
        self.cancelled: frozenset[int] = frozenset()
        """The positions of cancelled entries."""
        self.sequence_ids: Mapping[int, int | str] = _NO_SEQUENCES
        self.fetched: Mapping[PayloadRef, Outcome] | None = None
        self.on_cancel: Callable[[], None] | None = None
        """Called in the event loop after `cancelled` has grown."""

    def is_late(self, position: int) -> bool:
        """Whether the deadline of an entry has passed."""
        return self.has_deadlines and 0 < self.message.entries[position].deadline_ms <= time.time_ns() // 1_000_000

    def cancel(self, gateway: str, keys: Iterable[int]) -> None:
        """Marks the requests of `gateway` with these keys as cancelled."""
        wanted = {(gateway, key) for key in keys}
        self.cancelled |= {
            position for position, entry in enumerate(self.message.entries) if (entry.gateway, entry.key) in wanted
        }
        if self.on_cancel is not None:
            self.on_cancel()

    def begin(self, streaming: StreamingBatches, reader: PayloadReader) -> None:
        """Begins the run of the batch in the thread of its instance, to which `streaming` and `reader` belong."""
        super().__init__(reader)
        self._streaming = streaming
        self.positions, self.requests, self.results, self.first = [], [], [], []
        self.sizes: Sequence[int] = ()
        self.padding: Collection[int] = ()
        self.outcomes: Sequence[Result | None] | ExecutionHandle = ()
        self.content: InputBuffers | None = None
        self._lock = threading.Lock()
        self._streams: dict[int, _Stream] | None = None
        self._failure: WeirError | None = None
        self._has_returned = False
        self._uncounted: list[_Response] = []
        self._is_run_counted = False
        self._rescheduled: list[int] = []

    def timestamps(self, position: int) -> Timestamps:
        """Triton's trace timestamps of a request that runs, in Unix nanoseconds, up to its response.

        With them come the facts about its batch that `weir.schemas.wire.calls.Timestamps` lists.
        """
        now_ns = time.monotonic_ns()
        to_unix = time.time_ns() - now_ns
        infer_end_ns = self.infer_end_ns
        if infer_end_ns < self.input_end_ns:
            infer_end_ns = now_ns  # the model still runs, or failed before the end of its run
        message = self.message
        timestamps: Timestamps = {
            "QUEUE_START": self.received_ns + to_unix - self._entry(position).queued_us * 1000,
            WORKER_RECEIVED: self.received_ns + to_unix,
            "COMPUTE_START": self.start_ns + to_unix,
            "COMPUTE_INPUT_END": self.input_end_ns + to_unix,
            "COMPUTE_OUTPUT_START": infer_end_ns + to_unix,
            "COMPUTE_END": now_ns + to_unix,
            "BATCH_ID": message.batch_id,
            "BATCH_SIZE": len(message.entries),
            "INSTANCE": message.instance,
            "SCHEDULER": message.scheduler,
            "WORKER": self.worker,
        }
        if message.sent_ns:
            timestamps[BATCH_SENT] = message.sent_ns
        return timestamps

    @contained()
    def record(self, outcomes: Sequence[Result | None], end_ns: int, busy_ns: int) -> None:
        """Counts the run, which ended at `end_ns` with these outcomes and kept its instance busy for `busy_ns`.

        The run counts with all its rows, whatever their outcomes are. A request counts as succeeded, failed (BACKEND) or
        cancelled. As in Triton, an error response that the model made counts as a success. Requests without a caller, and
        padding, do not count. Responses are sent even if this fails.
        """
        statistics, start_ns, cancelled = self._streaming.statistics, self.start_ns, self.cancelled
        infer_end_ns = self.infer_end_ns if self.infer_end_ns >= self.input_end_ns else end_ns  # else the run failed
        waited_ns, duration_ns = start_ns - self.received_ns, end_ns - start_ns
        queues_ns: list[int] = []
        executed_rows = succeeded_rows = 0
        entries, padding = self.message.entries, self.padding
        for position, rows, outcome in zip(self.positions, self.sizes, outcomes, strict=True):
            entry = entries[position]
            if entry.gateway == NO_REPLY or position in padding:
                continue
            executed_rows += rows
            queue_ns = entry.queued_us * 1000 + waited_ns
            if position in cancelled or (outcome is not None and outcome.error and not outcome.is_model_response):
                reason = "CANCELED" if position in cancelled else "BACKEND"
                statistics.record_failures(1, reason, queue_ns + duration_ns)
            else:
                succeeded_rows += rows
                queues_ns.append(queue_ns)
        if executed_rows:
            phases_ns = self.input_end_ns - start_ns, infer_end_ns - self.input_end_ns, end_ns - infer_end_ns
            run = BatchRun(executed_rows, phases_ns, busy_ns, waited_ns, duration_ns)
            statistics.record_batch(run, succeeded_rows, queues_ns)

    @property
    def has_responded(self) -> bool:
        """Whether the model has sent a response itself."""
        return self._streams is not None

    def is_cancelled(self, position: int) -> bool:
        """Whether the request was cancelled or its deadline has passed."""
        entry = self.positions[position]
        return entry in self.cancelled or self.is_late(entry)

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
        self._streaming.statistics.record_execution(self.sizes[position], phases_ns, time.time_ns() // 1_000_000)

    @contained(on_error="_response_failed")
    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """Publishes a response; one to a request that has its last response is dropped."""
        with self._lock:
            stream = self._open_streams().get(position)
            if stream is not None:
                self._send(position, stream, result, self._ending(position, stream, is_final))

    def _response_failed(self, error: Exception, position: int, _result: Result | None, _is_final: bool) -> None:
        """Ends the request of a response that can't be sent with an error; the others of the batch go on."""
        with self._lock:
            stream = self._open_streams().get(position)
            if stream is not None:
                run = self._run_of(stream)
                self._send(position, stream, Result(error=packing_failed(error)), Ending(run=run))

    def _send(self, position: int, stream: _Stream, result: Result | None, ending: Ending) -> None:
        batches = self._streaming
        entry = self._entry(position)
        began_ns = time.monotonic_ns()
        if batches.failures is not None and result is not None and result.error is not None:
            batches.failures.append(result.error.message)
        if result is None:
            row = pack_end(entry.key, ending.timestamps, ending.run)
        else:
            row = batches.writer.write(entry, self.requests[position], result, ending)
        message = pack_responses(batches.version, [row])
        self._note(position, stream, result, ending.is_final, began_ns)
        self._publish([(entry.gateway, message)])

    def fail(self, error: WeirError) -> None:
        """Ends all open requests with `error`."""
        with self._lock:
            streams = self._open_streams()
            if self._streaming.failures is not None:
                self._streaming.failures += [error.message] * len(streams)
            if streams:
                self._publish(
                    self._final_responses({self.positions[position]: Result(error=error) for position in streams})
                )

    def fail_open(self, error: WeirError) -> None:
        """Ends the requests whose responses the model sends itself with `error`; others are not affected."""
        with self._lock:
            self._failure = error
            is_open = self._streams is not None
        if is_open:
            self.fail(error)

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
            for position in [position for position in streams if results[self.positions[position]] is RESCHEDULED]:
                stream = streams.pop(position)
                self._rescheduled.append(self.positions[position])
                if stream.run:
                    self._streaming.reschedule(stream.run, stream.responses)
            if streams:
                self._streaming.add(self)
            self._publish(responses, (time.monotonic_ns() - self.start_ns) // 1000, first)
            failure = self._failure
        if failure is not None:
            self.fail(failure)

    def _open_streams(self) -> dict[int, _Stream]:
        if self._streams is None:
            # Responses to padding are dropped, except during a warm-up, whose samples have no caller either.
            is_warm_up = self._streaming.failures is not None
            self._streams = {
                position: self._stream(self._entry(position))
                for position in range(len(self.positions))
                if is_warm_up or self._has_caller(position)
            }
        return self._streams

    def _has_caller(self, position: int) -> bool:
        return self._entry(position).gateway != NO_REPLY and self.positions[position] not in self.padding

    def _stream(self, entry: BatchEntry) -> _Stream:
        if not self._streaming.is_decoupled:
            return _Stream(self.input_end_ns, "", 0)
        message = self.message
        run = f"{message.scheduler}.{message.batch_id}"
        if entry.position is not None:
            run = f"{message.scheduler}.sequence.{entry.position.run}.{entry.key}"
        return _Stream(self.input_end_ns, run, self._streaming.resume(run))

    def _run_of(self, stream: _Stream) -> ResponseRun | None:
        """Identifies and numbers the responses of this run of a decoupled request; None for other models."""
        return (stream.run, stream.responses) if stream.run else None

    def _ending(self, position: int, stream: _Stream, is_final: bool) -> Ending:
        is_traced = is_final and self.requests[position].wants_timestamps
        return Ending(is_final, self.timestamps(position) if is_traced else None, self._run_of(stream))

    def _entry(self, position: int) -> BatchEntry:
        return self.message.entries[self.positions[position]]

    def _final_responses(self, results: dict[int, Result]) -> list[tuple[str, bytes]]:
        """The messages with the last responses to these entries, except those that have one already."""
        positions = {index: position for position, index in enumerate(self.positions) if index not in self.padding}
        streams = self._open_streams()
        by_gateway: dict[str, list[tuple[Any, ...]]] = {}
        writer = self._streaming.writer
        for index, result in results.items():
            entry, position = self.message.entries[index], positions.get(index)
            if position is None:
                row = writer.write(entry, None, result)
            else:
                stream = streams.get(position)
                if stream is None:
                    continue
                began_ns, request = time.monotonic_ns(), self.requests[position]
                row = writer.write(entry, request, result, self._ending(position, stream, True))
                self._note(position, stream, result, True, began_ns)
            by_gateway.setdefault(entry.gateway, []).append(row)
        return pack_by_gateway(self._streaming.version, by_gateway)

    def _publish(
        self, responses: list[tuple[str, bytes]], busy_us: int | None = None, first: Sequence[Outgoing] = ()
    ) -> None:
        """Publishes responses, with the release of the instance (`busy_us`) or the completion of the batch if due."""
        self._count()
        message = self.message
        is_over = self._has_returned and not self._open_streams()
        completion: BatchCompletion | None = None
        if is_over:
            completion = BatchEnded(message.batch_id, busy_us or 0, self._rescheduled)
        elif busy_us is not None:
            completion = BatchReleased(message.batch_id, busy_us)
        self._streaming.publish(BatchUpdate(message.scheduler, (completion,) if completion else (), responses, first))
        if is_over:
            self._streaming.remove(self)

    def _note(self, position: int, stream: _Stream, result: Result | None, is_final: bool, began_ns: int) -> None:
        """Notes a response that was written from `began_ns` on, and is published next."""
        now_ns = time.monotonic_ns()
        infer_ns = began_ns - stream.last_ns
        self._uncounted.append(_Response(position, stream.responses, result, is_final, infer_ns, began_ns, now_ns))
        stream.responses += 1
        stream.last_ns = now_ns
        if is_final:
            del self._open_streams()[position]

    @contained()
    def _count(self) -> None:
        """Counts the responses that are published next, and the run when it has ended or its last request has.

        It is called before they are published, so that a client that has its response finds it in the statistics.
        """
        responses, self._uncounted = self._uncounted, []
        for response in responses:
            if self._streaming.is_decoupled:
                self._count_response(response)
            if response.is_final:
                self._count_end(response)
        if not self._is_run_counted and self.positions and (self._has_returned or not self._open_streams()):
            self._is_run_counted = True
            phases = self._phases_ns(time.monotonic_ns())
            rows = sum(size for at, size in enumerate(self.sizes) if self._has_caller(at))
            self._streaming.statistics.record_execution(rows, phases, time.time_ns() // 1_000_000)

    def _count_end(self, response: _Response) -> None:
        position, result, statistics = response.position, response.result, self._streaming.statistics
        queue_ns = self._entry(position).queued_us * 1000 + self.start_ns - self.received_ns
        is_cancelled = self.positions[position] in self.cancelled
        # An error response that the model made counts as a success, as in Triton.
        has_failed = result is not None and result.error is not None and not result.is_model_response
        if has_failed or is_cancelled:
            reason = "CANCELED" if is_cancelled else "BACKEND"
            statistics.record_failures(1, reason, queue_ns + response.written_ns - self.start_ns)
        else:
            phases = self._phases_ns(response.written_ns)
            staged_ns = self.start_ns - self.received_ns
            statistics.record_requests(1, self.sizes[position], queue_ns, phases, staged_ns)
            if statistics.latencies is not None:
                statistics.latencies.observe([queue_ns], phases)

    def _count_response(self, response: _Response) -> None:
        position, result, statistics = response.position, response.result, self._streaming.statistics
        is_cancel = result is not None and result.error is not None and result.error.code is ErrorCode.CANCELLED
        if is_cancel or self.positions[position] in self.cancelled:
            outcome = "cancel"
        elif result is None:
            outcome = "empty_response"
        else:
            outcome = "success" if result.error is None else "fail"
        output_ns = response.written_ns - response.began_ns
        statistics.record_response(response.number, outcome, response.infer_ns, output_ns)
        if statistics.latencies is not None and response.number == 0 and result is not None:
            queued_ns = self._entry(position).queued_us * 1000
            statistics.latencies.observe_first_responses([queued_ns + response.written_ns - self.received_ns])

    def _phases_ns(self, now_ns: int) -> tuple[int, int, int]:
        """The durations of (input, infer, output) so far; a model that sends responses itself infers until it returns."""
        infer_end_ns = self.infer_end_ns if self._has_returned else now_ns
        return self.input_end_ns - self.start_ns, max(0, infer_end_ns - self.input_end_ns), 0

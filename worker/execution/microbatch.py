"""`Microbatch`: batches of one request each that the process of an instance runs one after another, from one message.

A message to the process and back for each request would cost more than a fast model takes. Each batch ends by itself, as
soon as its request has: the microbatch is only the way to the process and back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

from weir.bus.payloads.arena import PayloadReader
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.wire.messages import NO_REPLY
from weir.worker.backend_api.interface import EndedRequest, Execution, MicrobatchRun, Result
from weir.worker.execution.batch_execution import BatchExecution, StreamingBatches
from weir.worker.execution.running_batch import RunningBatch
from weir.worker.execution.statistics import ModelStatistics, SingleRuns


class Microbatch(Execution):
    """The execution of `requests`, one from each of `batches`, with `rows` rows each. Thread-safe.

    A request whose responses the model sends itself gets an execution of its own, among `streaming`.
    """

    __slots__ = ("_failure", "_lock", "_run", "_senders", "_streaming", "batches", "requests", "rows")

    def __init__(
        self,
        batches: Sequence[RunningBatch],
        requests: Sequence[InferRequest],
        rows: Sequence[int],
        streaming: StreamingBatches,
        reader: PayloadReader,
    ) -> None:
        super().__init__(reader)
        self.batches = batches
        self.requests = requests
        self.rows = rows
        self._streaming = streaming
        self._lock = threading.Lock()
        self._senders: dict[int, BatchExecution] = {}
        self._failure: WeirError | None = None
        self._run: MicrobatchRun | None = None

    def started(self, run: MicrobatchRun) -> None:
        """Sets the run of the requests, which has started."""
        self._run = run

    @property
    def unstarted(self) -> int:
        """How many batches have not started."""
        return 0 if self._run is None else self._run.unstarted

    def withdraw(self) -> Sequence[RunningBatch]:
        """Takes back the batches that have not started: whoever calls this completes them."""
        return () if self._run is None else [self.batches[position] for position in self._run.withdraw()]

    @property
    def withdrawn(self) -> Collection[int]:
        """The positions of the batches that were taken back."""
        return () if self._run is None else self._run.withdrawn

    def ended_elsewhere(self) -> list[RunningBatch]:
        """The batches that were taken back, or whose responses the model sends itself."""
        return [self.batches[position] for position in {*self.withdrawn, *self._senders}]

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """Publishes a response that the model sends itself."""
        self._sender(position).respond(0, result, is_final)

    def fail(self, error: WeirError) -> None:
        """Ends the requests whose responses the model sends itself, and those that `returned` adds later."""
        with self._lock:
            self._failure = error
            senders = list(self._senders.values())
        for sender in senders:
            sender.fail(error)

    def returned(self, ended: EndedRequest) -> bool:
        """Whether the responses to the request, which the model has run, are or will be published one by one."""
        position, result, start_ns, end_ns = ended
        if result is not None and position not in self._senders:
            return False
        sender = self._sender(position)
        sender.start_ns, sender.input_end_ns, sender.infer_end_ns = start_ns - self.input_ns, start_ns, end_ns
        sender.returned([result])
        with self._lock:
            failure = self._failure
        if failure is not None:
            sender.fail(failure)
        return True

    def is_cancelled(self, position: int) -> bool:
        """Whether the request was cancelled or its deadline has passed."""
        batch = self.batches[position]
        return bool(batch.cancelled) or batch.is_late(0)

    def may_run_again(self, position: int) -> bool:
        """Whether the request is still wanted and its caller has no response to it."""
        sender = self._senders.get(position)
        if sender is not None:
            return sender.may_run_again(0)
        return not self.is_cancelled(position) and self.batches[position].message.entries[0].gateway != NO_REPLY

    @property
    def input_ns(self) -> int:
        """How long the inputs of one request were prepared, on average."""
        return (self.input_end_ns - self.start_ns) // len(self.batches)

    def record(self, statistics: ModelStatistics, ended: Sequence[EndedRequest]) -> None:
        """Counts these requests, which ran one by one, each as `record_batch` counts a run.

        The time since the last run is divided equally.
        """
        input_ns = self.input_ns
        output_ns = max(0, time.monotonic_ns() - ended[-1].end_ns) // len(ended)
        succeeded = SingleRuns()
        runs: dict[int, SingleRuns] = {}
        durations_ns: list[int] = []
        observed: list[tuple[int, tuple[int, int, int]]] = []
        for position, outcome, start_ns, end_ns in ended:
            batch, rows = self.batches[position], self.rows[position]
            staged_ns = start_ns - input_ns - batch.received_ns
            queue_ns = batch.message.entries[0].queued_us * 1000 + staged_ns
            phases_ns = (input_ns, end_ns - start_ns, output_ns)
            by_rows = runs.get(rows)
            if by_rows is None:
                by_rows = runs[rows] = SingleRuns()
            by_rows.add(rows, queue_ns, staged_ns, phases_ns)
            if batch.cancelled or (outcome is not None and outcome.error and not outcome.is_model_response):
                statistics.record_failures(1, "CANCELED" if batch.cancelled else "BACKEND", queue_ns + sum(phases_ns))
                continue
            succeeded.add(rows, queue_ns, staged_ns, phases_ns)
            durations_ns.append(queue_ns + end_ns - start_ns)
            if statistics.latencies is not None:
                observed.append((queue_ns, phases_ns))
        statistics.record_single_runs(succeeded, runs, time.time_ns() // 1_000_000)
        statistics.record_latency(durations_ns, input_ns + output_ns)
        if statistics.latencies is not None:
            for queue_ns, phases_ns in observed:
                statistics.latencies.observe([queue_ns], phases_ns)

    def _sender(self, position: int) -> BatchExecution:
        with self._lock:
            sender = self._senders.get(position)
            if sender is None:
                sender = BatchExecution(self.batches[position], self._streaming, self.reader)
                sender.begin((0,), self.rows[position : position + 1], self.requests[position : position + 1])
                sender.start_ns, sender.input_end_ns = self.start_ns, self.input_end_ns
                self._senders[position] = sender
        return sender

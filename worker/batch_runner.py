"""`BatchRunner`: takes a batch through an instance, from what came to what is answered.

In two steps, between which a device may work on it: `begin` decodes the requests and has the instance run them, `conclude`
waits for the results and makes answers of them. All of it happens in the instance's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any

from bus.payloads import PayloadReader
from bus.thread_publisher import Outgoing
from runtime.containment import contained
from schemas.errors import internal
from schemas.messages import NOBODY, BatchMessage, BatchOutcome, Done, Moments, pack_error
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from telemetry.request_log import log_request, logs_requests
from worker.answer_packer import AnswerPacker, pack_rows, packing_failed
from worker.backend import RESCHEDULED, DeviceLost, Instance, InstanceDied, InstanceDown, Pending, Result, not_iterative
from worker.batch_decoding import decoded
from worker.batch_execution import BatchExecution, FinishedBatch, OpenBatches
from worker.batch_record import record_batch
from worker.batch_tensors import batch_sizes
from worker.client_memory import ClientMemory
from worker.implicit_state import ImplicitStates
from worker.model_run import ModelRun
from worker.running_batch import RunningBatch
from worker.sequence_controls import SequenceControls
from worker.sequence_rows import accepted, fill_rows, is_null
from worker.statistics import ModelStatistics
from worker.trace_moments import moments_of

logger = logging.getLogger("weir.worker")

_NONE_TRACED: Mapping[int, Moments] = {}


class BegunBatch:
    """A batch between `begin` and `conclude`: what stands where in it, and its outcomes, or what they will come of."""

    __slots__ = ("execution", "fillers", "first", "outcomes", "positions", "requests", "results", "running", "sizes")

    def __init__(
        self,
        running: RunningBatch,
        execution: BatchExecution,
        positions: list[int],
        requests: list[InferRequest],
        sizes: list[int],
        fillers: Collection[int],
        results: list[Result | None],
        first: list[Outgoing],
        outcomes: Sequence[Result | None] | Pending,
    ) -> None:
        self.running = running
        self.execution = execution
        self.positions = positions
        self.requests = requests
        self.sizes = sizes
        self.fillers = fillers
        self.results = results
        self.first = first
        self.outcomes = outcomes

    @property
    def is_under_way(self) -> bool:
        """Whether a device works on it: `conclude` will have to wait."""
        return isinstance(self.outcomes, Pending)


class BatchRunner:
    """See the module. For the instance `name` of a version of a model, given what all its batches share.

    `statistics` is where batches are counted and `open_batches` where those go on that are not over when they have run;
    both may be others for a while.
    """

    def __init__(
        self,
        name: str,
        version: int,
        config: ModelConfig,
        packer: AnswerPacker,
        client_memory: ClientMemory,
        model_run: ModelRun,
        states: ImplicitStates | None,
        statistics: ModelStatistics,
        open_batches: OpenBatches,
    ) -> None:
        sequences, controls = config.sequence_batching, SequenceControls(config)
        self.statistics = statistics
        self.open_batches = open_batches
        self._name = name
        self._version = version
        self._batching = config.max_batch_size > 0
        self._packer = packer
        self._client_memory = client_memory
        self._model_run = model_run
        self._states = states
        self._controls = controls if controls.is_needed else None
        self._has_null_rows = sequences is not None
        self._is_iterative = sequences is not None and sequences.iterative_sequence
        # Its model may keep states by row, so rows stay where they are when one before them can't be run.
        self._keeps_rows = (
            sequences is not None and sequences.oldest is None and states is None and not config.is_decoupled
        )
        self._reader = PayloadReader()
        self._last_end_ns = 0

    def begin(self, instance: Instance, running: RunningBatch) -> BegunBatch | FinishedBatch:
        """Has the instance run the batch. It is over already where the instance died. Raises DeviceLost."""
        batch = running.message
        execution = BatchExecution(running, self.open_batches, self._reader)
        self._client_memory.begin()
        positions, requests, results = decoded(running, self._reader, self._client_memory, self.statistics)
        if logs_requests(logger):
            step = f"runs in {self._name}, batch {batch.batch_id}"
            for position, request in zip(positions, requests, strict=True):
                entry = batch.entries[position]
                log_request(logger, step, batch.model, entry.gateway, entry.key, request.id)
        fillers: Collection[int] = fill_rows(positions, requests) if self._keeps_rows else ()
        if self._controls is not None:
            ready = (not is_null(batch.entries[position]) and position not in fillers for position in positions)
            self._controls.add_to(requests, ready)
        first: list[Outgoing] = []
        if self._states is not None:
            if len(positions) < len(batch.entries):
                not_run = frozenset(range(len(batch.entries))).difference(positions)
                first += self._states.pass_over(batch, [batch.entries[position] for position in sorted(not_run)])
            positions, requests = accepted(self._states, batch, positions, requests, results)
        sizes: list[int] = []
        outcomes: Sequence[Result | None] | Pending = ()
        if requests:
            sizes = batch_sizes(requests, self._batching)
            execution.begin(positions, sizes, requests, fillers)
            try:
                outcomes = self._model_run.begin(instance, requests, execution)
            except DeviceLost:
                raise
            except InstanceDied as death:
                return self._unanswered(running, execution, death)
        return BegunBatch(running, execution, positions, requests, sizes, fillers, results, first, outcomes)

    def conclude(self, instance: Instance, begun: BegunBatch) -> FinishedBatch | None:
        """The end of the batch, or None where it has been, or will be, told piece by piece. Raises DeviceLost."""
        running, execution, results, fillers = begun.running, begun.execution, begun.results, begun.fillers
        positions, requests, sizes = begun.positions, begun.requests, begun.sizes
        batch, outcomes = running.message, begun.outcomes
        if isinstance(outcomes, Pending):
            try:
                outcomes = self._model_run.outcomes(instance, outcomes, requests, execution)
            except DeviceLost:
                raise
            except InstanceDied as death:
                return self._unanswered(running, execution, death)
        if self._states is not None and requests:
            outcomes = list(outcomes)
            begun.first += self._states.keep(batch, [batch.entries[position] for position in positions], outcomes)
        has_ended = all(outcomes)
        if not has_ended and not self._is_iterative:
            outcomes = [Result(error=not_iterative()) if outcome is RESCHEDULED else outcome for outcome in outcomes]
        for position, request, outcome in zip(positions, requests, outcomes, strict=True):
            if position in fillers:
                continue
            if request.outputs and outcome is not None and batch.entries[position].gateway != NOBODY:
                self._deliver(request, outcome)
            results[position] = outcome
        if self._is_iterative or execution.has_responded or not has_ended:
            execution.settle(results, begun.first)
            return None
        if self._has_null_rows:
            real = [batch.entries[position].gateway != NOBODY and position not in fillers for position in positions]
            positions, sizes = list(compress(positions, real)), list(compress(sizes, real))
            requests, outcomes = list(compress(requests, real)), list(compress(outcomes, real))
        traced = {
            index: moments_of(running, index, execution)
            for index, request in zip(positions, requests, strict=True)
            if request.wants_moments
        }
        answers = self._encode(batch, results, traced)
        end_ns = time.monotonic_ns()
        self._record(running, positions, sizes, outcomes, execution, end_ns)
        done = Done(batch.batch_id, BatchOutcome.ANSWERED, self._busy_us(execution, end_ns))
        return FinishedBatch(batch.scheduler, done, answers, batch.acks, begun.first)

    @contained(on_error="_delivery_failed", passes=(DeviceLost,))
    def _deliver(self, request: InferRequest, outcome: Result) -> None:
        self._client_memory.deliver(request, outcome)

    def _delivery_failed(self, error: Exception, _request: InferRequest, outcome: Result) -> None:
        outcome.error = packing_failed(error)

    @contained()
    def _record(
        self,
        running: RunningBatch,
        positions: Sequence[int],
        sizes: Sequence[int],
        outcomes: Sequence[Result | None],
        execution: BatchExecution,
        end_ns: int,
    ) -> None:
        """Counts the batch: its answers leave also where that fails."""
        record_batch(self.statistics, running, positions, sizes, outcomes, execution, end_ns)

    def failed(self, running: RunningBatch, error: BaseException) -> FinishedBatch:
        """The end of a batch that went wrong in our own code."""
        message = running.message
        failure = Result(error=internal(f"{type(error).__name__}: {error}"))
        taken_ns = (time.monotonic_ns() - running.received_ns) * len(message.entries)
        self.statistics.record_failures(len(message.entries), "OTHER", taken_ns)
        answers = self._encode(message, [failure] * len(message.entries))
        done = Done(message.batch_id, BatchOutcome.ANSWERED, 0)
        return FinishedBatch(message.scheduler, done, answers, message.acks)

    def _unanswered(self, running: RunningBatch, execution: BatchExecution, death: InstanceDied) -> FinishedBatch:
        batch = running.message
        logger.warning("%s: %s; its batch of %d is done again", self._name, death, len(batch.entries))
        outcome, busy_us = BatchOutcome.UNANSWERED, self._busy_us(execution, time.monotonic_ns())
        if isinstance(death, InstanceDown):
            outcome, busy_us = BatchOutcome.NOT_RUN, 0
        return FinishedBatch(batch.scheduler, Done(batch.batch_id, outcome, busy_us), [])

    def _busy_us(self, execution: BatchExecution, end_ns: int) -> int:
        """For how long the batch kept the instance busy: not while the one before it was still running."""
        begun_ns = max(execution.start_ns, self._last_end_ns)
        self._last_end_ns = end_ns
        return (end_ns - begun_ns) // 1000

    def _encode(
        self, batch: BatchMessage, results: Sequence[Result | None], traced: Mapping[int, Moments] = _NONE_TRACED
    ) -> list[tuple[str, bytes]]:
        by_gateway: dict[str, list[tuple[Any, ...]]] = {}
        for index, (entry, result) in enumerate(zip(batch.entries, results, strict=True)):
            if entry.gateway == NOBODY:
                continue
            answers = by_gateway.get(entry.gateway)
            if answers is None:
                answers = by_gateway[entry.gateway] = []
            if result is None:
                answers.append(pack_error(entry.key, internal("the request was not run")))
            else:
                answers.append(self._packer.packed(entry.gateway, entry.key, result, moments=traced.get(index)))
        return [(gateway, pack_rows(self._version, answers)) for gateway, answers in by_gateway.items()]

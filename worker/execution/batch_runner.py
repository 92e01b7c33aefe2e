"""`BatchRunner`: takes batches through one instance, from the message to the responses.

In two steps, between which a device may work on a batch: `start` decodes the requests and has the instance run them,
`finish` waits for the results and encodes the responses. Both run in the instance's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

from weir.bus.links.framing import Outgoing
from weir.bus.payloads.arena import PayloadReader
from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError, internal
from weir.schemas.core.requests import InferRequest
from weir.schemas.wire.messages import NO_REPLY, BatchCompletion, BatchMessage, BatchOutcome, Timestamps, pack_error
from weir.telemetry.logs import log_request, logs_requests
from weir.worker.backend_api.interface import (
    RESCHEDULED,
    DeviceLost,
    ExecutionHandle,
    Instance,
    InstanceDied,
    InstanceUnavailable,
    MicrobatchInstance,
    Result,
    not_iterative,
)
from weir.worker.execution.batch_execution import (
    BatchExecution,
    BatchUpdate,
    InstanceContext,
    MicrobatchExecution,
    StreamingBatches,
)
from weir.worker.execution.batch_tensors import batch_sizes
from weir.worker.execution.decoding import decode_batch
from weir.worker.execution.invocation import ModelInvoker
from weir.worker.execution.response_writer import pack_by_gateway, packing_failed
from weir.worker.execution.running_batch import RunningBatch, trace_timestamps
from weir.worker.execution.sequences import SequenceControls, is_padding, pad_rows, restorable
from weir.worker.execution.shared_memory import InputBuffers
from weir.worker.execution.statistics import BatchRun, ModelStatistics, record_batch, record_microbatch

logger = logging.getLogger("weir.worker")

_NONE_TRACED: Mapping[int, Timestamps] = {}


@dataclass(slots=True)
class StartedBatch:
    """A batch between `BatchRunner.start` and `finish`.

    `requests` are those that run, at these `positions` of the batch and with these `sizes` in rows. `results` has a result
    for each entry that does not run. Entries at the positions in `padding` only fill the batch. `first` are messages that
    are sent before the responses. `outcomes` are the outcomes of the requests, or the handle by which to wait for them.
    `content` is what the requests have in clients' memory, copied; it is valid until `finish` returns.
    """

    running: RunningBatch
    execution: BatchExecution
    positions: list[int]
    requests: list[InferRequest]
    sizes: list[int]
    padding: Collection[int]
    results: list[Result | None]
    first: list[Outgoing]
    outcomes: Sequence[Result | None] | ExecutionHandle
    content: InputBuffers | None = None

    @property
    def is_on_device(self) -> bool:
        """Whether a device works on the batch, so that `finish` has to wait."""
        return isinstance(self.outcomes, ExecutionHandle)


class BatchRunner:
    """Runs the batches of the instance that `context` describes.

    Batches are counted in `statistics`; those with open requests after their run go to `streaming`.
    Both are exchanged for the time of a warm-up.
    """

    def __init__(self, context: InstanceContext, statistics: ModelStatistics, streaming: StreamingBatches) -> None:
        config, states = context.config, context.states
        sequences, controls = config.sequence_batching, SequenceControls(config)
        self.statistics = statistics
        self.streaming = streaming
        self._name = context.name
        self._version = context.version
        self._batching = config.max_batch_size > 0
        self._writer = context.writer
        self._shared_memory = context.shared_memory
        self._invoker = ModelInvoker(context.name, context.reshaper, states, is_stateful=sequences is not None)
        self._states = states
        self._controls = controls if controls.is_needed else None
        self._has_padding = sequences is not None
        self._is_iterative = sequences is not None and sequences.iterative_sequence
        # The model may keep states by row, so rows keep their positions if one before them can't run.
        self._keeps_rows = (
            sequences is not None and sequences.oldest is None and states is None and not config.is_decoupled
        )
        self._reader = PayloadReader()
        self._last_end_ns = 0

    def start(self, instance: Instance, running: RunningBatch) -> StartedBatch | BatchUpdate:
        """Has the instance run the batch. Returns the end of the batch if the instance died. Raises DeviceLost."""
        batch = running.message
        execution = BatchExecution(running, self.streaming, self._reader)
        positions, requests, results = self._decode(running)
        if self._has_padding and not self._is_iterative:
            running.sequence_ids = {
                position: request.correlation_id
                for position, request in zip(positions, requests, strict=True)
                if batch.entries[position].position is not None
            }
        padding: Collection[int] = pad_rows(positions, requests) if self._keeps_rows else ()
        if self._controls is not None:
            ready = (not is_padding(batch.entries[position]) and position not in padding for position in positions)
            self._controls.add_to(requests, ready)
        first: list[Outgoing] = []
        if self._states is not None:
            if len(positions) < len(batch.entries):
                not_run = frozenset(range(len(batch.entries))).difference(positions)
                first += self._states.pass_over(batch, [batch.entries[position] for position in sorted(not_run)])
            positions, requests = restorable(self._states, batch, positions, requests, results)
        sizes: list[int] = []
        outcomes: Sequence[Result | None] | ExecutionHandle = ()
        if requests:
            sizes = batch_sizes(requests, self._batching)
            execution.begin(positions, sizes, requests, padding)
            if self._shared_memory.gpu >= 0:
                is_delivered = [
                    position not in padding and batch.entries[position].gateway != NO_REPLY for position in positions
                ]
                execution.output_regions = self._shared_memory.map_outputs(requests, is_delivered)
            try:
                outcomes = self._invoker.start(instance, requests, execution)
            except DeviceLost:
                raise
            except InstanceDied as death:
                return self._lost(running, execution, death)
        content = self._shared_memory.content
        return StartedBatch(running, execution, positions, requests, sizes, padding, results, first, outcomes, content)

    def run_microbatch(self, instance: MicrobatchInstance, running: RunningBatch) -> BatchUpdate | None:
        """Has the instance run the requests one after another; returns as `finish`."""
        try:
            return self._run_microbatch(instance, running)
        finally:
            content = self._shared_memory.content
            if content is not None:
                self._shared_memory.release(content)

    def _run_microbatch(self, instance: MicrobatchInstance, running: RunningBatch) -> BatchUpdate | None:
        execution = MicrobatchExecution(running, self.streaming, self._reader)
        positions, requests, results = self._decode(running)
        sizes = batch_sizes(requests, self._batching) if requests else []
        execution.begin(positions, sizes, requests)
        started = StartedBatch(running, execution, positions, requests, sizes, (), results, [], ())
        if not requests:
            return self._respond(started, ())
        try:
            run = self._invoker.start_microbatch(instance, requests, execution)
        except InstanceDied as death:
            return self._lost(running, execution, death)
        if isinstance(run, WeirError):
            failed = [Result(error=run) for _ in requests]
            self._collect(started, failed)
            return self._respond(started, failed)
        running.requeue = partial(execution.requeue, run)
        try:
            outcomes = execution.follow(run)
            if run.death:
                logger.warning("%s: %s; the %d requests it was running run again", self._name, run.death, len(run.lost))
            self._invoker.finish_microbatch(outcomes)
            self._collect(started, outcomes)
            if execution.has_responded or not all(outcomes):
                execution.returned(results)
                return None
            return self._respond(started, outcomes)
        finally:
            running.requeue = None
            run.close()

    def _decode(self, running: RunningBatch) -> tuple[list[int], list[InferRequest], list[Result | None]]:
        batch = running.message
        self._shared_memory.begin()
        positions, requests, results = decode_batch(running, self._reader, self._shared_memory, self.statistics)
        if logs_requests(logger):
            step = f"runs in {self._name}, batch {batch.batch_id}"
            for position, request in zip(positions, requests, strict=True):
                entry = batch.entries[position]
                log_request(logger, step, batch.model, (entry.gateway, entry.key), request.id)
        return positions, requests, results

    def finish(self, instance: Instance, started: StartedBatch) -> BatchUpdate | None:
        """The end of the batch, or None if its responses are, or will be, published one by one. Raises DeviceLost."""
        try:
            return self._finish(instance, started)
        finally:
            if started.content is not None:
                self._shared_memory.release(started.content)

    def _finish(self, instance: Instance, started: StartedBatch) -> BatchUpdate | None:
        running, execution, positions, requests = (
            started.running,
            started.execution,
            started.positions,
            started.requests,
        )
        batch, outcomes = running.message, started.outcomes
        if isinstance(outcomes, ExecutionHandle):
            try:
                outcomes = self._invoker.finish(instance, outcomes, requests, execution)
            except DeviceLost:
                raise
            except InstanceDied as death:
                return self._lost(running, execution, death)
        if self._states is not None and requests:
            outcomes = list(outcomes)
            started.first += self._states.keep(batch, [batch.entries[position] for position in positions], outcomes)
        has_ended = all(outcomes)
        if not has_ended and not self._is_iterative:
            outcomes = [Result(error=not_iterative()) if outcome is RESCHEDULED else outcome for outcome in outcomes]
        self._collect(started, outcomes)
        if self._is_iterative or execution.has_responded or not has_ended:
            execution.returned(started.results, started.first)
            return None
        return self._respond(started, outcomes)

    def _collect(self, started: StartedBatch, outcomes: Sequence[Result | None]) -> None:
        """Puts the outcomes among the results of the batch, and outputs into the memory that their callers share."""
        entries, padding, results = started.running.message.entries, started.padding, started.results
        for position, request, outcome in zip(started.positions, started.requests, outcomes, strict=True):
            if position in padding:
                continue
            if outcome is not None and entries[position].gateway != NO_REPLY:
                for output in request.outputs:
                    if output.region is not None:
                        self._deliver(request, outcome)
                        break
            results[position] = outcome

    def _respond(self, started: StartedBatch, outcomes: Sequence[Result | None]) -> BatchUpdate:
        running, execution = started.running, started.execution
        positions, requests, sizes = started.positions, started.requests, started.sizes
        batch, padding = running.message, started.padding
        if self._has_padding:
            real = [batch.entries[position].gateway != NO_REPLY and position not in padding for position in positions]
            positions, sizes = list(compress(positions, real)), list(compress(sizes, real))
            requests, outcomes = list(compress(requests, real)), list(compress(outcomes, real))
        traced = {
            index: trace_timestamps(running, index, execution.run_of(at))
            for at, (index, request) in enumerate(zip(positions, requests, strict=True))
            if request.wants_timestamps
        }
        responses = self._encode(batch, started.results, traced)
        end_ns = time.monotonic_ns()
        busy_us = self._busy_us(execution, end_ns)
        self._record(BatchRun(running, execution, positions, sizes, outcomes, end_ns, busy_us * 1000))
        completion = BatchCompletion(batch.batch_id, BatchOutcome.ANSWERED, busy_us)
        return BatchUpdate(batch.scheduler, completion, responses, started.first)

    @contained(on_error="_delivery_failed", passes=(DeviceLost,))
    def _deliver(self, request: InferRequest, outcome: Result) -> None:
        self._shared_memory.deliver(request, outcome)

    def _delivery_failed(self, error: Exception, _request: InferRequest, outcome: Result) -> None:
        outcome.error = packing_failed(error)

    @contained()
    def _record(self, run: BatchRun) -> None:
        """Counts the batch; its responses are sent even if that fails."""
        if isinstance(run.execution, MicrobatchExecution):
            record_microbatch(self.statistics, run, run.execution.input_ns, run.execution.spans_ns)
        else:
            record_batch(self.statistics, run)

    def failed(self, running: RunningBatch, error: BaseException) -> BatchUpdate:
        """The end of a batch during which Weir's own code raised `error`."""
        message = running.message
        failure = Result(error=internal(f"{type(error).__name__}: {error}"))
        duration_ns = (time.monotonic_ns() - running.received_ns) * len(message.entries)
        self.statistics.record_failures(len(message.entries), "OTHER", duration_ns)
        responses = self._encode(message, [failure] * len(message.entries))
        completion = BatchCompletion(message.batch_id, BatchOutcome.ANSWERED, 0)
        return BatchUpdate(message.scheduler, completion, responses)

    def _lost(self, running: RunningBatch, execution: BatchExecution, death: InstanceDied) -> BatchUpdate:
        batch = running.message
        logger.warning("%s: %s; its batch of %d requests runs again", self._name, death, len(batch.entries))
        outcome, busy_us = BatchOutcome.UNANSWERED, self._busy_us(execution, time.monotonic_ns())
        if isinstance(death, InstanceUnavailable):
            outcome, busy_us = BatchOutcome.NOT_RUN, 0
        return BatchUpdate(batch.scheduler, BatchCompletion(batch.batch_id, outcome, busy_us))

    def _busy_us(self, execution: BatchExecution, end_ns: int) -> int:
        """For how long the batch kept the instance busy, not counting the time in which the batch before it still ran."""
        start_ns = max(execution.start_ns, self._last_end_ns)
        self._last_end_ns = end_ns
        return (end_ns - start_ns) // 1000

    def _encode(
        self, batch: BatchMessage, results: Sequence[Result | None], traced: Mapping[int, Timestamps] = _NONE_TRACED
    ) -> list[tuple[str, bytes]]:
        by_gateway: dict[str, list[tuple[Any, ...]]] = {}
        for index, (entry, result) in enumerate(zip(batch.entries, results, strict=True)):
            if entry.gateway == NO_REPLY:
                continue
            rows = by_gateway.get(entry.gateway)
            if rows is None:
                rows = by_gateway[entry.gateway] = []
            if result is None:
                rows.append(pack_error(entry.key, internal("the request was not run")))
            else:
                rows.append(self._writer.write(entry, result, True, traced.get(index)))
        return pack_by_gateway(self._version, by_gateway)

"""`BatchRunner`: takes batches through one instance, from the message to the responses.

In two steps, between which a device may work on a batch: `start` decodes the requests and has the instance run them,
`finish` waits for the results and encodes the responses. Both run in the instance's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from weir.bus.links.framing import Outgoing
from weir.bus.payloads.arena import PayloadReader
from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError, internal, unavailable
from weir.schemas.core.requests import InferRequest
from weir.schemas.wire.messages import (
    NO_REPLY,
    BatchCompletion,
    BatchEnded,
    BatchEntry,
    BatchLost,
    BatchMessage,
    BatchNotRun,
    NotRunReason,
    Timestamps,
    pack_error,
)
from weir.telemetry.logs import log_request, logs_requests
from weir.worker.backend_api.interface import (
    RESCHEDULED,
    DeviceLost,
    EndedRequest,
    Execution,
    ExecutionHandle,
    Instance,
    InstanceDied,
    InstanceUnavailable,
    MicrobatchInstance,
    MicrobatchRun,
    Result,
    not_iterative,
)
from weir.worker.execution.batch_execution import (
    BatchExecution,
    InstanceContext,
    StreamingBatches,
)
from weir.worker.execution.batch_tensors import batch_sizes
from weir.worker.execution.decoding import decode_batch
from weir.worker.execution.invocation import ModelInvoker
from weir.worker.execution.microbatch import Microbatch
from weir.worker.execution.response_writer import pack_by_gateway, packing_failed
from weir.worker.execution.running_batch import RunningBatch, trace_timestamps
from weir.worker.execution.sequences import SequenceControls, is_padding, pad_rows, restorable
from weir.worker.execution.shared_memory import InputBuffers
from weir.worker.execution.statistics import BatchRun, ModelStatistics, record_batch
from weir.worker.execution.updates import MAX_HELD_S, BatchUpdate

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
                return self._lost([running], execution, death)
        content = self._shared_memory.content
        return StartedBatch(running, execution, positions, requests, sizes, padding, results, first, outcomes, content)

    def run_microbatch(
        self,
        instance: MicrobatchInstance,
        batches: Sequence[RunningBatch],
        has_begun: Callable[[Microbatch], None],
        publish: Callable[[BatchUpdate], None],
    ) -> None:
        """Has the instance run batches of one request each, all of one scheduler, one after another.

        Passes the microbatch to `has_begun` once it runs, and its updates to `publish`, as batches end.
        """
        scheduler = batches[0].message.scheduler
        started, not_run, requests = self._decode_each(batches)
        try:
            if not_run:
                publish(self._ended_each(scheduler, not_run, 0))
            if not started:
                return
            microbatch = Microbatch(
                started, requests, batch_sizes(requests, self._batching), self.streaming, self._reader
            )
            try:
                run = self._invoker.start_microbatch(instance, requests, microbatch)
            except InstanceDied as death:
                publish(self._lost(started, microbatch, death))
                return
            if isinstance(run, WeirError):
                now_ns = time.monotonic_ns()
                failed = [EndedRequest(at, Result(error=run), now_ns, now_ns) for at in range(len(requests))]
                publish(self._microbatch_update(microbatch, failed))
                return
            try:
                microbatch.started(run)
                has_begun(microbatch)
                self._follow(microbatch, run, publish)
            finally:
                run.close()
        finally:
            content = self._shared_memory.content
            if content is not None:
                self._shared_memory.release(content)

    def _follow(self, microbatch: Microbatch, run: MicrobatchRun, publish: Callable[[BatchUpdate], None]) -> None:
        has_ended, ended_positions = False, set[int]()
        while not has_ended:
            has_ended = run.wait(MAX_HELD_S)
            ended = run.ended()
            if ended:
                ended_positions.update([request.position for request in ended])
                publish(self._microbatch_update(microbatch, ended))
        if run.death:
            logger.warning("%s: %s; the %d requests it was running run again", self._name, run.death, len(run.lost))
        if len(ended_positions) + len(run.withdrawn) < len(microbatch.batches):
            self._end_unanswered(microbatch, run, ended_positions, publish)

    def _end_unanswered(
        self, microbatch: Microbatch, run: MicrobatchRun, ended: Collection[int], publish: Callable[[BatchUpdate], None]
    ) -> None:
        """Ends the batches that have not run, or during which the instance died."""
        completions: list[BatchCompletion] = []
        failed: list[EndedRequest] = []
        reason = NotRunReason.DOWN if run.death else NotRunReason.SLOW  # its outputs have filled the memory
        now_ns = time.monotonic_ns()
        for position, batch in enumerate(microbatch.batches):
            if position in ended or position in run.withdrawn:
                continue
            if position not in run.lost:
                completions.append(BatchNotRun(batch.message.batch_id, reason))
            elif microbatch.may_run_again(position):
                completions.append(BatchLost(batch.message.batch_id))
            else:
                failed.append(EndedRequest(position, Result(error=unavailable(run.death)), now_ns, now_ns))
        if failed:
            publish(self._microbatch_update(microbatch, failed))
        if completions:
            publish(BatchUpdate(microbatch.batches[0].message.scheduler, completions))

    def _microbatch_update(self, microbatch: Microbatch, ended: Sequence[EndedRequest]) -> BatchUpdate:
        """The update that ends these requests, except those whose responses the model sends itself."""
        ended = [
            request._replace(result=Result(error=not_iterative())) if request.result is RESCHEDULED else request
            for request in ended
        ]
        ended = [request for request in ended if not microbatch.returned(request)]
        results: list[tuple[RunningBatch, Result, Timestamps | None]] = []
        for position, result, start_ns, end_ns in ended:
            assert result is not None  # noqa: S101 - `returned` has taken the others
            batch, request = microbatch.batches[position], microbatch.requests[position]
            self._invoker.finish_microbatch(result)
            self._deliver_outputs(request, batch.message.entries[0], result)
            timestamps = None
            if request.wants_timestamps:
                run = Execution(self._reader)
                run.input_end_ns, run.infer_end_ns = start_ns, end_ns
                run.start_ns = start_ns - microbatch.input_ns
                timestamps = trace_timestamps(batch, 0, run)
            results.append((batch, result, timestamps))
        busy_us = self._busy_us(microbatch, time.monotonic_ns())
        update = self._ended_each(microbatch.batches[0].message.scheduler, results, busy_us // max(1, len(results)))
        if ended:
            self._record_microbatch(microbatch, ended)
        return update

    def _ended_each(
        self, scheduler: str, results: Sequence[tuple[RunningBatch, Result, Timestamps | None]], busy_us: int
    ) -> BatchUpdate:
        """The update that ends batches of one request each with these results; each was busy for `busy_us`."""
        by_gateway: dict[str, list[tuple[Any, ...]]] = {}
        completions: list[BatchCompletion] = []
        for batch, result, timestamps in results:
            message = batch.message
            entry = message.entries[0]
            if entry.gateway != NO_REPLY:
                rows = by_gateway.get(entry.gateway)
                if rows is None:
                    rows = by_gateway[entry.gateway] = []
                rows.append(self._writer.write(entry, result, True, timestamps))
            completions.append(BatchEnded(message.batch_id, busy_us))
        return BatchUpdate(scheduler, completions, pack_by_gateway(self._version, by_gateway))

    @contained()
    def _record_microbatch(self, microbatch: Microbatch, ended: Sequence[EndedRequest]) -> None:
        microbatch.record(self.statistics, ended)

    def _decode_each(
        self, batches: Sequence[RunningBatch]
    ) -> tuple[list[RunningBatch], list[tuple[RunningBatch, Result, None]], list[InferRequest]]:
        """The batches of one request each that can run, those that can't with their results, and the requests that run."""
        self._shared_memory.begin()
        started, requests = list[RunningBatch](), list[InferRequest]()
        not_run: list[tuple[RunningBatch, Result, None]] = []
        for batch in batches:
            positions, decoded, results = decode_batch(batch, self._reader, self._shared_memory, self.statistics)
            if positions:
                started.append(batch)
                requests += decoded
                self._log(batch, positions, decoded)
            elif results[0] is not None:
                not_run.append((batch, results[0], None))
        return started, not_run, requests

    def _decode(self, running: RunningBatch) -> tuple[list[int], list[InferRequest], list[Result | None]]:
        self._shared_memory.begin()
        positions, requests, results = decode_batch(running, self._reader, self._shared_memory, self.statistics)
        self._log(running, positions, requests)
        return positions, requests, results

    def _log(self, running: RunningBatch, positions: Sequence[int], requests: Sequence[InferRequest]) -> None:
        if logs_requests(logger):
            batch = running.message
            step = f"runs in {self._name}, batch {batch.batch_id}"
            for position, request in zip(positions, requests, strict=True):
                entry = batch.entries[position]
                log_request(logger, step, batch.model, (entry.gateway, entry.key), request.id)

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
                return self._lost([running], execution, death)
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
            if outcome is not None:
                self._deliver_outputs(request, entries[position], outcome)
            results[position] = outcome

    def _deliver_outputs(self, request: InferRequest, entry: BatchEntry, outcome: Result) -> None:
        """Puts outputs into the memory that the caller shares, if it asks for that."""
        if entry.gateway != NO_REPLY:
            for output in request.outputs:
                if output.region is not None:
                    self._deliver(request, outcome)
                    return

    def _respond(self, started: StartedBatch, outcomes: Sequence[Result | None]) -> BatchUpdate:
        running, execution = started.running, started.execution
        positions, requests, sizes = started.positions, started.requests, started.sizes
        batch, padding = running.message, started.padding
        if self._has_padding:
            real = [batch.entries[position].gateway != NO_REPLY and position not in padding for position in positions]
            positions, sizes = list(compress(positions, real)), list(compress(sizes, real))
            requests, outcomes = list(compress(requests, real)), list(compress(outcomes, real))
        traced = {
            index: trace_timestamps(running, index, execution)
            for index, request in zip(positions, requests, strict=True)
            if request.wants_timestamps
        }
        responses = self._encode(batch, started.results, traced)
        end_ns = time.monotonic_ns()
        busy_us = self._busy_us(execution, end_ns)
        self._record(BatchRun(running, execution, positions, sizes, outcomes, end_ns, busy_us * 1000))
        return BatchUpdate(batch.scheduler, (BatchEnded(batch.batch_id, busy_us),), responses, started.first)

    @contained(on_error="_delivery_failed", passes=(DeviceLost,))
    def _deliver(self, request: InferRequest, outcome: Result) -> None:
        self._shared_memory.deliver(request, outcome)

    def _delivery_failed(self, error: Exception, _request: InferRequest, outcome: Result) -> None:
        outcome.error = packing_failed(error)

    @contained()
    def _record(self, run: BatchRun) -> None:
        """Counts the batch; its responses are sent even if that fails."""
        record_batch(self.statistics, run)

    def failed(self, running: RunningBatch, error: BaseException) -> BatchUpdate:
        """The end of a batch during which Weir's own code raised `error`."""
        message = running.message
        failure = Result(error=internal(f"{type(error).__name__}: {error}"))
        duration_ns = (time.monotonic_ns() - running.received_ns) * len(message.entries)
        self.statistics.record_failures(len(message.entries), "OTHER", duration_ns)
        responses = self._encode(message, [failure] * len(message.entries))
        return BatchUpdate(message.scheduler, (BatchEnded(message.batch_id),), responses)

    def _lost(self, batches: Sequence[RunningBatch], execution: Execution, death: InstanceDied) -> BatchUpdate:
        requests = sum(len(running.message.entries) for running in batches)
        logger.warning("%s: %s; its batch of %d requests runs again", self._name, death, requests)
        busy_us = self._busy_us(execution, time.monotonic_ns())
        ids = [running.message.batch_id for running in batches]
        if isinstance(death, InstanceUnavailable):
            completions: list[BatchCompletion] = [BatchNotRun(id, NotRunReason.DOWN) for id in ids]
        else:
            completions = [BatchLost(id, busy_us) for id in ids]
        return BatchUpdate(batches[0].message.scheduler, completions)

    def _busy_us(self, execution: Execution, end_ns: int) -> int:
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

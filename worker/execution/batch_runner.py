"""`BatchRunner`: takes batches through one instance, from the message to the responses.

In two steps, between which a device may work on a batch: `start` decodes the requests and has the instance run them,
`finish` waits for the results and encodes the responses. Both run in the instance's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from weir.bus.payloads.arena import PayloadReader
from weir.schemas.core.errors import WeirError, internal, unavailable
from weir.schemas.core.requests import InferRequest
from weir.schemas.wire.batches import NO_REPLY, BatchCompletion, BatchEnded, BatchLost, BatchNotRun, NotRunReason
from weir.schemas.wire.calls import pack_error
from weir.telemetry.logs import log_request, logs_requests
from weir.worker.backend_api.interface import (
    RESCHEDULED,
    DeviceLost,
    ExecutionHandle,
    Instance,
    InstanceDied,
    InstanceUnavailable,
    MicrobatchInstance,
    MicrobatchRun,
    Result,
    not_iterative,
)
from weir.worker.execution.batch import Batch
from weir.worker.execution.batch_tensors import batch_sizes
from weir.worker.execution.decoding import decode_batch
from weir.worker.execution.invocation import ModelInvoker
from weir.worker.execution.microbatch import Microbatch
from weir.worker.execution.response_writer import LAST, Ending, pack_by_gateway
from weir.worker.execution.sequences import SequenceControls, is_padding, pad_rows, restorable
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.streaming import InstanceContext, StreamingBatches
from weir.worker.execution.updates import MAX_HELD_S, BatchUpdate

logger = logging.getLogger("weir.worker")

LeftBatch = tuple[Batch, BatchUpdate | None]
"""A batch that has left the instance, and its update: None if its responses are, or will be, published one by one."""


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
        self._reshaper = context.reshaper
        self._invoker = ModelInvoker(context.name, states, is_stateful=sequences is not None)
        self._states = states
        self._controls = controls if controls.is_needed else None
        self._is_sequence = sequences is not None
        self._is_iterative = sequences is not None and sequences.iterative_sequence
        # The model may keep states by row, so rows keep their positions if one before them can't run.
        self._keeps_rows = (
            sequences is not None and sequences.oldest is None and states is None and not config.is_decoupled
        )
        self.reader = PayloadReader()
        self._last_end_ns = 0

    def start(self, instance: Instance, batch: Batch) -> BatchUpdate | None:
        """Has the instance run the batch. Returns the end of the batch if the instance died. Raises DeviceLost."""
        self._begin(batch)
        if batch.requests:
            try:
                batch.outcomes = self._invoker.start(instance, batch.requests, batch)
            except DeviceLost:
                raise
            except InstanceDied as death:
                return self._lost(batch, death)
        return None

    def run_microbatch(
        self, instance: MicrobatchInstance, batches: Sequence[Batch], microbatch: Microbatch
    ) -> Iterator[list[LeftBatch]]:
        """Has the instance run batches of one request each, one after another, from one message: that of `microbatch`.

        Yields batches that have left the instance, as they end.
        """
        for batch in batches:
            self._begin(batch)
        yield [(batch, self.finish(instance, batch)) for batch in batches if not batch.requests]
        running = [batch for batch in batches if batch.requests]
        if not running:
            return
        requests = [batch.requests[0] for batch in running]
        microbatch.batches = running
        try:
            run = self._invoker.start_microbatch(instance, requests, microbatch)
        except InstanceDied as death:
            yield [(batch, self._lost(batch, death)) for batch in running]
            return
        if isinstance(run, WeirError):
            yield [(batch, self._end_run(instance, batch, Result(error=run))) for batch in running]
            return
        try:
            microbatch.run = run
            yield from self._follow(instance, microbatch, run)
        finally:
            run.close()

    def _follow(self, instance: Instance, microbatch: Microbatch, run: MicrobatchRun) -> Iterator[list[LeftBatch]]:
        left, has_ended = dict(enumerate(microbatch.batches)), False
        input_ns = (microbatch.input_end_ns - microbatch.start_ns) // len(left)
        while not has_ended:
            has_ended = run.wait(MAX_HELD_S)
            ended: list[LeftBatch] = []
            simple: list[tuple[Batch, Result]] = []
            for position, result, start_ns, end_ns in run.ended():
                batch = left.pop(position)
                batch.start_ns, batch.input_end_ns, batch.infer_end_ns = start_ns - input_ns, start_ns, end_ns
                if result and batch.content is None and not batch.has_responded:
                    simple.append((batch, result))
                else:
                    ended.append((batch, self._end_run(instance, batch, result)))
            if simple:
                ended += [(batch, None) for batch, _ in simple[1:]]
                ended.append((simple[0][0], self._respond_together(simple)))
            yield ended
        if run.death:
            logger.warning("%s: %s; the %d requests it was running run again", self._name, run.death, len(run.lost))
        yield [
            (batch, self._end_unanswered(instance, batch, run, position in run.lost))
            for position, batch in left.items()
            if position not in run.withdrawn
        ]

    def _respond_together(self, ended: Sequence[tuple[Batch, Result]]) -> BatchUpdate:
        """The end of batches of a microbatch with these results, as `finish` ends each, at a fraction of the cost."""
        begun_ns = time.monotonic_ns()
        by_gateway: dict[str, list[tuple[Any, ...]]] = {}
        for batch, result in ended:
            entry, request = batch.message.entries[0], batch.requests[0]
            if entry.gateway != NO_REPLY:
                ending = Ending(timestamps=batch.timestamps(0)) if request.wants_timestamps else LAST
                row = self._writer.write(entry, request, result, ending)
                by_gateway.setdefault(entry.gateway, []).append(row)
        responses = pack_by_gateway(self._version, by_gateway)
        output_ns = (time.monotonic_ns() - begun_ns) // len(ended)
        completions: list[BatchCompletion] = []
        for batch, result in ended:
            end_ns = batch.infer_end_ns + output_ns
            busy_us = self._busy_us(batch, end_ns)
            batch.record((result,), end_ns, busy_us * 1000)
            completions.append(BatchEnded(batch.message.batch_id, busy_us))
        return BatchUpdate(ended[0][0].message.scheduler, completions, responses)

    def _end_unanswered(
        self, instance: Instance, batch: Batch, run: MicrobatchRun, has_started: bool
    ) -> BatchUpdate | None:
        message = batch.message
        end: BatchCompletion
        if not has_started:  # the instance has died, or its outputs have filled the memory
            end = BatchNotRun(message.batch_id, NotRunReason.DOWN if run.death else NotRunReason.SLOW)
        elif batch.may_run_again(0):
            end = BatchLost(message.batch_id)
        else:
            return self._end_run(instance, batch, Result(error=unavailable(run.death)))
        return BatchUpdate(message.scheduler, (end,))

    def _end_run(self, instance: Instance, batch: Batch, result: Result | None) -> BatchUpdate | None:
        """The end of a batch of a microbatch with the result of its request."""
        batch.outcomes = [result]
        # Its outcome has waited for those of others, which is no time of its own.
        return self.finish(instance, batch, time.monotonic_ns() - batch.infer_end_ns)

    def _begin(self, batch: Batch) -> None:
        """Decodes the requests, and adds what the model needs besides."""
        batch.begin(self.streaming, self.reader)
        message, shared_memory = batch.message, self._shared_memory
        shared_memory.content = None
        positions, requests, results = decode_batch(batch, self.reader, shared_memory, self.statistics)
        if logs_requests(logger):
            step = f"runs in {self._name}, batch {message.batch_id}"
            for position, request in zip(positions, requests, strict=True):
                entry = message.entries[position]
                log_request(logger, step, message.model, (entry.gateway, entry.key), request.id)
        if self._is_sequence:
            positions, requests = self._continue_sequences(batch, positions, requests, results)
        if self._reshaper is not None:
            for request in requests:
                self._reshaper.to_model(request)
        batch.positions, batch.requests, batch.results = positions, requests, results
        batch.sizes = batch_sizes(requests, self._batching)
        if shared_memory.gpu >= 0 and requests:
            is_delivered = [
                position not in batch.padding and message.entries[position].gateway != NO_REPLY
                for position in positions
            ]
            batch.output_regions = shared_memory.map_outputs(requests, is_delivered)
        batch.content = shared_memory.content

    def _continue_sequences(
        self, batch: Batch, positions: list[int], requests: list[InferRequest], results: list[Result | None]
    ) -> tuple[list[int], list[InferRequest]]:
        """The requests that run, with their controls and states, and their positions."""
        message, entries = batch.message, batch.message.entries
        if not self._is_iterative:
            batch.sequence_ids = {
                position: request.correlation_id
                for position, request in zip(positions, requests, strict=True)
                if entries[position].position is not None
            }
        if self._keeps_rows:
            batch.padding = pad_rows(positions, requests)
        if self._controls is not None:
            ready = (not is_padding(entries[position]) and position not in batch.padding for position in positions)
            self._controls.add_to(requests, ready)
        if self._states is not None:
            if len(positions) < len(entries):
                not_run = frozenset(range(len(entries))).difference(positions)
                batch.first += self._states.pass_over(message, [entries[position] for position in sorted(not_run)])
            positions, requests = restorable(self._states, message, positions, requests, results)
        return positions, requests

    def finish(self, instance: Instance, batch: Batch, waited_ns: int = 0) -> BatchUpdate | None:
        """The end of the batch, or None if its responses are, or will be, published one by one. Raises DeviceLost.

        Its outcomes have waited for `waited_ns` to be read.
        """
        message, outcomes = batch.message, batch.outcomes
        batch.outcomes = ()  # a handle refers to the batch, and memory of a device has to be freed at once
        try:
            if isinstance(outcomes, ExecutionHandle):
                outcomes = self._invoker.finish(instance, outcomes, batch.requests, batch)
            if self._states is not None and batch.requests:
                outcomes = list(outcomes)
                entries = [message.entries[position] for position in batch.positions]
                batch.first += self._states.keep(message, entries, outcomes)
            has_ended = all(outcomes)
            if not has_ended and not self._is_iterative:
                outcomes = [
                    Result(error=not_iterative()) if outcome is RESCHEDULED else outcome for outcome in outcomes
                ]
            for position, outcome in zip(batch.positions, outcomes, strict=True):
                if position not in batch.padding:
                    batch.results[position] = outcome
            if self._is_iterative or batch.has_responded or not has_ended:
                batch.returned(batch.results, batch.first)
                return None
            responses = self._encode(batch)
            end_ns = time.monotonic_ns() - waited_ns
            busy_us = self._busy_us(batch, end_ns)
            batch.record(outcomes, end_ns, busy_us * 1000)
            return BatchUpdate(message.scheduler, (BatchEnded(message.batch_id, busy_us),), responses, batch.first)
        except DeviceLost:
            raise
        except InstanceDied as death:
            return self._lost(batch, death)
        finally:
            if batch.content is not None:
                self._shared_memory.release(batch.content)
                batch.content = None

    def failed(self, batch: Batch, error: BaseException) -> BatchUpdate:
        """The end of a batch during which Weir's own code raised `error`."""
        message = batch.message
        failure, requests = Result(error=internal(f"{type(error).__name__}: {error}")), len(message.entries)
        self.statistics.record_failures(requests, "OTHER", (time.monotonic_ns() - batch.received_ns) * requests)
        batch.results, batch.positions, batch.requests = [failure] * requests, [], []
        return BatchUpdate(message.scheduler, (BatchEnded(message.batch_id),), self._encode(batch))

    def _lost(self, batch: Batch, death: InstanceDied) -> BatchUpdate:
        message, now_ns = batch.message, time.monotonic_ns()
        logger.warning("%s: %s; its batch of %d requests runs again", self._name, death, len(message.entries))
        end: BatchCompletion = BatchNotRun(message.batch_id, NotRunReason.DOWN)
        if not isinstance(death, InstanceUnavailable):
            end = BatchLost(message.batch_id, self._busy_us(batch, now_ns))
        return BatchUpdate(message.scheduler, (end,))

    def _busy_us(self, batch: Batch, end_ns: int) -> int:
        """For how long the batch kept the instance busy, not counting the time in which the batch before it still ran."""
        start_ns = max(batch.start_ns, self._last_end_ns)
        self._last_end_ns = end_ns
        return max(0, end_ns - start_ns) // 1000

    def _encode(self, batch: Batch) -> list[tuple[str, bytes]]:
        places = {position: at for at, position in enumerate(batch.positions)}
        by_gateway: dict[str, list[tuple[Any, ...]]] = {}
        for position, (entry, result) in enumerate(zip(batch.message.entries, batch.results, strict=True)):
            if entry.gateway == NO_REPLY:
                continue
            rows = by_gateway.get(entry.gateway)
            if rows is None:
                rows = by_gateway[entry.gateway] = []
            at = places.get(position)
            if result is None:
                rows.append(pack_error(entry.key, internal("the request was not run")))
            elif at is None:
                rows.append(self._writer.write(entry, None, result))
            else:
                request = batch.requests[at]
                ending = Ending(timestamps=batch.timestamps(at)) if request.wants_timestamps else LAST
                rows.append(self._writer.write(entry, request, result, ending))
        return pack_by_gateway(self._version, by_gateway)

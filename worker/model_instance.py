"""`ModelInstance`: the thread that runs one instance of a model, batch after batch.

The event loop hands it batches; it decodes them, runs the instance, encodes the answers (one message a gateway) and
hands them on to be published. Everything costly about a batch happens here, off the loop.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress
from typing import Any

from bus.payloads import PayloadReader
from bus.thread_publisher import Outgoing
from schemas.errors import WeirError, internal
from schemas.messages import NOBODY, BatchMessage, BatchOutcome, Done, Moments, pack_answers, pack_error
from telemetry.request_log import log_request, logs_requests
from worker.answer_packer import AnswerPacker
from worker.backend import (
    RESCHEDULED,
    Instance,
    InstanceDevice,
    InstanceDied,
    LoadedModel,
    ModelVersion,
    Result,
    not_iterative,
)
from worker.batch_decoding import decoded
from worker.batch_execution import BatchExecution, FinishedBatch, OpenBatches
from worker.batch_record import record_batch
from worker.batch_tensors import batch_sizes
from worker.client_memory import ClientMemory
from worker.execution_turns import ExecutionTurn
from worker.implicit_state import ImplicitStates
from worker.model_environment import ModelEnvironment
from worker.model_run import ModelRun
from worker.reshape import Reshaper
from worker.running_batch import RunningBatch
from worker.sequence_controls import SequenceControls
from worker.sequence_rows import accepted, fill_rows, is_null
from worker.state_declarations import StateDeclarations
from worker.statistics import ModelStatistics
from worker.trace_moments import moments_of
from worker.warmup import WarmUp, WarmUpSample

logger = logging.getLogger("weir.worker")

_STOP = object()
_NONE_TRACED: Mapping[int, Moments] = {}


class ModelInstance:
    """One instance and its thread, which runs the samples of `warm_up` before `start` returns.

    `states` are those that sequences leave to their next requests, None for none. Each batch is executed in a `turn`,
    where instances take turns. What leaves it is given to the environment's `on_finished`: in its thread after each
    batch, and, where a model sends responses itself, for each of them, in whatever thread it came.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        model: ModelVersion,
        device: InstanceDevice,
        arena_name: str,
        statistics: ModelStatistics,
        environment: ModelEnvironment,
        states: StateDeclarations | None = None,
        warm_up: Sequence[WarmUpSample] = (),
        turn: ExecutionTurn | None = None,
    ) -> None:
        config, sequences = model.config, model.config.sequence_batching
        reshaper, controls = Reshaper(config), SequenceControls(config)
        self.name = device.name
        self.arena_name = arena_name
        self._loaded = loaded
        self._device = device
        self._version = model.version
        self._batching = config.max_batch_size > 0
        self._decoupled = config.is_decoupled
        self._reshaper = reshaper if reshaper.is_needed else None
        self._controls = controls if controls.is_needed else None
        self._states = ImplicitStates(states, environment.checkpoints) if states is not None and states.states else None
        self._model_run = ModelRun(device.name, self._reshaper, self._states)
        self._has_null_rows = sequences is not None
        self._is_iterative = sequences is not None and sequences.iterative_sequence
        # Its model may keep states by row, so rows stay where they are when one before them can't be run.
        self._keeps_rows = (
            sequences is not None and sequences.oldest is None and self._states is None and not config.is_decoupled
        )
        self._on_finished = environment.on_finished
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = PayloadReader()
        self._packer = AnswerPacker(arena_name)
        self._client_memory = ClientMemory(environment.client_memory)
        self._statistics = statistics
        self._open_batches = self._batches(statistics, environment.on_finished)
        self._warm_up_samples = warm_up
        self._turn = turn
        self._waits_for_readers = False
        self._created: queue.SimpleQueue[WeirError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=device.name, daemon=True)

    def start(self) -> None:
        """Creates the instance in its thread, warms it up and waits for that. Raises WeirError when it can't be done."""
        self._thread.start()
        error = self._created.get()
        if error is not None:
            self._thread.join()
            raise error

    def submit(self, batch: RunningBatch) -> None:
        """Runs the batch after those submitted before."""
        self._inbox.put(batch)

    def release(self, segment: str, slot: int, generation: int) -> None:
        """A gateway has read an answer that lay in shared memory."""
        self._packer.give_back(segment, slot, generation)

    @property
    def slots_held(self) -> int:
        """Payload slots that hold answers which no gateway has given back yet."""
        return self._packer.slots_held

    def stop(self, wait_for_readers: bool = False) -> None:
        """Runs what was submitted to its last answer, closes the instance, and returns when its thread has ended.

        With `wait_for_readers` outputs in its memory stay for a moment until gateways have read them.
        """
        self._waits_for_readers = wait_for_readers
        self._inbox.put(_STOP)
        self._thread.join()

    def _run(self) -> None:
        try:
            instance = self._created_instance()
        except WeirError as error:
            self._leave_turns()
            self._packer.close()
            self._created.put(error)
            return
        self._created.put(None)
        try:
            self._take_batches(instance)
            self._open_batches.wait()
        finally:
            instance.close()
            self._packer.close(self._waits_for_readers)

    def _take_batches(self, instance: Instance) -> None:
        try:
            while (batch := self._inbox.get()) is not _STOP:
                finished = self._attempt_in_turn(instance, batch)
                if finished is not None:
                    self._on_finished(finished)
        finally:
            self._leave_turns()

    def _created_instance(self) -> Instance:
        """The instance, warm. Raises WeirError when it can't be made, or its warm-up fails."""
        try:
            instance = self._loaded.create_instance(self._device)
            try:
                self._warm_up(instance)
            except BaseException:
                instance.close()
                raise
            return instance
        except WeirError:
            raise
        except Exception as error:
            logger.exception("%s: creating the instance failed", self._device.name)
            raise internal(f"{type(error).__name__}: {error}") from error

    def _warm_up(self, instance: Instance) -> None:
        if not self._warm_up_samples:
            return
        warm_up = WarmUp(self._warm_up_samples, self._device.name)
        counted = self._statistics, self._open_batches
        self._statistics = ModelStatistics()
        self._open_batches = self._batches(self._statistics, warm_up.published.put, warm_up.failures)
        try:
            warm_up.run(instance, self._attempt_in_turn)
        finally:
            self._statistics, self._open_batches = counted

    def _batches(
        self,
        statistics: ModelStatistics,
        publish: Callable[[FinishedBatch], None],
        failures: list[str] | None = None,
    ) -> OpenBatches:
        deliver = self._client_memory.deliver
        return OpenBatches(
            self._version, self._decoupled, self._packer, self._reshaper, statistics, publish, deliver, failures
        )

    def _attempt_in_turn(self, instance: Instance, batch: RunningBatch) -> FinishedBatch | None:
        if self._turn is None:
            return self._attempt(instance, batch)
        self._turn.take()
        try:
            return self._attempt(instance, batch)
        finally:
            self._turn.give_back(wants_more=not self._inbox.empty())

    def _leave_turns(self) -> None:
        if self._turn is not None:
            self._turn.leave()

    def _attempt(self, instance: Instance, batch: RunningBatch) -> FinishedBatch | None:
        """The end of the batch, or None where it has been, or will be, told piece by piece."""
        try:
            return self._execute(instance, batch)
        except Exception as error:
            # Whatever went wrong, also in our own code: an instance whose thread has ended would never be noticed.
            logger.exception("%s: a batch could not be run", self._device.name)
            failure = Result(error=internal(f"{type(error).__name__}: {error}"))
            message = batch.message
            taken_ns = (time.monotonic_ns() - batch.received_ns) * len(message.entries)
            self._statistics.record_failures(len(message.entries), "OTHER", taken_ns)
            answers = self._encode(message, [failure] * len(message.entries))
            done = Done(message.batch_id, BatchOutcome.ANSWERED, 0)
            return FinishedBatch(message.scheduler, done, answers, message.acks)

    def _execute(self, instance: Instance, running: RunningBatch) -> FinishedBatch | None:
        batch = running.message
        execution = BatchExecution(running, self._open_batches, self._reader)
        self._client_memory.begin()
        positions, requests, results = decoded(running, self._reader, self._client_memory, self._statistics)
        if logs_requests(logger):
            step = f"runs in {self._device.name}, batch {batch.batch_id}"
            for position, request in zip(positions, requests, strict=True):
                entry = batch.entries[position]
                log_request(logger, step, batch.model, entry.gateway, entry.key, request.id)
        outcomes: Sequence[Result | None] = []
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
        if requests:
            sizes = batch_sizes(requests, self._batching)
            execution.begin(positions, sizes, requests, fillers)
            try:
                outcomes = self._model_run.outcomes(instance, requests, execution)
                if self._states is not None:
                    outcomes = list(outcomes)
                    first += self._states.keep(batch, [batch.entries[position] for position in positions], outcomes)
            except InstanceDied as death:
                logger.warning("%s: %s; its batch of %d is done again", self._device.name, death, len(requests))
                busy_us = (time.monotonic_ns() - execution.start_ns) // 1000
                return FinishedBatch(batch.scheduler, Done(batch.batch_id, BatchOutcome.UNANSWERED, busy_us), [])
        has_ended = all(outcomes)
        if not has_ended and not self._is_iterative:
            outcomes = [Result(error=not_iterative()) if outcome is RESCHEDULED else outcome for outcome in outcomes]
        for position, request, outcome in zip(positions, requests, outcomes, strict=True):
            if position in fillers:
                continue
            if request.outputs and outcome is not None and batch.entries[position].gateway != NOBODY:
                self._client_memory.deliver(request, outcome)
            results[position] = outcome
        if self._is_iterative or execution.has_responded or not has_ended:
            execution.settle(results, first)
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
        record_batch(self._statistics, running, positions, sizes, outcomes, execution, end_ns)
        done = Done(batch.batch_id, BatchOutcome.ANSWERED, (end_ns - execution.start_ns) // 1000)
        return FinishedBatch(batch.scheduler, done, answers, batch.acks, first)

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
        return [(gateway, pack_answers(self._version, answers)) for gateway, answers in by_gateway.items()]

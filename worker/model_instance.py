"""`ModelInstance`: the thread that runs one instance of a model, batch after batch.

The event loop hands it batch messages; it decodes them, runs the instance, encodes the answers (one message a gateway)
and hands them back to the loop to be published. Everything costly about a batch happens here, off the loop.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

from bus.identity import shares_memory
from bus.payloads import INLINE_LIMIT_BYTES, LeasedSlots, PayloadArena, PayloadReader, StalePayload
from schemas.errors import ErrorCode, WeirError, internal
from schemas.messages import (
    NOBODY,
    BatchMessage,
    BatchOutcome,
    Done,
    body_ref,
    pack_answer,
    pack_answers,
    pack_error,
    unpack_body,
)
from schemas.requests import InferRequest
from schemas.tensors import Tensor
from worker.backend import Execution, Instance, InstanceDevice, InstanceDied, LoadedModel, ModelVersion, Result
from worker.batch_tensors import batch_sizes, has_gone
from worker.reshape import Reshaper
from worker.sequence_controls import SequenceControls
from worker.statistics import ModelStatistics

logger = logging.getLogger("weir.worker")

MAX_INLINE_ANSWER_BYTES = 4 << 20
"""Outputs of one answer that may travel inside a message, when shared memory can't be used."""


class FinishedBatch(NamedTuple):
    """What is to be published: (gateway, answers message) each, the end of the batch for its scheduler, and acks."""

    scheduler: str
    done: Done
    answers: list[tuple[str, bytes]]
    acks: Sequence[str] = ()


class _Release(NamedTuple):
    segment: str
    slot: int
    generation: int


_STOP = object()


class ModelInstance:
    """One instance and its thread. `on_finished` is called in that thread after each batch."""

    def __init__(
        self,
        loaded: LoadedModel,
        model: ModelVersion,
        device: InstanceDevice,
        arena_name: str,
        statistics: ModelStatistics,
        reshaper: Reshaper | None,
        controls: SequenceControls | None,
        on_finished: Callable[[FinishedBatch], None],
    ) -> None:
        self._loaded = loaded
        self._version = model.version
        self._batching = model.config.max_batch_size > 0
        self._device = device
        self._statistics = statistics
        self._reshaper = reshaper
        self._controls = controls
        self._has_null_rows = model.config.sequence_batching is not None
        self._on_finished = on_finished
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._arena = PayloadArena(arena_name)
        self._leases = LeasedSlots()
        self._reader = PayloadReader()
        self.arena_name = arena_name
        self._created: queue.SimpleQueue[WeirError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=device.name, daemon=True)

    def start(self) -> None:
        """Creates the instance in its thread and waits for it. Raises WeirError when it can't be created."""
        self._thread.start()
        error = self._created.get()
        if error is not None:
            self._thread.join()
            raise error

    def submit(self, batch: BatchMessage) -> None:
        """Runs the batch after those submitted before."""
        self._inbox.put((batch, time.monotonic_ns()))

    def release(self, segment: str, slot: int, generation: int) -> None:
        """A gateway has read an answer that lay in shared memory."""
        self._inbox.put(_Release(segment, slot, generation))

    def stop(self) -> None:
        """Runs what was submitted, closes the instance, and returns when its thread has ended."""
        self._inbox.put(_STOP)
        self._thread.join()

    def _run(self) -> None:
        try:
            instance = self._loaded.create_instance(self._device)
        except WeirError as error:
            self._created.put(error)
            return
        except Exception as error:
            logger.exception("%s: creating the instance failed", self._device.name)
            self._created.put(internal(f"{type(error).__name__}: {error}"))
            return
        self._created.put(None)
        try:
            while (item := self._inbox.get()) is not _STOP:
                if isinstance(item, _Release):
                    self._leases.give_back(*item)
                else:
                    self._on_finished(self._attempt(instance, *item))
        finally:
            instance.close()
            self._arena.close()

    def _attempt(self, instance: Instance, batch: BatchMessage, received_ns: int) -> FinishedBatch:
        try:
            return self._execute(instance, batch, received_ns)
        except Exception as error:
            # Whatever went wrong, also in our own code: an instance whose thread has ended would never be noticed.
            logger.exception("%s: a batch could not be run", self._device.name)
            failure = Result(error=internal(f"{type(error).__name__}: {error}"))
            answers = self._encode(batch, [failure] * len(batch.entries))
            return FinishedBatch(batch.scheduler, Done(batch.batch_id, BatchOutcome.ANSWERED, 0), answers, batch.acks)

    def _execute(self, instance: Instance, batch: BatchMessage, received_ns: int) -> FinishedBatch:
        execution = Execution(self._reader)
        results: list[Result | None] = [None] * len(batch.entries)
        requests: list[InferRequest] = []
        positions: list[int] = []
        for position, entry in enumerate(batch.entries):
            try:
                ref = body_ref(entry.body)
                body = entry.body if ref is None else self._reader.view(ref)
                request = unpack_body(body, batch.model, batch.version)
                if has_gone(request, self._reader):
                    raise StalePayload("the request was given up")
            except StalePayload:
                results[position] = Result(error=WeirError(ErrorCode.CANCELLED, "the request was given up"))
                continue
            except ValueError as error:  # MalformedMessage among them
                results[position] = Result(error=internal(str(error)))
                continue
            requests.append(request)
            positions.append(position)
        if self._controls is not None:
            self._controls.add_to(requests, (batch.entries[position].gateway != NOBODY for position in positions))
        try:
            outcomes = self._outcomes(instance, requests, execution) if requests else []
        except InstanceDied as death:
            logger.warning("%s: %s; its batch of %d is done again", self._device.name, death, len(requests))
            busy_us = (time.monotonic_ns() - execution.start_ns) // 1000
            return FinishedBatch(batch.scheduler, Done(batch.batch_id, BatchOutcome.UNANSWERED, busy_us), [])
        for position, outcome in zip(positions, outcomes, strict=True):
            results[position] = outcome
        if self._has_null_rows:
            real = [batch.entries[position].gateway != NOBODY for position in positions]
            requests, outcomes = list(compress(requests, real)), list(compress(outcomes, real))
        self._leases.expire()
        answers = self._encode(batch, results)
        end_ns = time.monotonic_ns()
        self._record(batch, requests, outcomes, execution, received_ns, end_ns)
        done = Done(batch.batch_id, BatchOutcome.ANSWERED, (end_ns - execution.start_ns) // 1000)
        return FinishedBatch(batch.scheduler, done, answers, batch.acks)

    def _outcomes(self, instance: Instance, requests: list[InferRequest], execution: Execution) -> Sequence[Result]:
        if self._reshaper is not None:
            for request in requests:
                self._reshaper.to_model(request)
        try:
            results = instance.execute(requests, execution)
        except InstanceDied:
            raise
        except WeirError as error:
            return [Result(error=error)] * len(requests)
        except Exception as error:  # noqa: BLE001 - whatever a model raises fails its batch, and nothing else
            logger.warning("%s: execution failed\n%s", self._device.name, traceback.format_exc())
            return [Result(error=internal(f"{type(error).__name__}: {error}"))] * len(requests)
        if len(results) != len(requests):
            return [Result(error=internal(f"expected {len(requests)} results, got {len(results)}"))] * len(requests)
        if self._reshaper is not None:
            for result in results:
                self._reshaper.to_client(result)
        return results

    def _encode(self, batch: BatchMessage, results: Sequence[Result | None]) -> list[tuple[str, bytes]]:
        by_gateway: dict[str, list[tuple[Any, ...]]] = {}
        for entry, result in zip(batch.entries, results, strict=True):
            if entry.gateway == NOBODY:
                continue
            answers = by_gateway.get(entry.gateway)
            if answers is None:
                answers = by_gateway[entry.gateway] = []
            if result is None:
                answers.append(pack_error(entry.key, internal("the request was not run")))
            elif result.error is not None:
                answers.append(pack_error(entry.key, result.error))
            else:
                answers.append(self._answer(entry.gateway, entry.key, result))
        return [(gateway, pack_answers(self._version, answers)) for gateway, answers in by_gateway.items()]

    def _answer(self, gateway: str, key: int, result: Result) -> tuple[Any, ...]:
        inline_bytes = 0
        for tensor in result.outputs:
            size = tensor.size_bytes
            if size > INLINE_LIMIT_BYTES and shares_memory(gateway) and self._lend(tensor):
                continue
            inline_bytes += size
        if inline_bytes > MAX_INLINE_ANSWER_BYTES:
            too_large = f"the response of {inline_bytes} bytes is larger than can be sent to the gateway"
            return pack_error(key, WeirError(ErrorCode.UNAVAILABLE, too_large))
        return pack_answer(key, result.outputs, result.parameters)

    def _lend(self, tensor: Tensor) -> bool:
        slot = self._arena.allocate(tensor.size_bytes)
        if slot is None:
            return False
        slot.view[:] = tensor.data  # type: ignore[assignment]
        tensor.data = self._leases.lend(slot)
        return True

    def _record(
        self,
        batch: BatchMessage,
        requests: Sequence[InferRequest],
        outcomes: Sequence[Result],
        execution: Execution,
        received_ns: int,
        end_ns: int,
    ) -> None:
        # A model's own error response counts as a success, as in Triton.
        failed = sum(outcome.error is not None and not outcome.is_model_response for outcome in outcomes)
        waited_ns = execution.start_ns - received_ns
        queue_ns = sum(entry.queued_us for entry in batch.entries) * 1000 + waited_ns * len(batch.entries)
        if failed:
            self._statistics.record_failures(failed, "BACKEND", queue_ns + end_ns - execution.start_ns)
        if succeeded := len(outcomes) - failed:
            rows = sum(batch_sizes(requests, self._batching))
            phases = (
                execution.input_end_ns - execution.start_ns,
                execution.infer_end_ns - execution.input_end_ns,
                end_ns - execution.infer_end_ns,
            )
            self._statistics.record_batch(succeeded, rows, queue_ns, phases, time.time_ns() // 1_000_000)

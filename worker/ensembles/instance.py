"""`EnsembleInstance`: the coordinator of an ensemble on this worker; it lives in the event loop and has no thread.

Its requests come in batches as any model's, and run side by side, as many as come. Schedulers send an instance two
batches at most: so a batch is released when the next one has come (which a lone request is spared), and ends with the last
of its answers. A coordinator that dies is a lost batch, which is done again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from bus.payloads import PayloadReader, StalePayload
from runtime.containment import contained
from schemas.bodies import body_ref, unpack_body
from schemas.errors import Reason, WeirError, internal, overloaded
from schemas.lanes import Lane
from schemas.messages import (
    BatchEntry,
    BatchOutcome,
    Done,
    Moments,
    Run,
    pack_answer,
    pack_end,
    pack_error,
)
from schemas.request_errors import given_up
from schemas.requests import InferRequest, Parameters
from schemas.tensors import PayloadRef, Tensor
from telemetry.request_log import log_request, logs_requests
from telemetry.trace import WORKER_RECEIVED
from worker.answer_packer import AnswerPacker, pack_rows, packing_failed
from worker.backend import ModelVersion, Result
from worker.batch_decoding import content_of
from worker.batch_execution import FinishedBatch
from worker.client_memory import ClientMemory
from worker.ensembles.plan import EnsemblePlan
from worker.ensembles.request import EnsembleRequest
from worker.ensembles.step_gates import StepGates
from worker.inner_calls import InnerCalls
from worker.model_environment import ModelEnvironment
from worker.running_batch import RunningBatch
from worker.statistics import ModelStatistics

logger = logging.getLogger("weir.worker")


class EnsembleInstance:
    """See the module. All of it belongs to the event loop, but for what says otherwise."""

    def __init__(
        self,
        model: ModelVersion,
        plan: EnsemblePlan,
        arena_name: str,
        statistics: ModelStatistics,
        calls: InnerCalls,
        environment: ModelEnvironment,
    ) -> None:
        self.arena_name = arena_name
        self.model = model
        self.plan = plan
        self.statistics = statistics
        self.calls = calls
        self.client_memory = ClientMemory(environment.client_memory)
        scheduling = model.config.ensemble_scheduling
        self.gates = StepGates(len(plan.steps), 0 if scheduling is None else scheduling.max_inflight_requests)
        self.reader = PayloadReader()
        self.packer = AnswerPacker(arena_name)
        self._on_finished = environment.on_finished
        self._open: set[_OpenBatch] = set()
        self._unreleased: _OpenBatch | None = None

    @property
    def slots_held(self) -> int:
        """Payload slots of its own that no gateway has given back; what it hands on belongs to the workers of its steps."""
        return self.packer.slots_held

    def submit(self, batch: RunningBatch) -> None:
        """Runs the batch beside those submitted before."""
        before, self._unreleased = self._unreleased, _OpenBatch(self, batch)
        if before is not None:
            before.release()
        self._open.add(self._unreleased)
        self._unreleased.begin()

    def release(self, segment: str, slot: int, generation: int) -> None:
        """A gateway has read an output that lay in its own memory."""
        self.packer.give_back(segment, slot, generation)

    def stop(self, wait_for_readers: bool = False) -> None:
        """Gives up its memory, `wait_for_readers` as in `ModelInstance.stop`; what is open ends with its steps.

        For any thread.
        """
        self.packer.close(wait_for_readers)

    def hand_back(self) -> None:
        """Gives the batches back to their schedulers which nobody has seen a response of: others can run them."""
        for opened in list(self._open):
            self._hand_back(opened)

    @contained()
    def _hand_back(self, opened: _OpenBatch) -> None:
        opened.hand_back()

    def publish(self, batch: FinishedBatch) -> None:
        """Sends what there is of a batch."""
        self._on_finished(batch)

    def closed(self, opened: _OpenBatch) -> None:
        """The batch has ended."""
        self._open.discard(opened)
        if opened is self._unreleased:
            self._unreleased = None


class _OpenBatch:
    """A batch until its last answer. What is answered in one turn of the loop leaves together."""

    def __init__(self, instance: EnsembleInstance, running: RunningBatch) -> None:
        self.instance = instance
        self.running = running
        self.run = f"{running.message.scheduler}.{running.message.batch_id}" if instance.plan.is_decoupled else ""
        self._requests: dict[int, _OpenRequest] = {}
        self._answers: dict[str, list[tuple[Any, ...]]] = {}
        self._leave_due = False
        self._is_closed = False

    def begin(self) -> None:
        message = self.running.message
        self.running.on_cancel = self._cancel
        for position, entry in enumerate(message.entries):
            opened = self._requests[position] = _OpenRequest(self, position, entry)
            opened.begin()

    def release(self) -> None:
        message = self.running.message
        took_us = (time.monotonic_ns() - self.running.received_ns) // 1000
        done = Done(message.batch_id, BatchOutcome.RELEASED, took_us)
        self.instance.publish(FinishedBatch(message.scheduler, done, []))

    def answer(self, position: int, gateway: str, row: tuple[Any, ...], is_final: bool) -> None:
        """An answer to the request at this position."""
        self._answers.setdefault(gateway, []).append(row)
        if is_final:
            del self._requests[position]
        if not self._leave_due:
            self._leave_due = True
            asyncio.get_running_loop().call_soon(self._leave)

    def is_open(self, position: int) -> bool:
        """Whether the request at this position has no last answer yet."""
        return position in self._requests

    def hand_back(self) -> None:
        if self._is_closed or any(opened.has_responded for opened in self._requests.values()):
            return
        if not self._requests:
            return  # its answers are about to leave
        for opened in self._requests.values():
            opened.cancel()
        self._requests.clear()
        self._close()
        done = Done(self.running.message.batch_id, BatchOutcome.UNANSWERED, 0)
        self.instance.publish(FinishedBatch(self.running.message.scheduler, done, self._taken_answers()))

    def _leave(self) -> None:
        self._leave_due = False
        if self._is_closed:
            return
        message = self.running.message
        if self._requests:
            self.instance.publish(FinishedBatch(message.scheduler, None, self._taken_answers()))
            return
        self._close()
        done = Done(message.batch_id, BatchOutcome.ANSWERED, 0)
        self.instance.publish(FinishedBatch(message.scheduler, done, self._taken_answers(), message.acks))

    def _taken_answers(self) -> list[tuple[str, bytes]]:
        answers, self._answers = self._answers, {}
        version = self.instance.model.version
        return [(gateway, pack_rows(version, rows)) for gateway, rows in answers.items()]

    def _cancel(self) -> None:
        for position in self.running.cancelled:
            opened = self._requests.get(position)
            if opened is not None:
                opened.give_up()

    def _close(self) -> None:
        self._is_closed = True
        self.running.on_cancel = None
        self.instance.closed(self)


class _OpenRequest:
    """One request of a batch: what it asks, how it goes on (it is its `EnsembleRequest`'s caller), and its counting."""

    def __init__(self, batch: _OpenBatch, position: int, entry: BatchEntry) -> None:
        self._batch = batch
        self._instance = batch.instance
        self._position = position
        self._entry = entry
        self._begun_ns = time.monotonic_ns()
        self._request: InferRequest | None = None
        self._steps: EnsembleRequest | None = None
        self._responses = 0
        self._held: tuple[list[Tensor], Parameters] | None = None

    @property
    def has_responded(self) -> bool:
        """Whether its caller may have seen a response."""
        return self._responses > 0

    @contained(on_error="_begin_failed")
    def begin(self) -> None:
        instance, message = self._instance, self._batch.running.message
        if self._position in self._batch.running.cancelled:
            self._refuse(given_up(), "CANCELED")
            return
        if self._batch.running.is_late(self._position):
            self._refuse(overloaded("Request timeout expired", reason=Reason.TIMED_OUT), "REJECTED")
            return
        try:
            ref = body_ref(self._entry.body)
            # A copy: tensors of it may be wanted by steps that start when the body's place has been given back.
            body = self._entry.body if ref is None else bytes(content_of(ref, self._batch.running, instance.reader))
            request = self._request = unpack_body(body, message.model, message.version)
            request.deadline_ms, request.lane = self._entry.deadline_ms, Lane(self._entry.lane)
            instance.client_memory.check_outputs(request, self._entry.gateway)  # inputs are the steps' to read
        except StalePayload:
            self._refuse(given_up(), "CANCELED")
            return
        except WeirError as error:
            self._refuse(error, "OTHER")
            return
        except ValueError as error:  # MalformedMessage among them
            self._refuse(internal(str(error)), "OTHER")
            return
        if logs_requests(logger):
            step = f"runs in the ensemble, batch {message.batch_id}"
            log_request(logger, step, message.model, self._entry.gateway, self._entry.key, request.id)
        self._steps = EnsembleRequest(
            instance.model.config, instance.plan, instance.gates, request, instance.calls, instance.reader, self
        )
        self._steps.begin()

    def _begin_failed(self, error: Exception) -> None:
        self.cancel()
        self._refuse(internal(f"the request can't be run: {type(error).__name__}: {error}"), "OTHER")

    @contained()
    def give_up(self) -> None:
        """Its caller has gone."""
        self.cancel()
        self._refuse(given_up(), "CANCELED")

    def cancel(self) -> None:
        """Ends its steps."""
        if self._steps is not None:
            self._steps.cancel()

    # How it goes on

    @contained(on_error="_response_failed")
    def responded(self, outputs: list[Tensor], parameters: Parameters) -> None:
        """See `worker.ensembles.request.Caller`."""
        if not self._batch.is_open(self._position):
            # It has failed, and what its steps still answer comes too late.
            for tensor in outputs:
                self._release(tensor.data)
            return
        if self._instance.plan.is_decoupled:
            self._send(outputs, parameters, is_final=False)
        else:
            self._held = outputs, parameters

    def _response_failed(self, error: Exception, *_: object) -> None:
        self.cancel()
        self._ending_failed(error)

    @contained(on_error="_ending_failed")
    def ended(self, error: WeirError | None) -> None:
        """See `worker.ensembles.request.Caller`."""
        if not self._batch.is_open(self._position):
            return
        if error is not None:
            self._refuse(error, "OTHER")
            return
        self._record_success()
        if self._held is not None:
            self._send(*self._held, is_final=True)
        else:
            self._answer(pack_end(self._entry.key, self._moments(), self._run), is_final=True)

    def _ending_failed(self, error: Exception, _ended_with: WeirError | None = None) -> None:
        if self._batch.is_open(self._position):
            self._refuse(packing_failed(error), "OTHER")

    def _send(self, outputs: list[Tensor], parameters: Parameters, is_final: bool) -> None:
        moments = self._moments() if is_final else None
        error = self._delivered(outputs)
        if error is not None:
            for tensor in outputs:
                self._release(tensor.data)
            row = pack_error(self._entry.key, error, is_final, moments, self._run)
        else:
            row = pack_answer(self._entry.key, outputs, parameters, is_final, moments, self._run)
        self._responses += 1
        self._answer(row, is_final)

    def _delivered(self, outputs: list[Tensor]) -> WeirError | None:
        """Puts outputs where the caller can read them, or wants them; or the reason why that can't be."""
        request = self._request
        regions = {output.name for output in request.outputs if output.region is not None} if request else ()
        for tensor in outputs:
            data = tensor.data
            if isinstance(data, PayloadRef) and tensor.name in regions:
                try:
                    tensor.data = bytes(self._instance.reader.view(data))
                except (StalePayload, ValueError):
                    return internal("the response was lost before it could be sent")
                self._instance.calls.release(data)
        if regions and request is not None:
            result = Result(outputs)
            self._instance.client_memory.deliver(request, result)
            if result.error is not None:
                return result.error
        # What a step answered out of a cache may be large and lies in nobody's memory yet.
        return self._instance.packer.place(self._entry.gateway, outputs)

    def _release(self, data: object) -> None:
        if isinstance(data, PayloadRef):
            self._instance.calls.release(data)

    def _refuse(self, error: WeirError, reason: str) -> None:
        self._count_failure(reason)
        self._answer(pack_error(self._entry.key, error, True, self._moments(), self._run), is_final=True)

    @contained()
    def _count_failure(self, reason: str) -> None:
        queued_ns = self._entry.queued_us * 1000
        self._instance.statistics.record_failures(1, reason, queued_ns + time.monotonic_ns() - self._begun_ns)

    def _answer(self, row: tuple[Any, ...], is_final: bool) -> None:
        self._batch.answer(self._position, self._entry.gateway, row, is_final)

    @property
    def _run(self) -> Run | None:
        return (self._batch.run, self._responses) if self._batch.run else None

    @contained()
    def _record_success(self) -> None:
        if self._request is None or self._steps is None:
            return
        statistics, phases_ns = self._instance.statistics, self._phases_ns
        inputs = self._request.inputs
        rows = inputs[0].shape[0] if self._instance.model.config.max_batch_size > 0 and inputs else 1
        queue_ns = self._entry.queued_us * 1000
        statistics.record_batch(1, rows, queue_ns, phases_ns, time.time_ns() // 1_000_000, rows)
        if statistics.latencies is not None:
            statistics.latencies.observe([queue_ns], phases_ns)

    @property
    def _phases_ns(self) -> tuple[int, int, int]:
        return (0, 0, 0) if self._steps is None else (*self._steps.phases_ns,)  # type: ignore[return-value]

    def _moments(self) -> Moments | None:
        """When it passed the points of its way, where that is asked for; computing is the sum of its steps'."""
        if self._request is None or not self._request.wants_moments:
            return None
        to_unix = time.time_ns() - time.monotonic_ns()
        received_ns = self._batch.running.received_ns + to_unix
        at_ns = self._begun_ns + to_unix
        moments = {
            "QUEUE_START": received_ns - self._entry.queued_us * 1000,
            WORKER_RECEIVED: received_ns,
            "COMPUTE_START": at_ns,
        }
        names = ("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
        for name, phase_ns in zip(names, self._phases_ns, strict=True):
            at_ns += phase_ns
            moments[name] = at_ns
        return moments

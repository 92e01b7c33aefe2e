"""`EnsembleInstance`: the coordinator of an ensemble on this worker. It runs in the event loop and has no thread.

It gets batches like any instance, and runs all their requests at the same time. A scheduler sends an instance two batches
at most, so a batch is released when the next one arrives, and ends with its last response. If the worker dies, the batches
of its coordinators are lost and run again on another worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from weir.bus.naming.identity import lies_elsewhere
from weir.bus.payloads.arena import PayloadReader, StalePayload
from weir.bus.payloads.reach import process_reach
from weir.runtime.containment import call_each, contained
from weir.schemas.core.errors import Reason, WeirError, internal, overloaded
from weir.schemas.core.request_limits import cancelled_error
from weir.schemas.core.requests import InferRequest, Lane, Parameters
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.batches import BatchCompletion, BatchEnded, BatchEntry, BatchLost, BatchReleased
from weir.schemas.wire.calls import ResponseRun, Timestamps, pack_end, pack_error, pack_response
from weir.schemas.wire.request_body import body_ref, unpack_body
from weir.telemetry.logs import log_request, logs_requests
from weir.telemetry.tracing.trace import BATCH_SENT, WORKER_RECEIVED
from weir.worker.backend_api.interface import ModelVersion, Result
from weir.worker.ensembles.backend import EnsembleModel
from weir.worker.ensembles.request import EnsembleContext, EnsembleRequest, StepLimiter
from weir.worker.execution.batch import Batch
from weir.worker.execution.decoding import read_content
from weir.worker.execution.instance import ModelEnvironment
from weir.worker.execution.response_writer import ResponseWriter, pack_by_gateway
from weir.worker.execution.shared_memory import SharedMemoryIO
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.updates import BatchUpdate

logger = logging.getLogger("weir.worker")


class EnsembleInstance:
    """Runs the requests of one ensemble version. Methods are for the event loop if they do not say otherwise."""

    def __init__(
        self,
        model: ModelVersion,
        loaded: EnsembleModel,
        arena_name: str,
        statistics: ModelStatistics,
        environment: ModelEnvironment,
    ) -> None:
        self.arena_name = arena_name
        self.model = model
        self.plan = loaded.plan
        self.statistics = statistics
        self.client = loaded.client
        self.shared_memory = SharedMemoryIO(environment.shared_memory)
        scheduling = model.config.ensemble_scheduling
        limit = 0 if scheduling is None else scheduling.max_inflight_requests
        self.reader = PayloadReader()
        self.context = EnsembleContext(
            model.config, self.plan, StepLimiter(len(self.plan.steps), limit), self.client, self.reader
        )
        self.writer = ResponseWriter(arena_name, self.shared_memory)
        self._on_update = environment.on_update
        self._open: set[_OpenBatch] = set()
        self._unreleased: _OpenBatch | None = None
        self._due: dict[_OpenBatch, None] = {}  # with an update for the end of this turn of the event loop

    @property
    def slots_held(self) -> int:
        """The number of its payload slots that no gateway has released. Outputs of steps lie in slots of other workers."""
        return self.writer.slots_held

    def submit(self, batch: Batch) -> None:
        """Starts all requests of the batch."""
        before, self._unreleased = self._unreleased, _OpenBatch(self, batch)
        if before is not None:
            before.release()
        self._open.add(self._unreleased)
        self._unreleased.begin()

    def release(self, segment: str, slot: int, generation: int) -> None:
        """Releases a payload slot whose output a gateway has read."""
        self.writer.release(segment, slot, generation)

    def stop(self, wait_for_readers: bool = False) -> None:
        """Removes its shared memory; `wait_for_readers` as in `ModelInstance.stop`. Open requests end with their steps.

        Called in any thread.
        """
        self.writer.close(wait_for_readers)

    def requeue(self) -> None:
        """Returns the batches without a response to their schedulers, so that other workers run them."""
        call_each("weir.worker.ensembles.instance: returning a batch", [opened.requeue for opened in self._open])

    def publish(self, batch: BatchUpdate) -> None:
        """Publishes an update of a batch."""
        self._on_update(batch)

    def publish_soon(self, opened: _OpenBatch) -> None:
        """Publishes the update of a batch at the end of this turn of the event loop, with those of other batches."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._publish_due)
        self._due[opened] = None

    def _publish_due(self) -> None:
        due, self._due = self._due, {}
        self._publish_together(due)

    @contained(on_error="_publishing_failed")
    def _publish_together(self, due: Iterable[_OpenBatch]) -> None:
        by_scheduler: dict[str, tuple[dict[str, list[tuple[Any, ...]]], list[BatchCompletion]]] = {}
        for opened in due:
            rows, completions = by_scheduler.setdefault(opened.running.message.scheduler, ({}, []))
            completions += opened.take_update(rows)
        for scheduler, (rows, completions) in by_scheduler.items():
            if rows or completions:
                self.publish(BatchUpdate(scheduler, completions, pack_by_gateway(self.model.version, rows)))

    def _publishing_failed(self, _error: Exception, due: Iterable[_OpenBatch]) -> None:
        """Reports the batches as lost, so that their schedulers run them again."""
        for opened in due:
            opened.lose()

    def closed(self, opened: _OpenBatch) -> None:
        """Forgets a batch that has ended."""
        self._open.discard(opened)
        if opened is self._unreleased:
            self._unreleased = None


class _OpenBatch:
    """A batch until its last response. The responses of one turn of the event loop are published together."""

    def __init__(self, instance: EnsembleInstance, running: Batch) -> None:
        self.instance = instance
        self.running = running
        self.run = f"{running.message.scheduler}.{running.message.batch_id}" if instance.plan.is_decoupled else ""
        self._requests: dict[int, _OpenRequest] = {}
        self._rows: dict[str, list[tuple[Any, ...]]] = {}
        self._is_closed = False
        self._is_release_due = False

    def begin(self) -> None:
        message = self.running.message
        self.running.on_cancel = self._cancel
        for position, entry in enumerate(message.entries):
            opened = self._requests[position] = _OpenRequest(self, position, entry)
            opened.begin()

    def release(self) -> None:
        self._is_release_due = True
        self.instance.publish_soon(self)

    def respond(self, position: int, gateway: str, row: tuple[Any, ...], is_final: bool) -> None:
        """Adds a response to the request at this position."""
        self._rows.setdefault(gateway, []).append(row)
        if is_final:
            del self._requests[position]
        self.instance.publish_soon(self)

    def is_open(self, position: int) -> bool:
        """Whether the request at this position has no last response yet."""
        return position in self._requests

    def requeue(self) -> None:
        if self._is_closed or any(opened.has_responded for opened in self._requests.values()):
            return
        if not self._requests:
            return  # its last responses are about to be published
        for opened in self._requests.values():
            opened.cancel()
        self._requests.clear()
        self._close()
        message, responses = self.running.message, pack_by_gateway(self.instance.model.version, self._rows)
        self.instance.publish(BatchUpdate(message.scheduler, (BatchLost(message.batch_id),), responses))

    def lose(self) -> None:
        """Ends the batch without its responses."""
        for opened in self._requests.values():
            opened.cancel()
        self._requests.clear()
        self._close()
        message = self.running.message
        self.instance.publish(BatchUpdate(message.scheduler, (BatchLost(message.batch_id),)))

    def take_update(self, rows: dict[str, list[tuple[Any, ...]]]) -> Sequence[BatchCompletion]:
        """Adds the responses so far to `rows`, by gateway; returns the end of the batch, or its release, if that is due."""
        if self._is_closed:
            return ()
        message = self.running.message
        for gateway, of_gateway in self._rows.items():
            rows.setdefault(gateway, []).extend(of_gateway)
        self._rows.clear()
        if not self._requests:
            self._close()
            return (BatchEnded(message.batch_id),)
        if not self._is_release_due:
            return ()
        self._is_release_due = False
        busy_us = (time.monotonic_ns() - self.running.received_ns) // 1000
        return (BatchReleased(message.batch_id, busy_us),)

    def _cancel(self) -> None:
        found = [self._requests[position] for position in self.running.cancelled if position in self._requests]
        call_each("weir.worker.ensembles.instance: cancelling a request", [opened.caller_cancelled for opened in found])

    def _close(self) -> None:
        self._is_closed = True
        self.running.on_cancel = None
        self.instance.closed(self)


class _OpenRequest:
    """One request of a batch: decodes it, sends its responses (as the `Caller` of its `EnsembleRequest`) and counts it."""

    def __init__(self, batch: _OpenBatch, position: int, entry: BatchEntry) -> None:
        self._batch = batch
        self._instance = batch.instance
        self._position = position
        self._entry = entry
        self._start_ns = time.monotonic_ns()
        self._request: InferRequest | None = None
        self._steps: EnsembleRequest | None = None
        self._responses = 0
        self._held: tuple[list[Tensor], Parameters] | None = None

    @property
    def has_responded(self) -> bool:
        """Whether its caller may have a response."""
        return self._responses > 0

    @contained(on_error="_begin_failed")
    def begin(self) -> None:
        instance, message = self._instance, self._batch.running.message
        if self._position in self._batch.running.cancelled:
            self._fail(cancelled_error(), "CANCELED")
            return
        if self._batch.running.is_late(self._position):
            self._fail(overloaded("Request timeout expired", reason=Reason.TIMED_OUT), "REJECTED")
            return
        try:
            ref = body_ref(self._entry.body)
            # A copy: steps that start later may need tensors of the body after its payload slot was released.
            body = self._entry.body if ref is None else bytes(read_content(ref, self._batch.running, instance.reader))
            request = self._request = unpack_body(body, message.model, message.version)
            request.deadline_ms, request.lane = self._entry.deadline_ms, Lane(self._entry.lane)
            instance.shared_memory.check_outputs(request, self._entry.gateway)  # the steps read the inputs
        except StalePayload:
            self._fail(cancelled_error(), "CANCELED")
            return
        except WeirError as error:
            self._fail(error, "OTHER")
            return
        except ValueError as error:  # MalformedMessage among them
            self._fail(internal(str(error)), "OTHER")
            return
        if logs_requests(logger):
            step = f"runs in the ensemble, batch {message.batch_id}"
            log_request(logger, step, message.model, (self._entry.gateway, self._entry.key), request.id)
        self._steps = EnsembleRequest(instance.context, request, self)
        self._steps.begin()

    def _begin_failed(self, error: Exception) -> None:
        self.cancel()
        if self._batch.is_open(self._position):
            self._fail(internal(f"the request can't be run: {type(error).__name__}: {error}"), "OTHER")

    def caller_cancelled(self) -> None:
        """Cancels the request because its caller did."""
        self.cancel()
        self._fail(cancelled_error(), "CANCELED")

    def cancel(self) -> None:
        """Cancels its steps."""
        if self._steps is not None:
            self._steps.cancel()

    # Responses

    def responded(self, outputs: list[Tensor], parameters: Parameters) -> None:
        """Sends a response, or keeps it until `ended` if it is the only one."""
        if not self._batch.is_open(self._position):
            # The request has failed, and this response of a step is too late.
            for tensor in outputs:
                self._release(tensor.data)
            return
        if self._instance.plan.is_decoupled:
            self._send(outputs, parameters, is_final=False)
        else:
            self._held = outputs, parameters

    def ended(self, error: WeirError | None) -> None:
        """Sends the last response."""
        if not self._batch.is_open(self._position):
            return
        if error is not None:
            self._fail(error, "OTHER")
            return
        if self._held is not None:
            self._send(*self._held, is_final=True)
        else:
            self._respond(pack_end(self._entry.key, self._timestamps(), self._run), is_final=True)
        self._count_success()

    def _send(self, outputs: list[Tensor], parameters: Parameters, is_final: bool) -> None:
        timestamps = self._timestamps() if is_final else None
        error = self._deliver(outputs)
        if error is not None:
            for tensor in outputs:
                self._release(tensor.data)
            row = pack_error(self._entry.key, error, is_final, timestamps, self._run)
        else:
            row = pack_response(self._entry.key, outputs, parameters, is_final, timestamps, self._run)
        self._responses += 1
        self._respond(row, is_final)
        latencies = self._instance.statistics.latencies
        if self._responses == 1 and latencies is not None:
            queued_ns = self._entry.queued_us * 1000
            latencies.observe_first_responses([queued_ns + time.monotonic_ns() - self._start_ns])

    def _deliver(self, outputs: list[Tensor]) -> WeirError | None:
        """Puts outputs where the caller can read them or has requested them; returns an error if that fails."""
        request = self._request
        regions = {output.name for output in request.outputs if output.region is not None} if request else ()
        for tensor in outputs:
            data = tensor.data
            if isinstance(data, PayloadRef) and (tensor.name in regions or self._is_out_of_reach(data)):
                try:
                    tensor.data = bytes(self._instance.reader.view(data))
                except (StalePayload, ValueError):
                    return internal("the response was lost before it could be sent")
                self._instance.client.release(data)
        if regions and request is not None:
            result = Result(outputs)
            self._instance.shared_memory.deliver(request, result)
            if result.error is not None:
                return result.error
        # The response of a step from a cache may be large, and is not in a payload slot yet.
        return self._instance.writer.place(self._entry.gateway, outputs)

    def _is_out_of_reach(self, ref: PayloadRef) -> bool:
        """Whether an output of a step lies here, and the caller can't fetch it: then it travels in the message."""
        return not process_reach().includes(self._entry.gateway) and not lies_elsewhere(ref.segment)

    def _release(self, data: object) -> None:
        if isinstance(data, PayloadRef):
            self._instance.client.release(data)

    # A response is counted once it is sure to be sent, and before it is: that happens at the end of the turn.

    def _fail(self, error: WeirError, reason: str) -> None:
        self._respond(pack_error(self._entry.key, error, True, self._timestamps(), self._run), is_final=True)
        queued_ns = self._entry.queued_us * 1000
        self._instance.statistics.record_failures(1, reason, queued_ns + time.monotonic_ns() - self._start_ns)

    def _respond(self, row: tuple[Any, ...], is_final: bool) -> None:
        self._batch.respond(self._position, self._entry.gateway, row, is_final)

    @property
    def _run(self) -> ResponseRun | None:
        return (self._batch.run, self._responses) if self._batch.run else None

    def _count_success(self) -> None:
        if self._request is None or self._steps is None:
            return
        statistics, phases_ns = self._instance.statistics, self._phases_ns
        inputs = self._request.inputs
        rows = inputs[0].shape[0] if self._instance.model.config.max_batch_size > 0 and inputs else 1
        queue_ns = self._entry.queued_us * 1000
        statistics.record_requests(1, rows, queue_ns, phases_ns)
        statistics.record_latency((queue_ns,), sum(phases_ns))
        statistics.record_execution(rows, phases_ns, time.time_ns() // 1_000_000)
        if statistics.latencies is not None:
            statistics.latencies.observe([queue_ns], phases_ns)

    @property
    def _phases_ns(self) -> tuple[int, int, int]:
        return (0, 0, 0) if self._steps is None else (*self._steps.phases_ns,)  # type: ignore[return-value]

    def _timestamps(self) -> Timestamps | None:
        """The request's trace timestamps, if it is traced; compute times are the sums of those of its steps."""
        if self._request is None or not self._request.wants_timestamps:
            return None
        to_unix = time.time_ns() - time.monotonic_ns()
        received_ns = self._batch.running.received_ns + to_unix
        at_ns = self._start_ns + to_unix
        message = self._batch.running.message
        timestamps: Timestamps = {
            "QUEUE_START": received_ns - self._entry.queued_us * 1000,
            WORKER_RECEIVED: received_ns,
            "COMPUTE_START": at_ns,
            "BATCH_ID": message.batch_id,
            "BATCH_SIZE": len(message.entries),
            "SCHEDULER": message.scheduler,
            "WORKER": self._batch.running.worker,
        }
        if message.sent_ns:
            timestamps[BATCH_SENT] = message.sent_ns
        names = ("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
        for name, phase_ns in zip(names, self._phases_ns, strict=True):
            at_ns += phase_ns
            timestamps[name] = at_ns
        return timestamps

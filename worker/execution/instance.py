"""`ModelInstance`: the thread that runs one instance of a model, batch after batch.

The event loop submits batches; the thread decodes them, runs the instance and encodes the responses, so that nothing costly
happens in the event loop. While a device works on a batch, the thread starts the next one if it has arrived.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weir.bus.kv.sequence_states import SequenceStates
from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError, internal, unavailable
from weir.schemas.wire.batches import BatchLost
from weir.telemetry.metrics_config import MetricsConfig
from weir.worker.backend_api.interface import (
    DeviceLost,
    ExecutionHandle,
    Instance,
    InstanceDevice,
    LoadedModel,
    MicrobatchInstance,
    ModelVersion,
    ProcessCalls,
)
from weir.worker.devices.gpus import CPU_ONLY, GpuMemory, WorkerDevices
from weir.worker.devices.host_policy import NO_POLICIES, UNBOUND, HostPolicies
from weir.worker.execution.batch import Batch
from weir.worker.execution.batch_runner import BatchRunner
from weir.worker.execution.batch_tensors import Reshaper
from weir.worker.execution.microbatch import FAST_US, MAX_TOGETHER, MAX_TOGETHER_BYTES, Microbatch, Pace, measured_bytes
from weir.worker.execution.rate_limiter import InstancePermit, RateLimiterPermits
from weir.worker.execution.response_writer import ResponseWriter
from weir.worker.execution.sequences import ImplicitStates, StateDeclarations
from weir.worker.execution.shared_memory import SharedMemoryAccess, SharedMemoryIO
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.streaming import InstanceContext, StreamingBatches
from weir.worker.execution.updates import BatchUpdate, HeldUpdates
from weir.worker.execution.warmup import WarmUp, WarmUpSample

logger = logging.getLogger("weir.worker")

_STOP = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEnvironment:
    """The services and settings of the worker that its models and their instances use.

    `arena_prefix` is unique to the worker. `on_update` gets each batch update of an instance, in any thread.
    `metrics` sets which optional metrics are recorded, `shared_memory` gives access to the shared memory of clients,
    and `permits` are those of the rate limiter (None: instances may always execute). `checkpoints` stores the
    states of sequences for other workers, and `process_calls` serves the requests of models' processes to other models; a
    worker without one of them lacks the feature. `host_policies` set where on the
    host instances run. `on_health_change` gets the identity of a model some of whose instances became unavailable, or
    available again, in any thread.

    `on_device_lost` is called once, in an instance's thread, with the reason, when nothing can run on the GPUs of this
    process any more: the callee exits. `device_lost` is set from then on, and GPU instances report no batch: a report would
    have a scheduler send the batch here again, whereas the end of the process has it send all batches elsewhere.
    """

    arena_prefix: str
    on_update: Callable[[BatchUpdate], None]
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    shared_memory: SharedMemoryAccess = field(default_factory=SharedMemoryAccess)
    permits: RateLimiterPermits | None = None
    checkpoints: SequenceStates | None = None

    process_calls: ProcessCalls | None = None
    devices: WorkerDevices = CPU_ONLY
    gpu_memory: GpuMemory = field(default_factory=GpuMemory)
    on_device_lost: Callable[[str], None] = lambda reason: None
    device_lost: threading.Event = field(default_factory=threading.Event)
    host_policies: HostPolicies = NO_POLICIES
    on_health_change: Callable[[str], None] = lambda identity: None


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """How one instance is created: its device, the name of its payload arena, and its options.

    `states` are the implicit states of a sequence model, `warm_up` the samples that run before the instance gets batches.
    With a `permit` each batch waits for the rate limiter.
    """

    device: InstanceDevice
    arena_name: str
    states: StateDeclarations | None = None
    warm_up: Sequence[WarmUpSample] = ()
    permit: InstancePermit | None = None


class ModelInstance:
    """One instance of a model version and its thread.

    `spec` has the instance's device and options. Updates of batches go to the environment's `on_update`: at the end of
    each batch in the instance's thread, and for each response that a model sends itself in the thread in which it does.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        model: ModelVersion,
        spec: InstanceSpec,
        statistics: ModelStatistics,
        environment: ModelEnvironment,
    ) -> None:
        device, states, shared_memory = spec.device, spec.states, SharedMemoryIO(environment.shared_memory)
        reshaper: Reshaper | None = Reshaper(model.config)
        if reshaper is not None and not reshaper.is_needed:
            reshaper = None
        self.name = device.name
        self.key = device.key
        self.arena_name = spec.arena_name
        self._loaded = loaded
        self._device = device
        self._context = InstanceContext(
            name=device.name,
            version=model.version,
            config=model.config,
            writer=ResponseWriter(spec.arena_name, shared_memory, reshaper),
            shared_memory=shared_memory,
            reshaper=reshaper,
            states=ImplicitStates(states, environment.checkpoints) if states is not None and states.states else None,
        )
        self._environment = environment
        self._updates = HeldUpdates(model.version, environment.on_update)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox_lock = threading.Lock()  # held to put a batch in and to look through the batches
        streaming = StreamingBatches(self._context, statistics, environment.on_update)
        self._runner = BatchRunner(self._context, statistics, streaming)
        self._warm_up_samples = spec.warm_up
        self._permit = spec.permit
        # A permit is valid for one batch, and the next state of a sequence follows from its last request.
        self._may_overlap = spec.permit is None and self._context.states is None
        config = model.config
        runs_singly = config.dynamic_batching is None and config.sequence_batching is None and not config.is_decoupled
        self._device_lost = environment.device_lost if device.kind == "KIND_GPU" else None
        self.runs_directly = (
            spec.permit is None
            and model.config.sequence_batching is None
            and not model.config.is_decoupled
            and not getattr(loaded, "is_isolated", False)
        )
        """Whether its worker may run requests of its own on it without the scheduler."""
        self._runs_in_event_loop = (
            self.runs_directly
            and self._may_overlap
            and device.kind == "KIND_CPU"
            and device.host_policy == UNBOUND  # which the instance's thread has, and the event loop has not
            and getattr(loaded, "runs_in_any_thread", False)
        )
        self._pace = Pace()
        self._instance: Instance | None = None
        self._submitted = 0  # changed by the event loop
        self._left = 0  # changed by the thread
        self._waits_for_readers = False
        self._progress_s = 0.0
        self._is_fast = False  # the last batch was
        self._has_run_inline = False  # a batch whose update is held
        self._may_hold = self._may_overlap and runs_singly
        self._microbatches: MicrobatchInstance | None = None
        self._microbatch: Microbatch | None = None  # the one that runs
        self._created: queue.SimpleQueue[WeirError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=device.name, daemon=True)

    def start(self) -> None:
        """Creates and warms up the instance in its thread, and waits for that. Raises WeirError if either fails."""
        self.begin_start()
        self.finish_start()

    def begin_start(self) -> None:
        """Starts the thread; `finish_start` waits for the instance."""
        self._thread.start()

    def finish_start(self) -> None:
        """Waits until the instance is created and warmed up. Raises as `start`."""
        error = self._created.get()
        if error is not None:
            self._thread.join()
            raise error

    def submit(self, batch: Batch, more_follow: bool = False) -> None:
        """Runs the batch after those submitted before: in the instance's thread, or at once if it takes no time.

        Waking the thread costs more than a small model, and nothing waits for the event loop that long. If `more_follow`,
        the caller calls `flush` after those.
        """
        self._submitted += 1
        if self.held == 1:
            self._progress_s = time.monotonic()
            if self._instance is not None:
                size_bytes = measured_bytes(batch)
                if self._pace.is_fast(size_bytes):
                    # Responses of formed batches leave while the next batch runs: the gateway works on them meanwhile.
                    holds = self._has_run_inline = more_follow and self._may_hold
                    self._leave(self._run_batch(self._instance, batch), size_bytes, holds=holds)
                    return
        with self._inbox_lock:
            self._inbox.put(batch)

    def flush(self) -> None:
        """Publishes the updates of batches that ran in the event loop."""
        if self._has_run_inline:
            self._has_run_inline = False
            self._updates.flush()

    def flush_held(self) -> None:
        """Publishes the updates that wait for those of the next batches. For any thread."""
        if self._updates:
            self._updates.flush()

    @property
    def unstarted(self) -> int:
        """The batches that have not started."""
        microbatch = self._microbatch
        return self._inbox.qsize() + (0 if microbatch is None else microbatch.unstarted)

    @property
    def needs_watch(self) -> bool:
        """Whether updates may be held, or batches wait, for too long behind a batch that is slow unexpectedly."""
        return self.held > 1 and (self._is_fast or self.unstarted > 1)

    @property
    def stuck_s(self) -> float:
        """For how long no batch has ended, or the instance was idle."""
        return time.monotonic() - self._progress_s

    @property
    def held(self) -> int:
        """The batches that were submitted and have not left the instance. For the event loop."""
        return self._submitted - self._left

    def withdraw(self) -> list[Batch]:
        """Removes the batches that have not started; returns them. For the event loop."""
        microbatch = self._microbatch
        withdrawn = [] if microbatch is None else list(microbatch.withdraw())
        with self._inbox_lock:
            is_stopping = False
            while (batch := self._next(is_busy=True)) is not None:
                if batch is _STOP:
                    is_stopping = True
                else:
                    withdrawn.append(batch)
            if is_stopping:
                self._inbox.put(_STOP)
        self._submitted -= len(withdrawn)
        return withdrawn

    def release(self, segment: str, slot: int, generation: int) -> None:
        """Releases a payload slot whose output a gateway has read."""
        self._context.writer.release(segment, slot, generation)

    @property
    def slots_held(self) -> int:
        """The number of payload slots with outputs that no gateway has released yet."""
        return self._context.writer.slots_held

    def ask_to_stop(self, wait_for_readers: bool = False) -> None:
        """Lets the thread end after the batches submitted so far; `stop` waits for it."""
        self._waits_for_readers = wait_for_readers
        with self._inbox_lock:
            self._inbox.put(_STOP)

    def stop(self, wait_for_readers: bool = False) -> None:
        """Runs what was submitted to its last response, closes the instance, and returns when its thread has ended.

        With `wait_for_readers` outputs in shared memory stay for a while, until gateways have read them.
        """
        self.ask_to_stop(wait_for_readers)
        self._thread.join()

    def _run(self) -> None:
        try:
            instance = self._created_instance()
        except WeirError as error:
            self._leave_rate_limiter()
            self._context.writer.close()
            self._created.put(error)
            return
        if self._runs_in_event_loop:
            self._instance = instance
        self._created.put(None)
        try:
            self._take_batches(instance)
            self._runner.streaming.wait()
        finally:
            self._close(instance)
            self._context.writer.close(self._waits_for_readers)

    def _close(self, instance: Instance) -> None:
        try:
            instance.close()
        except BaseException:  # the thread has to go on and close the memory of the instance
            logger.exception("%s: closing the instance failed", self._device.name)

    def _take_batches(self, instance: Instance) -> None:
        on_device: Batch | None = None
        batch: Any = None
        try:
            while batch is not _STOP:
                batch = self._next(is_busy=on_device is not None)
                started: Batch | BatchUpdate | None = None
                if batch is not None and batch is not _STOP:
                    if (
                        self._microbatches is not None
                        and self._is_fast
                        and len(batch.message.entries) == 1
                        and len(together := self._taken_with(batch)) > 1
                    ):
                        self._updates.flush()
                        self._run_microbatch(self._microbatches, together)
                        continue
                    if not self._may_overlap:
                        self._leave(self._run_with_permit(instance, batch))
                        continue
                    started = self._start(instance, batch)
                # Responses leave in the order of the batches, even if the later batch ends at once.
                if on_device is not None:
                    self._updates.flush()  # which would wait for the device otherwise
                    self._leave(self._finish(instance, on_device))
                    on_device = None
                if isinstance(started, Batch):
                    if isinstance(started.outcomes, ExecutionHandle):
                        on_device = started
                        continue
                    started = self._finish(instance, started)
                if batch is not None and batch is not _STOP:
                    self._leave(started, 0 if self._instance is None else measured_bytes(batch))
        finally:
            self._updates.flush()
            self._leave_rate_limiter()

    def _taken_with(self, batch: Batch) -> list[Batch]:
        """The batch, and those that have arrived behind it and may go to the process of the instance with it."""
        together, scheduler = [batch], batch.message.scheduler
        size_bytes = len(batch.message.entries[0].body)
        with self._inbox_lock:
            while len(together) < MAX_TOGETHER and (following := self._next(is_busy=True)) is not None:
                fits = following is not _STOP and len(following.message.entries) == 1
                if fits:
                    size_bytes += len(following.message.entries[0].body)
                    fits = following.message.scheduler == scheduler and size_bytes <= MAX_TOGETHER_BYTES
                if not fits:
                    others = [following]
                    while (other := self._next(is_busy=True)) is not None:
                        others.append(other)
                    for other in others:
                        self._inbox.put(other)
                    break
                together.append(following)
        return together

    def _next(self, is_busy: bool) -> Any:
        """The next batch, or `_STOP`; with `is_busy`, None if there is none yet."""
        try:
            return self._inbox.get(block=not is_busy)
        except queue.Empty:
            return None

    def _leave(self, update: BatchUpdate | None, inline_bytes: int = 0, holds: bool | None = None) -> None:
        """Publishes the end of a batch, which the instance does not hold any more; with those of the next ones if `holds`.

        By default it does so while batches wait and take no time.
        """
        self._left += 1
        self._progress_s = time.monotonic()
        if update is not None:
            busy_us = max([getattr(completion, "busy_us", 0) for completion in update.completions], default=0)
            if inline_bytes:
                self._pace.note(inline_bytes, busy_us)
            self._updates.add(update)
            # Only after two fast ones, so that `needs_watch` was true when the batch that waits now came.
            was_fast, self._is_fast = self._is_fast, busy_us <= FAST_US
            if holds is None and self._may_hold and was_fast and self._is_fast:
                holds = not (self._inbox.empty() or self._updates.are_due)
        if not holds:
            self._updates.flush()

    def _created_instance(self) -> Instance:
        """Creates and warms up the instance. Raises WeirError if either fails."""
        try:
            self._device.host_policy.bind()
            instance = self._loaded.create_instance(self._device)
            self._context.shared_memory.gpu = getattr(instance, "region_gpu", -1)
            try:
                self._warm_up(instance)
            except BaseException:
                self._close(instance)
                raise
            config = self._context.config
            runs_alone = config.sequence_batching is None and not config.is_decoupled and self._permit is None
            if runs_alone and isinstance(instance, MicrobatchInstance):
                self._microbatches = instance
            return instance
        except WeirError:
            raise
        except DeviceLost as loss:
            self._device_failed(loss)
            raise unavailable(str(loss)) from loss
        except BaseException as error:  # `finish_start` would otherwise wait for the instance forever
            logger.exception("%s: creating the instance failed", self._device.name)
            raise internal(f"{type(error).__name__}: {error}") from error

    def _warm_up(self, instance: Instance) -> None:
        if not self._warm_up_samples:
            return
        warm_up = WarmUp(self._warm_up_samples, self._device.name)
        runner = self._runner
        usual = runner.statistics, runner.streaming
        runner.statistics = ModelStatistics()
        runner.streaming = StreamingBatches(self._context, runner.statistics, warm_up.published.put, warm_up.failures)
        try:
            warm_up.run(instance, self._run_with_permit)
        finally:
            runner.statistics, runner.streaming = usual

    def _run_with_permit(self, instance: Instance, batch: Batch) -> BatchUpdate | None:
        if self._permit is None:
            return self._run_batch(instance, batch)
        self._permit.acquire()
        try:
            return self._run_batch(instance, batch)
        finally:
            self._permit.release(wants_more=not self._inbox.empty())

    def _leave_rate_limiter(self) -> None:
        if self._permit is not None:
            self._permit.leave()

    def _run_batch(self, instance: Instance, batch: Batch) -> BatchUpdate | None:
        """The end of the batch, or None if its responses are, or will be, published one by one."""
        started = self._start(instance, batch)
        return self._finish(instance, started) if isinstance(started, Batch) else started

    def _run_microbatch(self, instance: MicrobatchInstance, batches: Sequence[Batch]) -> None:
        microbatch = self._microbatch = Microbatch(self._runner.reader)
        left = dict.fromkeys(batches)
        try:
            for ended in self._runner.run_microbatch(instance, batches, microbatch):
                for batch, update in ended:
                    del left[batch]
                    self._leave(update, holds=True)
                self._updates.flush()
        except BaseException as error:  # noqa: BLE001 - logged and reported there
            for batch in [batch for batch in left if batch not in microbatch.withdrawn]:
                self._leave(self._failed(batch, error))
        self._microbatch = None

    def _start(self, instance: Instance, batch: Batch) -> Batch | BatchUpdate | None:
        """The batch, if it has started; else its end, or None if nothing is reported of it."""
        if self._device_lost is not None and self._device_lost.is_set():
            return None
        try:
            return self._runner.start(instance, batch) or batch
        except DeviceLost as loss:
            self._device_failed(loss)
            return None
        except BaseException as error:  # noqa: BLE001 - logged and reported there
            return self._failed(batch, error)

    def _finish(self, instance: Instance, batch: Batch) -> BatchUpdate | None:
        try:
            return self._runner.finish(instance, batch)
        except DeviceLost as loss:
            self._device_failed(loss)
            return None
        except BaseException as error:  # noqa: BLE001 - logged and reported there
            return self._failed(batch, error)

    @contained(on_error="_lost")
    def _failed(self, batch: Batch, error: BaseException) -> BatchUpdate:
        # The thread must survive every error: nothing would restart it.
        logger.exception("%s: a batch could not be run", self._device.name, exc_info=error)
        return self._runner.failed(batch, error)

    def _lost(self, _second: Exception, batch: Batch, _error: BaseException) -> BatchUpdate:
        return BatchUpdate(batch.message.scheduler, (BatchLost(batch.message.batch_id),))

    def _device_failed(self, loss: DeviceLost) -> None:
        """Reports an error that makes the device unusable for this process."""
        logger.error("%s: %s", self._device.name, loss)
        is_first = not self._environment.device_lost.is_set()
        self._environment.device_lost.set()
        if is_first:
            self._environment.on_device_lost(str(loss))

"""`ModelInstance`: the thread that runs one instance of a model, batch after batch.

The event loop hands it batches; it decodes them, runs the instance, encodes the answers (one message a gateway) and
hands them on to be published. Everything costly about a batch happens here, off the loop. While a device works on a batch,
the next one is begun if it is there already.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Container, Sequence
from typing import Any

from runtime.containment import contained
from schemas.errors import WeirError, internal, unavailable
from schemas.messages import BatchOutcome, Done
from worker.answer_packer import AnswerPacker
from worker.backend import DeviceLost, Instance, InstanceDevice, LoadedModel, ModelVersion
from worker.batch_execution import FinishedBatch, OpenBatches
from worker.batch_runner import BatchRunner, BegunBatch
from worker.client_memory import ClientMemory
from worker.execution_turns import ExecutionTurn
from worker.implicit_state import ImplicitStates
from worker.model_environment import ModelEnvironment
from worker.model_run import ModelRun
from worker.reshape import Reshaper
from worker.running_batch import RunningBatch
from worker.state_declarations import StateDeclarations
from worker.statistics import ModelStatistics
from worker.warmup import WarmUp, WarmUpSample

logger = logging.getLogger("weir.worker")

_STOP = object()


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
        config, reshaper = model.config, Reshaper(model.config)
        self.name = device.name
        self.key = device.key
        self.arena_name = arena_name
        self._loaded = loaded
        self._device = device
        self._version = model.version
        self._decoupled = config.is_decoupled
        self._reshaper = reshaper if reshaper.is_needed else None
        kept = ImplicitStates(states, environment.checkpoints) if states is not None and states.states else None
        self._environment = environment
        self._on_finished = environment.on_finished
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox_lock = threading.Lock()  # whoever puts something in, or looks through what is there
        self._packer = AnswerPacker(arena_name)
        self._client_memory = ClientMemory(environment.client_memory)
        model_run = ModelRun(device.name, self._reshaper, kept, is_stateful=config.sequence_batching is not None)
        batches = self._batches(statistics, environment.on_finished)
        self._runner = BatchRunner(
            device.name,
            model.version,
            config,
            self._packer,
            self._client_memory,
            model_run,
            kept,
            statistics,
            batches,
        )
        self._warm_up_samples = warm_up
        self._turn = turn
        # A turn is one batch's, and a sequence's next state comes of its last request's.
        self._may_overlap = turn is None and kept is None
        self._device_lost = environment.device_lost if device.kind == "KIND_GPU" else None
        self._waits_for_readers = False
        self._created: queue.SimpleQueue[WeirError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=device.name, daemon=True)

    def start(self) -> None:
        """Creates the instance in its thread, warms it up and waits for that. Raises WeirError when it can't be done."""
        self.begin_start()
        self.finish_start()

    def begin_start(self) -> None:
        """Begins what `finish_start` waits for."""
        self._thread.start()

    def finish_start(self) -> None:
        """Waits until the instance is there, and warm. Raises as `start`."""
        error = self._created.get()
        if error is not None:
            self._thread.join()
            raise error

    def submit(self, batch: RunningBatch) -> None:
        """Runs the batch after those submitted before."""
        with self._inbox_lock:
            self._inbox.put(batch)

    def withdraw(self, ids: Container[int]) -> list[RunningBatch]:
        """Takes batches of these ids back that it has not begun with."""
        withdrawn: list[RunningBatch] = []
        with self._inbox_lock:
            others: list[Any] = []
            while (batch := self._next(is_busy=True)) is not None:
                is_wanted = batch is not _STOP and batch.message.batch_id in ids
                (withdrawn if is_wanted else others).append(batch)
            for batch in others:
                self._inbox.put(batch)
        return withdrawn

    def release(self, segment: str, slot: int, generation: int) -> None:
        """A gateway has read an answer that lay in shared memory."""
        self._packer.give_back(segment, slot, generation)

    @property
    def slots_held(self) -> int:
        """Payload slots that hold answers which no gateway has given back yet."""
        return self._packer.slots_held

    def ask_to_stop(self, wait_for_readers: bool = False) -> None:
        """Begins what `stop` waits for."""
        self._waits_for_readers = wait_for_readers
        with self._inbox_lock:
            self._inbox.put(_STOP)

    def stop(self, wait_for_readers: bool = False) -> None:
        """Runs what was submitted to its last answer, closes the instance, and returns when its thread has ended.

        With `wait_for_readers` outputs in its memory stay for a moment until gateways have read them.
        """
        self.ask_to_stop(wait_for_readers)
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
            self._runner.open_batches.wait()
        finally:
            self._close(instance)
            self._packer.close(self._waits_for_readers)

    def _close(self, instance: Instance) -> None:
        try:
            instance.close()
        except BaseException:  # it goes all the same, and what is given up after it must be
            logger.exception("%s: closing the instance failed", self._device.name)

    def _take_batches(self, instance: Instance) -> None:
        under_way: BegunBatch | None = None
        batch: Any = None
        try:
            while batch is not _STOP:
                batch = self._next(under_way is not None)
                begun: BegunBatch | FinishedBatch | None = None
                if batch is not None and batch is not _STOP:
                    if not self._may_overlap:
                        self._tell(self._attempt_in_turn(instance, batch))
                        continue
                    begun = self._begin(instance, batch)
                # Answers leave in the order of the batches, however the later one ended.
                if under_way is not None:
                    self._tell(self._conclude(instance, under_way))
                    under_way = None
                if isinstance(begun, BegunBatch):
                    if begun.is_under_way:
                        under_way = begun
                        continue
                    begun = self._conclude(instance, begun)
                self._tell(begun)
        finally:
            self._leave_turns()

    def _next(self, is_busy: bool) -> Any:
        """What comes next; None when nothing has come yet while a device works on a batch."""
        try:
            return self._inbox.get(block=not is_busy)
        except queue.Empty:
            return None

    @contained(on_error="_telling_failed")
    def _tell(self, finished: FinishedBatch | None) -> None:
        if finished is not None:
            self._on_finished(finished)

    def _telling_failed(self, _error: Exception, finished: FinishedBatch | None) -> None:
        """Has a batch run again whose end could not be handed over: its scheduler would wait for it for ever."""
        if finished is not None and finished.done is not None:
            self._on_finished(_not_answered(finished.scheduler, finished.done.batch_id))

    def _created_instance(self) -> Instance:
        """The instance, warm. Raises WeirError when it can't be made, or its warm-up fails."""
        try:
            self._device.host_policy.bind()
            instance = self._loaded.create_instance(self._device)
            try:
                self._warm_up(instance)
            except BaseException:
                self._close(instance)
                raise
            return instance
        except WeirError:
            raise
        except DeviceLost as loss:
            self._lost(None, loss)
            raise unavailable(str(loss)) from loss
        except BaseException as error:  # whoever waits for the instance would otherwise do so for ever
            logger.exception("%s: creating the instance failed", self._device.name)
            raise internal(f"{type(error).__name__}: {error}") from error

    def _warm_up(self, instance: Instance) -> None:
        if not self._warm_up_samples:
            return
        warm_up = WarmUp(self._warm_up_samples, self._device.name)
        runner = self._runner
        counted = runner.statistics, runner.open_batches
        runner.statistics = ModelStatistics()
        runner.open_batches = self._batches(runner.statistics, warm_up.published.put, warm_up.failures)
        try:
            warm_up.run(instance, self._attempt_in_turn)
        finally:
            runner.statistics, runner.open_batches = counted

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
        begun = self._begin(instance, batch)
        return self._conclude(instance, begun) if isinstance(begun, BegunBatch) else begun

    def _begin(self, instance: Instance, batch: RunningBatch) -> BegunBatch | FinishedBatch | None:
        if self._device_lost is not None and self._device_lost.is_set():
            return _unanswered(batch)
        try:
            return self._runner.begin(instance, batch)
        except DeviceLost as loss:
            return self._lost(batch, loss)
        except BaseException as error:  # noqa: BLE001 - logged and told there
            return self._failed(batch, error)

    def _conclude(self, instance: Instance, begun: BegunBatch) -> FinishedBatch | None:
        try:
            return self._runner.conclude(instance, begun)
        except DeviceLost as loss:
            return self._lost(begun.running, loss)
        except BaseException as error:  # noqa: BLE001 - logged and told there
            return self._failed(begun.running, error)

    def _failed(self, batch: RunningBatch, error: BaseException) -> FinishedBatch:
        # Whatever went wrong, also in our own code: an instance whose thread has ended would never be noticed.
        logger.exception("%s: a batch could not be run", self._device.name, exc_info=error)
        return self._failure(batch, error)

    @contained(on_error="_failure_failed")
    def _failure(self, batch: RunningBatch, error: BaseException) -> FinishedBatch:
        return self._runner.failed(batch, error)

    def _failure_failed(self, _second: Exception, batch: RunningBatch, _error: BaseException) -> FinishedBatch:
        return _unanswered(batch)

    def _lost(self, batch: RunningBatch | None, loss: DeviceLost) -> FinishedBatch | None:
        """What becomes of the batch now that nothing can run on the device any more."""
        logger.error("%s: %s", self._device.name, loss)
        is_first = not self._environment.device_lost.is_set()
        self._environment.device_lost.set()
        unanswered = None if batch is None else _unanswered(batch)
        if not is_first or self._environment.on_device_lost is None:
            return unanswered
        self._environment.on_device_lost(str(loss), unanswered)
        return None


def _unanswered(batch: RunningBatch) -> FinishedBatch:
    return _not_answered(batch.message.scheduler, batch.message.batch_id)


def _not_answered(scheduler: str, batch_id: int) -> FinishedBatch:
    return FinishedBatch(scheduler, Done(batch_id, BatchOutcome.UNANSWERED, 0), [])

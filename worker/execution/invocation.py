"""`ModelInvoker`: has an instance run the requests of a batch, and turns whatever comes of it into outcomes.

When a batch fails as a whole, `IndividualRetry` runs each of its requests again on its own, so that a request that makes
its model fail is the only one that fails. (In Triton all requests of its batch fail.) A model that is broken must not cost
that much again and again: after `MAX_FAILED_BATCHES` batches without a single success, only `PROBES` requests of the next
one are tried.
"""

from __future__ import annotations

import logging
import random
import traceback
from collections.abc import Sequence

from weir.schemas.core.errors import WeirError, internal, unavailable
from weir.schemas.core.requests import InferRequest
from weir.worker.backend_api.interface import (
    DeviceLost,
    Execution,
    ExecutionHandle,
    Instance,
    InstanceDied,
    MicrobatchInstance,
    MicrobatchRun,
    Result,
)
from weir.worker.execution.sequences import ImplicitStates

logger = logging.getLogger("weir.worker")

MAX_FAILED_BATCHES = 3
"""Successive batches that may fail in each of their requests, until the model counts as broken."""

PROBES = 2
"""Requests of a batch, drawn at random, that are tried while the model counts as broken; if one succeeds, all are run."""


class ModelInvoker:
    """Runs the batches of one instance, called `name`; belongs to the instance's thread.

    `states` is None for a model that does not need them. With `is_stateful`, the requests of a failed batch are not run
    again: they may have changed the model's state.
    """

    def __init__(self, name: str, states: ImplicitStates | None = None, is_stateful: bool = False) -> None:
        self._name = name
        self._states = states
        self._retry = None if is_stateful else IndividualRetry(name)

    def start(
        self, instance: Instance, requests: Sequence[InferRequest], execution: Execution
    ) -> Sequence[Result | None] | ExecutionHandle:
        """The outcome of each request, None for one that is answered through `execution`; or a handle for `finish`.

        Raises InstanceDied only.
        """
        try:
            if self._states is None:
                results = instance.execute(requests, execution)
            else:
                results = self._execute_alike(self._states, instance, requests, execution)
        except InstanceDied:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a model raises fails its batch, and nothing else
            return self._handle_failure(instance, requests, execution, error)
        return results if isinstance(results, ExecutionHandle) else self._succeeded(requests, results)

    def start_microbatch(
        self, instance: MicrobatchInstance, requests: Sequence[InferRequest], execution: Execution
    ) -> MicrobatchRun | WeirError:
        """The run of the requests, or the error of all of them. Raises InstanceDied only."""
        try:
            return instance.start_microbatch(requests, execution)
        except InstanceDied:
            raise
        except BaseException as error:  # noqa: BLE001 - as above
            return self._failure(error)

    def finish(
        self, instance: Instance, handle: ExecutionHandle, requests: Sequence[InferRequest], execution: Execution
    ) -> Sequence[Result | None]:
        """Waits for the device and returns the outcomes, as `start` does. Raises InstanceDied only."""
        try:
            results = handle.results()
        except InstanceDied:
            raise
        except BaseException as error:  # noqa: BLE001 - as above
            return self._handle_failure(instance, requests, execution, error)
        return self._succeeded(requests, results)

    @staticmethod
    def _execute_alike(
        states: ImplicitStates, instance: Instance, requests: Sequence[InferRequest], execution: Execution
    ) -> Sequence[Result | None] | ExecutionHandle:
        """Runs the requests in groups whose states can be joined."""
        groups = states.alike(requests)
        if len(groups) < 2:
            return instance.execute(requests, execution)
        results: list[Result | None] = [None] * len(requests)
        for group in groups:
            outcomes = instance.execute([requests[position] for position in group], execution)
            if isinstance(outcomes, ExecutionHandle):
                outcomes = outcomes.results()
            for position, outcome in zip(group, outcomes, strict=True):
                results[position] = outcome
        return results

    def _succeeded(self, requests: Sequence[InferRequest], results: Sequence[Result | None]) -> Sequence[Result | None]:
        if self._retry is not None:
            self._retry.failed_batches = 0
        if len(results) != len(requests):
            return [Result(error=internal(f"expected {len(requests)} results, got {len(results)}"))] * len(requests)
        return results

    def _handle_failure(
        self, instance: Instance, requests: Sequence[InferRequest], execution: Execution, error: BaseException
    ) -> Sequence[Result | None]:
        failure = self._failure(error)
        if self._retry is None or len(requests) == 1:
            return [Result(error=failure)] * len(requests)
        return self._retry.run(instance, requests, execution, failure)

    def _failure(self, error: BaseException) -> WeirError:
        failure = failure_of(error)
        if failure is not error:
            text = "".join(traceback.format_exception(error))
            logger.warning("%s: execution failed\n%s", self._name, text)
        return failure


def failure_of(error: BaseException) -> WeirError:
    """The error of a request whose model has raised `error`."""
    return error if isinstance(error, WeirError) else internal(f"{type(error).__name__}: {error}")


class IndividualRetry:
    """Runs the requests of failed batches again, one at a time. One for each instance; belongs to its thread.

    `failed_batches` is the number of batches in a row that failed in each of their requests.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.failed_batches = 0

    def run(
        self, instance: Instance, requests: Sequence[InferRequest], execution: Execution, failure: WeirError
    ) -> list[Result | None]:
        """The outcomes of the requests of a batch that failed with `failure`, in the form of `Instance.execute`.

        A request that must not run again (it was cancelled, or a response was sent) ends with `failure`. Raises
        InstanceDied if the whole batch may run again on another instance.
        """
        results: list[Result | None] = [Result(error=failure) for _ in requests]
        order = [position for position in range(len(requests)) if execution.may_run_again(position)]
        is_broken = self.failed_batches >= MAX_FAILED_BATCHES
        if is_broken:
            random.shuffle(order)
        succeeded = run = 0
        for position in order:
            if is_broken and run == PROBES and not succeeded:
                break
            # It may have been cancelled while the requests before it ran.
            if not execution.may_run_again(position):
                continue
            run += 1
            outcome = results[position] = self._run_one(instance, requests[position], execution, position)
            succeeded += outcome is None or outcome.error is None or outcome.is_model_response
        if run:
            self.failed_batches = 0 if succeeded else self.failed_batches + 1
        logger.warning(
            "%s: a batch of %d failed (%s); of %d requests that were run again by themselves %d failed",
            *(self._name, len(requests), failure.message, run, run - succeeded),
        )
        return results

    def _run_one(self, instance: Instance, request: InferRequest, execution: Execution, position: int) -> Result | None:
        single = _SingleExecution(execution, position)
        try:
            results = instance.execute([request], single)
            if isinstance(results, ExecutionHandle):
                results = results.results()
            if len(results) != 1:
                raise internal(f"expected 1 results, got {len(results)}")
            return _with_own_memory(results[0])
        except DeviceLost:
            raise
        except InstanceDied as death:
            if not execution.has_responded:
                raise
            return Result(error=unavailable(str(death)))
        except BaseException as error:  # noqa: BLE001 - whatever a model raises fails its request, and nothing else
            return Result(error=failure_of(error))
        finally:
            execution.inferred()
            execution.has_run_alone(position, single)


class _SingleExecution(Execution):
    """The execution of one request of a batch: position 0 stands for the request's position in the batch."""

    __slots__ = ("_batch", "_position")

    def __init__(self, batch: Execution, position: int) -> None:
        super().__init__(batch.reader)
        self._batch = batch
        self._position = position
        self.output_regions = {
            (0, name): region for (at, name), region in batch.output_regions.items() if at == position
        }

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """Sends a response to the request."""
        self._batch.respond(self._position, result, is_final)

    def fail(self, error: WeirError) -> None:
        """Ends the request with an error."""
        self._batch.respond(self._position, Result(error=error), True)

    def is_cancelled(self, position: int) -> bool:
        """Whether the request was cancelled or is late."""
        return self._batch.is_cancelled(self._position)

    @property
    def has_responded(self) -> bool:
        """Whether any request of the batch has a response: then the batch can't run again."""
        return self._batch.has_responded


def _with_own_memory(result: Result | None) -> Result | None:
    """The result with copies of outputs that the instance's next run would overwrite."""
    for tensor in () if result is None else result.outputs:
        if isinstance(tensor.data, memoryview):
            tensor.data = bytes(tensor.data)
    return result

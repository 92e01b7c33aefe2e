"""`ModelRun`: has an instance run the requests of a batch, and makes outcomes of whatever comes of it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

from runtime.containment import contained
from schemas.errors import internal
from schemas.requests import InferRequest
from worker.backend import Execution, Instance, InstanceDied, Pending, Result
from worker.implicit_state import ImplicitStates
from worker.one_by_one import OneByOne, failure_of
from worker.reshape import Reshaper

logger = logging.getLogger("weir.worker")


class ModelRun:
    """See the module. For the instance `name`; `reshaper` and `states` are None where its model has no need of them.

    With `is_stateful` a request may have left its mark on the model although its batch failed: then none is run again.
    """

    def __init__(
        self, name: str, reshaper: Reshaper | None, states: ImplicitStates | None, is_stateful: bool = False
    ) -> None:
        self._name = name
        self._reshaper = reshaper
        self._states = states
        self._one_by_one = None if is_stateful else OneByOne(name)

    def begin(
        self, instance: Instance, requests: Sequence[InferRequest], execution: Execution
    ) -> Sequence[Result | None] | Pending:
        """An outcome for each, None for those that are answered through `execution`; or what `outcomes` makes them of.

        Raises InstanceDied alone.
        """
        if self._reshaper is not None:
            for request in requests:
                self._reshaper.to_model(request)
        try:
            results = self._run(instance, requests, execution)
        except InstanceDied:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a model raises fails its batch, and nothing else
            return self._settled(requests, self._failed(instance, requests, execution, error))
        return results if isinstance(results, Pending) else self._succeeded(requests, results)

    def outcomes(
        self, instance: Instance, pending: Pending, requests: Sequence[InferRequest], execution: Execution
    ) -> Sequence[Result | None]:
        """As `begin`, of what a device was working on: waits for it."""
        try:
            results = pending.results()
        except InstanceDied:
            raise
        except BaseException as error:  # noqa: BLE001 - as above
            return self._settled(requests, self._failed(instance, requests, execution, error))
        return self._succeeded(requests, results)

    def _run(
        self, instance: Instance, requests: Sequence[InferRequest], execution: Execution
    ) -> Sequence[Result | None] | Pending:
        groups = self._states.alike(requests) if self._states is not None else ()
        if len(groups) < 2:
            return instance.execute(requests, execution)
        results: list[Result | None] = [None] * len(requests)
        for group in groups:
            outcomes = instance.execute([requests[position] for position in group], execution)
            if isinstance(outcomes, Pending):
                outcomes = outcomes.results()
            for position, outcome in zip(group, outcomes, strict=True):
                results[position] = outcome
        return results

    def _succeeded(self, requests: Sequence[InferRequest], results: Sequence[Result | None]) -> Sequence[Result | None]:
        if self._one_by_one is not None and self._one_by_one.is_doubtful:
            self._one_by_one.succeeded()
        return self._settled(requests, results)

    def _failed(
        self, instance: Instance, requests: Sequence[InferRequest], execution: Execution, error: BaseException
    ) -> Sequence[Result | None]:
        failure = failure_of(error)
        if failure is not error:
            told = "".join(traceback.format_exception(error))
            logger.warning("%s: execution failed\n%s", self._name, told)
        if self._one_by_one is None or len(requests) == 1:
            return [Result(error=failure)] * len(requests)
        return self._one_by_one.run(instance, requests, execution, failure)

    def _settled(self, requests: Sequence[InferRequest], results: Sequence[Result | None]) -> Sequence[Result | None]:
        if len(results) != len(requests):
            return [Result(error=internal(f"expected {len(requests)} results, got {len(results)}"))] * len(requests)
        if self._reshaper is not None:
            for result in results:
                if result is not None:
                    self._reshape(self._reshaper, result)
        return results

    @contained(on_error="_reshaping_failed")
    def _reshape(self, reshaper: Reshaper, result: Result) -> None:
        reshaper.to_client(result)

    def _reshaping_failed(self, error: Exception, _reshaper: Reshaper, result: Result) -> None:
        result.error = internal(f"an output can't be reshaped: {type(error).__name__}: {error}")

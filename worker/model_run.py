"""`ModelRun`: has an instance run the requests of a batch, and makes outcomes of whatever comes of it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

from schemas.errors import WeirError, internal
from schemas.requests import InferRequest
from worker.backend import Execution, Instance, InstanceDied, Pending, Result
from worker.implicit_state import ImplicitStates
from worker.reshape import Reshaper

logger = logging.getLogger("weir.worker")


class ModelRun:
    """See the module. For the instance `name`; `reshaper` and `states` are None where its model has no need of them."""

    def __init__(self, name: str, reshaper: Reshaper | None, states: ImplicitStates | None) -> None:
        self._name = name
        self._reshaper = reshaper
        self._states = states

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
        except Exception as error:  # noqa: BLE001 - whatever a model raises fails its batch, and nothing else
            return self._failed(requests, error)
        return results if isinstance(results, Pending) else self._settled(requests, results)

    def outcomes(self, pending: Pending, requests: Sequence[InferRequest]) -> Sequence[Result | None]:
        """As `begin`, of what a device was working on: waits for it."""
        try:
            return self._settled(requests, pending.results())
        except InstanceDied:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            return self._failed(requests, error)

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

    def _settled(self, requests: Sequence[InferRequest], results: Sequence[Result | None]) -> Sequence[Result | None]:
        if len(results) != len(requests):
            return [Result(error=internal(f"expected {len(requests)} results, got {len(results)}"))] * len(requests)
        if self._reshaper is not None:
            for result in results:
                if result is not None:
                    self._reshaper.to_client(result)
        return results

    def _failed(self, requests: Sequence[InferRequest], error: Exception) -> list[Result]:
        if not isinstance(error, WeirError):
            told = "".join(traceback.format_exception(error))
            logger.warning("%s: execution failed\n%s", self._name, told)
            error = internal(f"{type(error).__name__}: {error}")
        return [Result(error=error)] * len(requests)

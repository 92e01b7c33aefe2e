"""`ModelRun`: has an instance run the requests of a batch, and makes outcomes of whatever comes of it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

from schemas.errors import WeirError, internal
from schemas.requests import InferRequest
from worker.backend import Execution, Instance, InstanceDied, Result
from worker.implicit_state import ImplicitStates
from worker.reshape import Reshaper

logger = logging.getLogger("weir.worker")


class ModelRun:
    """See the module. For the instance `name`; `reshaper` and `states` are None where its model has no need of them."""

    def __init__(self, name: str, reshaper: Reshaper | None, states: ImplicitStates | None) -> None:
        self._name = name
        self._reshaper = reshaper
        self._states = states

    def outcomes(
        self, instance: Instance, requests: Sequence[InferRequest], execution: Execution
    ) -> Sequence[Result | None]:
        """One for each request, None for those that are answered through `execution`. Raises InstanceDied alone."""
        if self._reshaper is not None:
            for request in requests:
                self._reshaper.to_model(request)
        try:
            results = self._run(instance, requests, execution)
        except InstanceDied:
            raise
        except WeirError as error:
            return [Result(error=error)] * len(requests)
        except Exception as error:  # noqa: BLE001 - whatever a model raises fails its batch, and nothing else
            logger.warning("%s: execution failed\n%s", self._name, traceback.format_exc())
            return [Result(error=internal(f"{type(error).__name__}: {error}"))] * len(requests)
        if len(results) != len(requests):
            return [Result(error=internal(f"expected {len(requests)} results, got {len(results)}"))] * len(requests)
        if self._reshaper is not None:
            for result in results:
                if result is not None:
                    self._reshaper.to_client(result)
        return results

    def _run(
        self, instance: Instance, requests: Sequence[InferRequest], execution: Execution
    ) -> Sequence[Result | None]:
        groups = self._states.alike(requests) if self._states is not None else ()
        if len(groups) < 2:
            return instance.execute(requests, execution)
        results: list[Result | None] = [None] * len(requests)
        for group in groups:
            outcomes = instance.execute([requests[position] for position in group], execution)
            for position, outcome in zip(group, outcomes, strict=True):
                results[position] = outcome
        return results

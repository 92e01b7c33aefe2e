"""`OneByOne`: what an instance does when a batch fails whole: its requests are run again, each alone.

So a request that makes its model fail is the only one that fails. (In Triton all of its batch do.) Where nothing can be
mended, for the model is broken, that must not be paid for again and again: after a few batches of which not one request
could be run, only a few requests of the next one are tried.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

from schemas.errors import WeirError, internal, unavailable
from schemas.requests import InferRequest
from worker.backend import DeviceLost, Execution, Instance, InstanceDied, Pending, Result

logger = logging.getLogger("weir.worker")

MAX_IN_VAIN = 3
"""Batches in a row that fail in each of their requests, after which the model counts as broken."""

PROBES = 2
"""Requests of a batch that are tried while the model counts as broken, drawn at random; once one works, all are."""


def failure_of(error: BaseException) -> WeirError:
    """What a request is answered with whose model has raised `error`."""
    return error if isinstance(error, WeirError) else internal(f"{type(error).__name__}: {error}")


class OneByOne:
    """See the module. One for each instance, called `name`; all of it belongs to the instance's thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._in_vain = 0

    @property
    def is_doubtful(self) -> bool:
        """Whether the last batch that failed did so in each of its requests."""
        return self._in_vain > 0

    def succeeded(self) -> None:
        """The instance has run a batch: its model works."""
        self._in_vain = 0

    def run(
        self, instance: Instance, requests: Sequence[InferRequest], execution: Execution, failure: WeirError
    ) -> list[Result | None]:
        """The outcomes of requests whose batch has failed with `failure`, as `Instance.execute` gives them.

        What may not run again ends with that error: it was given up, or somebody may have seen responses. Raises
        InstanceDied where all may be done again elsewhere.
        """
        results: list[Result | None] = [Result(error=failure) for _ in requests]
        order = [position for position in range(len(requests)) if execution.may_run_again(position)]
        is_doubted = self._in_vain >= MAX_IN_VAIN
        if is_doubted:
            random.shuffle(order)
        succeeded = run = 0
        for position in order:
            if is_doubted and run == PROBES and not succeeded:
                break
            # Those before it took their time: its caller may have gone meanwhile.
            if not execution.may_run_again(position):
                continue
            run += 1
            outcome = results[position] = self._alone(instance, requests[position], execution, position)
            succeeded += outcome is None or outcome.error is None or outcome.is_model_response
        if run:
            self._in_vain = 0 if succeeded else self._in_vain + 1
        told = (
            f"a batch of {len(requests)} failed; of {run} requests that were run again alone {run - succeeded} failed"
        )
        logger.warning("%s: %s: %s", self._name, told, failure.message)
        return results

    def _alone(self, instance: Instance, request: InferRequest, execution: Execution, position: int) -> Result | None:
        alone = _Alone(execution, position)
        try:
            results = instance.execute([request], alone)
            if isinstance(results, Pending):
                results = results.results()
            if len(results) != 1:
                raise internal(f"expected 1 results, got {len(results)}")
            return _owned(results[0])
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
            execution.has_run_alone(position, alone)


class _Alone(Execution):
    """The run of one request of a batch: what its model says at position 0 is said of that request."""

    __slots__ = ("_batch", "_position")

    def __init__(self, batch: Execution, position: int) -> None:
        super().__init__(batch.reader)
        self._batch = batch
        self._position = position

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """See `Execution`."""
        self._batch.respond(self._position, result, is_final)

    def fail(self, error: WeirError) -> None:
        """See `Execution`."""
        self._batch.respond(self._position, Result(error=error), True)

    def is_cancelled(self, position: int) -> bool:
        """See `Execution`."""
        return self._batch.is_cancelled(self._position)

    @property
    def has_responded(self) -> bool:
        """See `Execution`; also of the other requests of the batch, for it is the batch that can't be done again then."""
        return self._batch.has_responded


def _owned(result: Result | None) -> Result | None:
    """The result with outputs that outlast the instance's next run."""
    for tensor in () if result is None else result.outputs:
        if isinstance(tensor.data, memoryview):
            tensor.data = bytes(tensor.data)
    return result

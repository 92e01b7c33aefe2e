"""`GuardedStrategy`: a model's own say in what makes a batch, by a Python file that belongs to the model.

The file, `batchstrategy.py`, has a class `BatchStrategy`:

    class BatchStrategy:
        def __init__(self, config):              # the model's configuration, as a dictionary; once a load
            ...
        def begin(self):                         # a new batch is being formed; returns what is kept about it
            return {"bytes": 0}
        def include(self, request, batch):       # may this request join? asked of the first one too, which always may
            batch["bytes"] += request.size_bytes
            return batch["bytes"] <= 100_000

Source: Triton's custom batching (`TRITONBACKEND_ModelBatcherInitialize`, `ModelBatchInitialize` and
`ModelBatchIncludeRequest`; what the two finalizers do is done by Python). It can only end a batch sooner: the largest size,
the shapes and the delay hold as without it. It runs in the scheduler's event loop, which waits for it.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from scheduler.queued_request import QueuedRequest

logger = logging.getLogger("weir.scheduler")


class RequestFacts(NamedTuple):
    """What a strategy is told of a request; its tensors are not here.

    `batch_size` is that of the request, `size_bytes` that of its message (large tensors lie elsewhere), `priority` as it
    came, `correlation_id` 0 without a sequence, `deadline_ms` unix time or 0.
    """

    batch_size: int
    size_bytes: int
    priority: int
    timeout_us: int
    deadline_ms: int
    correlation_id: int | str


class GuardedStrategy:
    """A strategy that does no harm: one that raises is told of in the log, and not asked again.

    `strategy` is an object of the model's class `BatchStrategy`, `name` how the log calls it.
    """

    __slots__ = ("_batch", "_is_on", "_name", "_strategy")

    def __init__(self, strategy: Any, name: str) -> None:
        self._strategy = strategy
        self._name = name
        self._is_on = True
        self._batch: Any = None

    def another(self) -> GuardedStrategy:
        """The same strategy, for batches of another queue of its version."""
        return GuardedStrategy(self._strategy, self._name)

    def begin(self, first: QueuedRequest) -> None:
        """A batch begins with this request."""
        if self._is_on:
            try:
                self._batch = self._strategy.begin()
                self._strategy.include(_facts(first), self._batch)
            except (Exception, SystemExit):  # noqa: BLE001 - a model's own code, which may raise anything
                self._give_up()

    def includes(self, request: QueuedRequest) -> bool:
        """Whether this request may join the batch that was begun last."""
        if self._is_on:
            try:
                return bool(self._strategy.include(_facts(request), self._batch))
            except (Exception, SystemExit):  # noqa: BLE001 - see `begin`
                self._give_up()
        return True

    def _give_up(self) -> None:
        self._is_on = False
        logger.exception("%s failed: batches are formed without it from now on", self._name)


def _facts(request: QueuedRequest) -> RequestFacts:
    terms = request.terms
    return RequestFacts(
        request.batch_size,
        len(request.body),
        terms.priority,
        terms.timeout_us,
        terms.deadline_ms,
        terms.correlation_id,
    )

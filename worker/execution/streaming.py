"""`StreamingBatches`: the batches of an instance with open requests; `InstanceContext`: what all its batches share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from weir.schemas.config.model_config import ModelConfig
from weir.worker.execution.batch_tensors import Reshaper
from weir.worker.execution.response_writer import ResponseWriter
from weir.worker.execution.sequences import ImplicitStates
from weir.worker.execution.shared_memory import SharedMemoryIO
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.updates import BatchUpdate

MAX_RESCHEDULED = 10_000
"""Rescheduled requests of an instance whose number of responses is remembered. The oldest are forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceContext:
    """What all batches of one instance share. `reshaper` and `states` are None for a model that does not need them."""

    name: str
    version: int
    config: ModelConfig
    writer: ResponseWriter
    shared_memory: SharedMemoryIO
    reshaper: Reshaper | None = None
    states: ImplicitStates | None = None


class StreamingBatches:
    """The batches that have left their instance while requests of theirs are open; and how their responses are sent.

    `publish` gets the updates, in any thread. `failures` gets the text of each error that a model sends itself, if given.
    """

    def __init__(
        self,
        context: InstanceContext,
        statistics: ModelStatistics,
        publish: Callable[[BatchUpdate], None],
        failures: list[str] | None = None,
    ) -> None:
        self.version = context.version
        self.is_decoupled = context.config.is_decoupled
        self.writer = context.writer
        self.statistics = statistics
        self.publish = publish
        self.failures = failures
        # Rescheduled sequences by run, with the number of their responses: the next batch continues the numbering.
        self._rescheduled: dict[str, int] = {}
        self._changed = threading.Condition()
        self._open: set[object] = set()

    def add(self, batch: object) -> None:
        """Adds a batch that has left its instance."""
        with self._changed:
            self._open.add(batch)

    def remove(self, batch: object) -> None:
        """Removes a batch that has ended, if it was added."""
        with self._changed:
            self._open.discard(batch)
            self._changed.notify_all()

    def reschedule(self, run: str, responses: int) -> None:
        """Remembers the number of responses of a rescheduled request."""
        self._rescheduled[run] = responses
        if len(self._rescheduled) > MAX_RESCHEDULED:
            del self._rescheduled[next(iter(self._rescheduled))]

    def resume(self, run: str) -> int:
        """The number of responses that the request of this run had when it was rescheduled."""
        return self._rescheduled.pop(run, 0)

    def wait(self) -> None:
        """Returns when all batches have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open)

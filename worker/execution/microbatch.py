"""`Microbatch`: batches of one request each on their way through the process of an instance, which gets one message.

A message to the process and back for each request would cost more than a fast model takes. Each batch ends by itself, as
soon as its request has.
"""

from __future__ import annotations

from collections.abc import Sequence

from weir.bus.payloads.arena import PayloadReader
from weir.schemas.core.errors import WeirError
from weir.worker.backend_api.interface import Execution, MicrobatchRun, Result
from weir.worker.execution.batch import Batch

MAX_TOGETHER = 32
"""Batches that go to the process of an instance in one message."""

MAX_TOGETHER_BYTES = 4 << 20
"""Bodies of these batches together."""


class Microbatch(Execution):
    """The execution of the requests of all its `batches`: each position stands for the request of one. Thread-safe.

    `batches` and `run` are set once the requests have started to run.
    """

    __slots__ = ("batches", "run")

    def __init__(self, reader: PayloadReader) -> None:
        super().__init__(reader)
        self.batches: Sequence[Batch] = ()
        self.run: MicrobatchRun | None = None

    @property
    def unstarted(self) -> int:
        """How many batches have not started."""
        return 0 if self.run is None else self.run.unstarted

    def withdraw(self) -> list[Batch]:
        """Takes back the batches that have not started: whoever calls this completes them."""
        return [] if self.run is None else [self.batches[position] for position in self.run.withdraw()]

    @property
    def withdrawn(self) -> list[Batch]:
        """The batches that were taken back."""
        return [] if self.run is None else [self.batches[position] for position in self.run.withdrawn]

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """Publishes a response that the model sends itself."""
        self.batches[position].respond(0, result, is_final)

    def fail(self, error: WeirError) -> None:
        """Ends the requests without a final response whose responses the model sends itself."""
        for batch in self.batches:
            batch.fail_open(error)

    def is_cancelled(self, position: int) -> bool:
        """Whether the request was cancelled or its deadline has passed."""
        return self.batches[position].is_cancelled(0)

"""`Microbatch`: batches of one request each on their way through the process of an instance, which gets one message.

A message to the process and back for each request would cost more than a fast model takes. Each batch ends by itself, as
soon as its request has. `Pace` tells how fast an instance is: only batches of a fast one go together, or run in the
event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from weir.bus.naming.identity import SEGMENT_PREFIX
from weir.bus.payloads.arena import PayloadReader
from weir.schemas.core.errors import WeirError
from weir.schemas.wire.request_body import is_body_ref
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
        """Takes back the batches that have not started: the caller completes them."""
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


_SEGMENT = SEGMENT_PREFIX.encode()  # in a body, the beginning of a reference to shared memory
UNBOUNDED = 1 << 62

FAST_US = 1000
"""A batch that takes no longer does not delay the event loop noticeably. This is time on the clock: on a busy machine a
small batch takes several times as long as alone."""

FAST_BATCHES = 64
"""The number of fast batches in a row after which the event loop runs the next one."""


class Pace:
    """Whether batches of an instance are so short that the next may run in the event loop. For one thread at a time."""

    __slots__ = ("_fast", "_fast_bytes")

    def __init__(self) -> None:
        self._fast = 0  # fast batches since the last slow one
        self._fast_bytes = 0  # the largest of them

    def note(self, size_bytes: int, busy_us: int) -> None:
        """Notes how long a batch with bodies of this size has taken, unless content lies in shared memory."""
        if size_bytes >= UNBOUNDED:
            return
        if busy_us > FAST_US:
            self._fast = self._fast_bytes = 0
            return
        self._fast += 1
        self._fast_bytes = max(self._fast_bytes, size_bytes)

    def is_fast(self, size_bytes: int) -> bool:
        """Whether a batch with bodies of this size is expected to be fast: enough in a row were, one of them as large."""
        return self._fast >= FAST_BATCHES and size_bytes <= self._fast_bytes


def measured_bytes(batch: Batch) -> int:
    """The size of the bodies of a batch; beyond all bounds where content lies in shared memory."""
    size_bytes = 0
    for entry in batch.message.entries:
        body = entry.body
        if is_body_ref(body) or _SEGMENT in body:
            return UNBOUNDED
        size_bytes += len(body)
    return size_bytes

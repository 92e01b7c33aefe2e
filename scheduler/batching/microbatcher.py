"""`Microbatcher`: requests run one by one, as with Triton's default scheduler, but waiting requests travel together.

Sending a batch (a message each way, wake-ups of the worker's loop and of the instance's thread, a turn of the
scheduler) costs many times what a fast model takes. So waiting requests go to an instance as a *microbatch*: one
message, one completion, and one execution for each request. No request may lose by it: nothing waits for a microbatch
to form, a microbatch takes no request that another instance could start with, and only models whose requests are
known to be fast use it.
"""

from __future__ import annotations

from weir.scheduler.batching.batcher import DefaultBatcher
from weir.scheduler.batching.dynamic_batcher import MAX_BATCH_BYTES
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.batching.request_queue import DEFAULT_MAX_QUEUE_SIZE
from weir.scheduler.batching.run_time import RunTimeEstimate
from weir.schemas.config.model_config import ModelConfig

MAX_MICROBATCH_REQUESTS = 32
"""Requests of one microbatch; this limits how many a worker that dies may have started."""

MAX_MICROBATCH_US = 2_000
"""The expected time of all executions of a microbatch: the first response waits for the last execution."""

SLOW_US = 50_000
"""A batch that takes this long shows that the model's requests differ; a fast one must not wait behind a slow one."""

SINGLE_BATCHES_AFTER_SLOW = 20
"""This many batches after a slow one hold one request each."""


def forms_microbatches(config: ModelConfig) -> bool:
    """Whether a model's requests may form microbatches: each is one execution and has exactly one response."""
    is_default = config.dynamic_batching is None and config.sequence_batching is None
    takes_turns = any(group.rate_limiter is not None for group in config.instance_group)
    return is_default and not (config.is_ensemble or config.is_decoupled or takes_turns)


class Microbatcher(DefaultBatcher):
    """A `DefaultBatcher` that can extend its next batch: `next_batch` returns one request, `more` those to send with it."""

    def __init__(self, max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE) -> None:
        super().__init__(max_queue_size)
        self._run_time = RunTimeEstimate()
        self._singles_left = 0

    def record_run(self, requests: int, busy_us: int) -> None:
        """Updates the estimated time of a request: `requests` requests kept their instance busy for `busy_us`."""
        self._run_time.record(requests, busy_us)
        if busy_us >= SLOW_US:
            self.suspend()
        elif self._singles_left:
            self._singles_left -= 1

    def suspend(self) -> None:
        """Sends single requests for a while: a request of a microbatch was slow or called other models."""
        self._singles_left = SINGLE_BATCHES_AFTER_SLOW

    @property
    def longest(self) -> int:
        """How many requests may go together."""
        us_each = self._run_time.us_each
        if self._singles_left or not us_each:
            return 1
        return min(MAX_MICROBATCH_REQUESTS, int(MAX_MICROBATCH_US / us_each))

    def more(self, first: QueuedRequest, free_places: int) -> list[QueuedRequest]:
        """Takes out the requests to send with `first`, given the number of batches that could be sent now, this one
        included.
        """
        taken: list[QueuedRequest] = []
        if first.attempts:
            return taken
        most = min(self.longest, -(-(len(self) + 1) // free_places)) - 1
        queue, size_bytes = self._queue, len(first.body)
        while queue and len(taken) < most:
            request = queue.popleft()
            if request.cancelled:
                self._cancelled -= 1
                continue
            size_bytes += len(request.body)
            # A request that was lost before may be what kills workers: it runs alone.
            if request.attempts or size_bytes > MAX_BATCH_BYTES:
                queue.extendleft((request,))
                break
            taken.append(request)
        if taken and queue is self._ordered:
            self._ordered.leave(taken)
        return taken

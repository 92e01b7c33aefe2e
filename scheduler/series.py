"""`SeriesBatcher`: each request runs alone, as with Triton's default scheduler, but those that wait travel together.

What a batch costs on its way (a message each way, wake-ups of a worker's loop and its instance's thread, a turn of this
scheduler) is many times what a quick model takes. So waiting requests go to an instance as a *series*: one message, one
end, and in between an execution for each. That must cost nobody anything, so nothing ever waits for a series to form, a
series takes nothing that another instance could begin with, and only models whose requests are known to be quick have any.
"""

from __future__ import annotations

from scheduler.batcher import DefaultBatcher
from scheduler.dynamic_batcher import MAX_BATCH_BYTES
from scheduler.queue_rules import DEFAULT_MAX_QUEUE_SIZE
from scheduler.queued_request import QueuedRequest
from schemas.model_config import ModelConfig

MAX_SERIES_REQUESTS = 16
"""Requests of one series; a worker that dies has begun with so many at most."""

MAX_SERIES_US = 2_000
"""How long all executions of a series take together, as far as can be told: the first answer waits for the last."""

SLOW_US = 50_000
"""A batch that took so long tells of a model whose requests are not all alike: a quick one must not wait for such a one."""

DOUBTED_BATCHES = 20
"""So many batches after one that was slow are of one request each."""

# Where the machine is short of processors, most executions take far longer than their model needs; and then it matters most
# that little else is done for each. So the estimate follows the quick ones, and the others only step by step.
_FALL, _RISE = 0.2, 0.1


def forms_series(config: ModelConfig) -> bool:
    """Whether requests to such a model may go as series: each is an execution of its own, and ends with one answer."""
    is_default = config.dynamic_batching is None and config.sequence_batching is None
    takes_turns = any(group.rate_limiter is not None for group in config.instance_group)
    return is_default and not (config.is_ensemble or config.is_decoupled or takes_turns)


class SeriesBatcher(DefaultBatcher):
    """See the module, and `scheduler.batcher.Batcher`. `next_batch` gives one request, `more` those that go with it."""

    def __init__(self, max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE) -> None:
        super().__init__(max_queue_size)
        self._us_each = 0.0
        self._doubted = 0

    def has_run(self, requests: int, busy_us: int) -> None:
        """So many requests together kept their instance busy for so long."""
        each_us, known = busy_us / requests, self._us_each
        if not known or each_us < known:
            self._us_each = known + _FALL * (each_us - known) if known else each_us
        else:
            self._us_each = known + _RISE * min(each_us - known, known)
        if busy_us >= SLOW_US:
            self.doubt()
        elif self._doubted:
            self._doubted -= 1

    def doubt(self) -> None:
        """Requests of a series came back, for one before them takes its time or asks other models."""
        self._doubted = DOUBTED_BATCHES

    @property
    def longest(self) -> int:
        """So many requests may go together."""
        if self._doubted or not self._us_each:
            return 1
        return min(MAX_SERIES_REQUESTS, int(MAX_SERIES_US / self._us_each))

    def more(self, first: QueuedRequest, free_places: int) -> list[QueuedRequest]:
        """What goes with `first`, which has just been taken out, while so many batches could be sent, its own included."""
        taken: list[QueuedRequest] = []
        if first.attempts:
            return taken
        most = min(self.longest, -(-(len(self) + 1) // free_places)) - 1
        queue, size_bytes = self._queue, len(first.body)
        while queue and len(taken) < most:
            request = queue.popleft()
            if request.cancelled:
                self._gone -= 1
                continue
            size_bytes += len(request.body)
            # What was lost before may be what kills workers: it runs alone.
            if request.attempts or size_bytes > MAX_BATCH_BYTES:
                queue.extendleft((request,))
                break
            taken.append(request)
        if taken and queue is self._ordered:
            self._ordered.leave(taken)
        return taken

"""`VersionQueue`: the requests of one model version without state between them, from their arrival to the response.

`Dispatch`, its other half, sends batches. This one has what comes before and after: admission, the ends of batches, losses
and what is repeated, changes of the configuration and of the instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from weir.scheduler.batching.admission import Admissions
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.custom_strategy import GuardedStrategy
from weir.scheduler.batching.dispatch import LIVE, Dispatch
from weir.scheduler.batching.dynamic_former import former_for
from weir.scheduler.batching.former import Former
from weir.scheduler.batching.lane_budget import BatchRun
from weir.scheduler.batching.outcome import NOTHING_ENDED, TIMEOUT_EXPIRED, Ended, Failure
from weir.scheduler.batching.request import NO_TERMS, QueuedRequest, total_rows
from weir.scheduler.batching.request_queue import Queue
from weir.scheduler.batching.retry import stream_lost
from weir.scheduler.placement.instances import Instance
from weir.scheduler.placement.window import SLOTS, SLOW_US
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import QUEUE_FULL, Reason, overloaded
from weir.schemas.core.requests import SEQUENCE_START
from weir.schemas.wire.batches import (
    BatchCompletion,
    BatchEnded,
    BatchNotRun,
    BatchRefused,
    BatchReleased,
    NotRunReason,
)
from weir.schemas.wire.calls import ANYBODY

MAX_DIRECT_US = 2_000
"""The longest batch of a model whose requests a worker may start without the scheduler: a batch may wait behind one."""


class VersionQueue(Dispatch):
    """One version of a model; `former` is the rule of its batches."""

    _admissions: Admissions | None = None

    def use_config(self, config: ModelConfig, strategy: GuardedStrategy | None = None) -> None:
        """Forms batches by the rules of `config` from now on."""
        self.use(former_for(config, strategy))

    def use(self, former: Former) -> None:
        """Forms batches by this rule from now on."""
        waiting = self.drain()
        self.former = former
        self.lanes = [Queue(former.rules) for _ in self.lanes]
        self.put_back(waiting)
        if self._budget is not None:
            self._budget.forget_cost()

    def limit_wait(self, max_wait_us: int) -> None:
        """Rejects live requests on arrival that would wait longer (0: none)."""
        if max_wait_us != (0 if self._admissions is None else self._admissions.max_wait_us):
            self._admissions = Admissions(max_wait_us) if max_wait_us else None

    # What waits and runs

    @property
    def waiting(self) -> int:
        """Requests in the queues of all lanes."""
        return sum(map(len, self.lanes))

    def waiting_in(self, lane: int) -> int:
        """Returns the number of requests in the queue of one lane."""
        return len(self.lanes[lane]) if lane < len(self.lanes) else 0

    # Requests come and leave

    def enqueue(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Adds requests to the queues of their lanes; returns those that are rejected, of other owners too."""
        failures: list[Failure] = []
        if self._admissions is not None:
            requests, failures = self._admitted(requests, self._admissions)
            if not requests:
                return failures
        by_lane, is_plain = [(LIVE, requests)], True
        for request in requests:
            if request.terms is not NO_TERMS or request.caller is not ANYBODY:
                is_plain = False
                if request.terms.lane:
                    by_lane = self._by_lane(requests)
                    break
        for lane, of_lane in by_lane:
            if lane == LIVE:
                self._live_us = of_lane[0].enqueued_us
                if self._budget is not None:
                    self._budget.record_live(self._live_us, len(of_lane), self.busy_instances, self.instances.idle)
            full = self.lanes[lane].enqueue(of_lane, is_plain)
            if full:
                failures += self._rejections(full, "queue")
        return failures

    def _rejections(self, requests: list[QueuedRequest], reason: str, backoff_us: int = 0) -> list[Failure]:
        self.refused[reason] += len(requests)
        error = overloaded(QUEUE_FULL, self.expected_wait_us(), backoff_us)
        return [Failure(request, error) for request in requests]

    def _admitted(
        self, requests: list[QueuedRequest], admissions: Admissions
    ) -> tuple[list[QueuedRequest], list[Failure]]:
        """Returns the requests that are admitted, and the live ones, the last of their owners, that would wait too long."""
        live: dict[str, list[QueuedRequest]] = {}
        for request in requests:
            if request.lane == LIVE and not self._continues(request):
                live.setdefault(request.caller.owner, []).append(request)
        failures: list[Failure] = []
        refused: dict[QueuedRequest, None] = {}
        for owner, arriving in live.items():
            waiting, times = self.lanes[LIVE].wait_of(arriving[0].caller)
            us_each = self.cost.update() * times
            admission = admissions.of(owner)
            beyond = arriving[admission.admitted(len(arriving), waiting, us_each, self.instance_count) :]
            if beyond:
                refused.update(dict.fromkeys(beyond))
                backoff_us = admission.backoff_us(waiting, self.cost.us_per_request * times, len(self.instances))
                failures += self._rejections(beyond, "wait", backoff_us)
        return [request for request in requests if request not in refused] if refused else requests, failures

    def _continues(self, request: QueuedRequest) -> bool:
        """Whether earlier requests of a sequence may have been seen by an ensemble's steps."""
        is_in_sequence = request.correlation_id and not request.sequence_flags & SEQUENCE_START
        return bool(self.former.has_steps and is_in_sequence)

    def put_back(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Adds requests that waited elsewhere, at the positions they would have if they had waited here."""
        for lane, of_lane in self._by_lane(requests):
            self.lanes[lane].put_back(of_lane)
        return []

    def drain(self) -> list[QueuedRequest]:
        """Takes all waiting requests out of the queues, lane by lane."""
        self._aged.clear()
        return [request for lane in self.lanes for request in lane.drain()]

    def drop_cancelled(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Removes these waiting requests, which were cancelled; no others end with them."""
        self._forget_aged(requests)
        for lane, of_lane in self._by_lane(requests):
            self.lanes[lane].drop_cancelled(of_lane)
        self.failures["CANCELED"] += len(requests)
        return []

    def overdue(self, now_us: int) -> list[Failure]:
        """Fails the waiting requests whose timeout or deadline has passed."""
        expired = [request for lane in self.lanes for request in lane.overdue(now_us)]
        if not expired:
            return []
        self._forget_aged(expired)
        self.failures["REJECTED"] += len(expired)
        error = overloaded(TIMEOUT_EXPIRED, self.expected_wait_us(), reason=Reason.TIMED_OUT)
        return [Failure(request, error) for request in expired]

    def _take_arrived_by(self, arrived_by_us: int) -> list[QueuedRequest]:
        expired = [request for lane in self.lanes for request in lane.take_all_arrived_by(arrived_by_us)]
        self._forget_aged(expired)
        return expired

    # Batches and instances

    def set_instances(self, worker: str, instances: int, numbers: Sequence[int] | None = None) -> list[Failure]:
        """Sets how many instances `worker` holds, with these `numbers` (default: from 0 on); no request fails."""
        self.instances.set_instances(worker, instances, numbers)
        if self.instance_count:
            self._unserved.renew()
        return []

    def complete(self, now_us: int, completion: BatchCompletion) -> Ended | None:
        """Handles the end of a batch, or an instance that is free again; returns None if the batch is not of this one."""
        is_over = type(completion) is BatchEnded or not isinstance(completion, BatchReleased)  # the common case first
        batch = (self._in_flight.pop if is_over else self._in_flight.get)(completion.batch_id)
        if batch is None:
            return None
        if type(completion) is BatchEnded:
            self._release(batch, now_us, completion.busy_us)
            return batch.requests, ()
        if isinstance(completion, BatchReleased):
            self._release(batch, now_us, completion.busy_us)
            return NOTHING_ENDED
        if isinstance(completion, BatchNotRun):
            self._release(batch, now_us, 0)
            self._send_less(batch.instance, now_us, completion.reason)
            return self._repeat(batch.requests, was_begun=False)
        self._release(batch, now_us, 0 if isinstance(completion, BatchRefused) else completion.busy_us)
        return self._repeat(batch.requests)

    def batches_lost(self, now_us: int, batch_ids: Iterable[int]) -> Ended:
        """Ends these batches, whose messages were lost: their requests are repeated, unless the model is decoupled."""
        requests: list[QueuedRequest] = []
        for batch_id in batch_ids:
            batch = self._in_flight.pop(batch_id)
            if batch is not None:
                self._release(batch, now_us, 0)
                requests += batch.requests
        if not self.is_decoupled:
            return self._repeat(requests)
        self.failures["CANCELED"] += sum(request.cancelled for request in requests)
        return (), [stream_lost(request) for request in requests]

    def _release(self, batch: Batch, now_us: int, busy_us: int) -> None:
        """Frees the place of a batch, unless it is free already; it kept its instance busy for `busy_us` (0: unknown)."""
        if batch.released:
            return
        batch.released = True
        instance = batch.instance
        if self._budget is not None:
            if batch.is_batch_lane:
                self._budget.run_ended(now_us)
            if busy_us > 0:
                run = BatchRun(instance.begun_us, total_rows(batch.requests), busy_us, batch.is_batch_lane)
                self._budget.record_run(now_us, run, len(self.instances))
        if busy_us > 0:
            self.cost.record(len(batch.requests), busy_us, instance.rows)
            if busy_us >= SLOW_US or self._window.narrow_left:
                self._window.batch_ended(busy_us)
        self.instances.free(instance, now_us, busy_us)

    def _send_less(self, instance: Instance, now_us: int, reason: NotRunReason) -> None:
        """Sends less, or nothing, for a while to an instance that returned a batch."""
        if reason in (NotRunReason.DOWN, NotRunReason.GONE):
            self.instances.close(instance, now_us)
            return
        self._window.narrow(1 if reason == NotRunReason.CALLING else SLOTS)
        if reason == NotRunReason.CALLING and not instance.held:
            self.instances.close(instance, now_us)  # it runs a batch that was not sent from here

    def _repeat(self, requests: list[QueuedRequest], was_begun: bool = True) -> Ended:
        if was_begun:
            self._window.narrow()  # one of the requests may be what kills its instance
            repeated, failures = self._retry.after_loss(requests, self.former.has_steps)
        else:
            repeated, failures = [request for request in requests if not request.cancelled], []
        for request in repeated:
            request.place = self
        self.put_back(repeated)
        cancelled = [request for request in requests if request.cancelled]  # which no worker has counted
        self.failures["CANCELED"] += len(cancelled)
        return cancelled, failures

    # Requests that a worker starts itself

    def direct_request_us(self, batch: Batch) -> int:
        """The expected time of a request, if the worker of `batch` may run more of its own on its idle instances; else 0.

        They are then ahead of requests that wait here, so they must be fast, and no other lane may have requests.
        """
        us_each, budget = self.cost.us_each, self._budget
        may_run = (
            not self.is_decoupled
            and self.former.starts_at_once
            and us_each * len(batch.requests) <= MAX_DIRECT_US
            and (budget is None or not (budget.is_running or any(self.lanes[1:])))
        )
        return ceil(us_each) if may_run else 0

    def record_direct_runs(self, now_us: int, requests: int, busy_us: int) -> None:
        """Counts requests that a worker has run without this scheduler."""
        self.cost.record(requests, busy_us)
        self._live_us = now_us

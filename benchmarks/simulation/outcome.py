"""`Outcome`: the result of every request of a simulation, and statistics derived from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from benchmarks.simulation.scenario import Scenario
from benchmarks.simulation.workload import Workload
from weir.scheduler.batching.outcome import Failure
from weir.scheduler.batching.request import QueuedRequest

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_NOT_YET = -1


class EndedTwice(Exception):
    """A request has ended that was over."""


class Outcome:
    """Filled in by `Cluster`. Times are microseconds; `in_system_us` sums up how many requests were there over time."""

    def __init__(self, scenario: Scenario, workload: Workload) -> None:
        self.scenario = scenario
        self.workload = workload
        self.ended_us = [_NOT_YET] * len(workload)
        self.begun_us = [_NOT_YET] * len(workload)  # execution, of the last time it ran
        self.is_answered = bytearray(len(workload))
        self.batch_rows: Counter[int] = Counter()
        self.batch_requests: Counter[int] = Counter()
        self.failures: Counter[str] = Counter()
        self.busy_us = 0
        self.end_us = 0
        self.in_system_us = 0
        self.lost_workers = 0
        self.lost_batches = 0
        self.job_items = 0
        self.job_riders = 0
        self.job_alone_us = 0

    # What happens

    def sent(self, requests: Sequence[QueuedRequest], rows: int) -> None:
        """A batch went to its worker, of so many rows, null rows among them."""
        self.batch_rows[rows] += 1
        self.batch_requests[len(requests)] += 1

    def ran(self, requests: Iterable[QueuedRequest], begin_us: int) -> None:
        """A batch was executed from then on."""
        begun_us = self.begun_us
        for request in requests:
            if request.key < len(begun_us):
                begun_us[request.key] = begin_us

    def job_ran(self, items: int, rides: bool, busy_us: int) -> None:
        """A batch with so many requests of the job has run, in which they ride with others."""
        self.job_items += items
        if rides:
            self.job_riders += items
        elif items:
            self.job_alone_us += busy_us

    def answered(self, requests: Iterable[QueuedRequest], now_us: int) -> None:
        """These have their answers."""
        ended_us, is_answered = self.ended_us, self.is_answered
        for request in requests:
            key = request.key
            if ended_us[key] != _NOT_YET:
                raise EndedTwice(key)
            ended_us[key] = now_us
            is_answered[key] = 1

    def failed(self, failures: Iterable[Failure], now_us: int) -> None:
        """These are answered with errors."""
        for request, error in failures:
            if self.ended_us[request.key] != _NOT_YET:
                raise EndedTwice(request.key)
            self.ended_us[request.key] = now_us
            about = str(request.correlation_id or "")
            self.failures[error.message.replace(about, "…") if about else error.message] += 1

    # What follows from it

    @property
    def answers(self) -> int:
        """Requests that were answered by a worker."""
        return sum(self.is_answered)

    @property
    def throughput(self) -> float:
        """Answers a second."""
        return self.answers / max(1, self.end_us) * 1e6

    @property
    def utilisation(self) -> float:
        """Share of the time in which an instance executes, or a device where instances share them; over all of them."""
        scenario = self.scenario
        each = scenario.shared_devices or scenario.instances * scenario.models
        return self.busy_us / max(1, self.end_us) / (scenario.workers * each)

    @property
    def mean_batch_requests(self) -> float:
        """Requests of a batch."""
        batches = sum(self.batch_requests.values())
        return sum(size * times for size, times in self.batch_requests.items()) / max(1, batches)

    @cached_property
    def latencies_us(self) -> np.ndarray:
        """From arrival to answer, of the requests answered, in the order they came."""
        return self._since_arrival(self.ended_us)

    @cached_property
    def waits_us(self) -> list[np.ndarray]:
        """By model: from arrival to execution, of its requests that were answered."""
        models = np.array(self.workload.models)[self._chosen] % self.scenario.models
        order = np.argsort(models, kind="stable")
        bounds = np.searchsorted(models[order], np.arange(1, self.scenario.models))
        return np.split(self._since_arrival(self.begun_us)[order], bounds)

    def latencies_of_priority_us(self, priority: int) -> np.ndarray:
        """Those of the requests that came with this priority."""
        return self.latencies_us[np.array(self.workload.priorities)[self._chosen] == priority]

    def percentiles_us(self, latencies: np.ndarray) -> list[float]:
        """p50, p90, p99, p99.9 and the longest; none of nothing."""
        if not len(latencies):
            return []
        return [*np.percentile(latencies, PERCENTILES).tolist(), float(latencies.max())]

    def fairness(self) -> float:
        """Jain's index of the models' mean waits: 1 where all wait alike, 1/n where one of n does all the waiting."""
        means = np.array([waits.mean() for waits in self.waits_us if len(waits)])
        squares = float((means**2).sum())
        return float(means.sum() ** 2 / (len(means) * squares)) if squares else 1.0

    @cached_property
    def _chosen(self) -> np.ndarray:
        return np.frombuffer(self.is_answered, np.uint8).astype(bool)

    def _since_arrival(self, times_us: list[int]) -> np.ndarray:
        return (np.array(times_us) - np.array(self.workload.times_us))[self._chosen]

    def report(self) -> Iterator[str]:
        """Lines for people."""
        scenario = self.scenario
        yield (
            f"{len(self.workload):,} requests in {self.end_us / 1e6:,.1f} s: {self.answers:,} answered, "
            f"{self.throughput:,.0f} a second"
        )
        for text, times in self.failures.most_common():
            yield f"  {times:,} failed: {text}"
        if self.lost_workers:
            yield f"  {self.lost_workers:,} workers and {self.lost_batches:,} batches were lost"
        yield f"{'latency, ms':24}{'p50':>10}{'p90':>10}{'p99':>10}{'p99.9':>10}{'max':>10}"
        yield self._latency_line("all", self.latencies_us)
        priorities = sorted(set(self.workload.priorities))
        for priority in priorities if len(priorities) > 1 else ():
            yield self._latency_line(f"priority {priority}", self.latencies_of_priority_us(priority))
        yield (
            f"batches: {self.mean_batch_requests:.1f} requests each; utilisation {self.utilisation:.1%}; "
            f"{self.in_system_us / max(1, self.end_us):,.1f} requests there at a time"
        )
        yield from _histogram(self.batch_rows)
        if scenario.job_window:
            yield (
                f"job: {self.job_items / max(1, self.end_us) * 1e6:,.0f} items a second, "
                f"{self.job_riders / max(1, self.job_items):.1%} of them in batches of others"
            )
        if scenario.models > 1:
            yield from self._fairness_lines()

    def _latency_line(self, name: str, latencies: np.ndarray) -> str:
        return f"  {name:22}" + "".join(f"{value / 1000:10.3f}" for value in self.percentiles_us(latencies))

    def _fairness_lines(self) -> Iterator[str]:
        yield f"fairness: {self.fairness():.3f} (Jain's index of the models' mean waits)"
        models = self.scenario.models
        for model in sorted({0, 1, 2, models // 2, models - 1} & set(range(models))):
            waits = self.waits_us[model]
            if len(waits):
                mean, longest = waits.mean() / 1000, waits.max() / 1000
                yield f"  model {model}: {len(waits):,} requests, waited {mean:.3f} ms, at most {longest:.3f}"
        longest = [waits.max() / 1000 for waits in self.waits_us if len(waits)]
        yield f"  longest wait of a model: {max(longest):.3f} ms, of the median one {np.median(longest):.3f} ms"


def _histogram(sizes: Counter[int]) -> Iterator[str]:
    """Rows of batches, in at most a dozen bars."""
    if not sizes:
        return
    total, largest = sum(sizes.values()), max(sizes)
    step = -(-largest // 12)
    for low in range(0, largest, step):
        share = sum(sizes[size] for size in range(low + 1, low + step + 1)) / total
        name = f"{low + 1}" if step == 1 else f"{low + 1}-{min(low + step, largest)}"
        yield f"  {name + ' rows':>12} {share:6.1%} {'█' * round(40 * share)}"

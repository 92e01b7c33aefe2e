"""`BatchLaneBudget`: how much of its instances a version can give to the batch lane without delaying live requests.

Requests of offline jobs fill the empty places of other batches (*backfill*), and run on their own on idle instances.
Their cost for live requests is learned from the traffic and from the batches that have run:

- **Backfill** may make a batch 5 % longer, and less the busier live requests keep the instances, because each delay
  affects the requests behind. `RowCost` estimates the cost of a row. Its uncertainty counts in favour of backfill: where
  execution times vary for other reasons, free rows would otherwise never be found, and backfill itself refines the
  estimate. From time to time a batch gets as much backfill as it has rows, to measure what is unknown.
- **On idle instances**, with several instances, batch-lane batches leave as many free as live requests were seen to
  need
  at once, plus one; unless batches of live requests become slower beside them because they share a resource.
- **On the last instance** they run when no live request has come for several times the usual interval.
- In any case at most one in `COLLISION_ONE_IN` live requests may find all instances busy with one of these batches
  among
  them. Only a silence of `LONGEST_QUIET_US` is exempt.

While live traffic is recent, a batch-lane batch is expected to take at most `BATCH_LANE_RUN_US`, or is a single
request.
"""

from __future__ import annotations

from collections import Counter
from math import inf, sqrt
from typing import NamedTuple

RECENT_US = 30_000_000
"""This long after the last live request, the batch lane has the version to itself."""

QUIET_INTERVALS = 7
SHORTEST_QUIET_US = 20_000
LONGEST_QUIET_US = 2_000_000
COLLISION_ONE_IN = 400
MAX_SAVED_COLLISIONS = 10
BATCH_LANE_RUN_US = 20_000

BACKFILL_SHARE = 0.05
EVENT_BACKFILL_SHARE = 1.0
FIRST_TRIAL_ONE_IN, TRIAL_ONE_IN = 32, 1024

_ARRIVALS = 32  # arrivals in the mean interval
_BUSY_SAMPLES = 1024
_RARE_SHARE = 0.004
_BUSY = 0.5  # load from which trials are rare
_TRIAL_SHARE = 0.3
_TRIAL_UNCERTAINTY, _BACKFILL_UNCERTAINTY = 2.0, 0.5  # standard errors of the cost of a row
_MAX_SLOWDOWN = 1.1
_LOAD_WINDOW_US = 1_000_000


class BatchRun(NamedTuple):
    """A batch of `rows` rows that has run: it started at `begun_us` and kept its instance busy for `busy_us`."""

    begun_us: int
    rows: int
    busy_us: int
    is_batch_lane: bool


class BatchLaneBudget:
    """The budget of one version. Times are microseconds; `live_us` is the arrival of the last live request, 0 without
    any.
    """

    def __init__(self, live_us: int) -> None:
        self.cost = RowCost()
        self._live_us = live_us
        self._interval_us = float(LONGEST_QUIET_US)
        self._allowance = 0  # live requests that may still collide with a batch-lane batch, times COLLISION_ONE_IN
        self._busy_counts: Counter[int] = Counter()  # how often live requests found this many instances busy
        self._usual_busy: int | None = None  # live requests hardly ever found this many busy; None: unknown
        self._running = 0
        self._run_ended_us = 0  # when the last batch-lane batch ended
        self._slowdown = 1.0  # how much longer batches take beside batch-lane batches
        self._since_trial, self._trial_interval, self._max_trial_rows = 0, FIRST_TRIAL_ONE_IN, 0
        self._load = 0.0
        self._busy_us = 0
        self._since_us = 0

    def has_live_traffic(self, now_us: int) -> bool:
        """Whether live traffic is recent."""
        return self._live_us > 0 and now_us - self._live_us < RECENT_US

    def record_live(self, now_us: int, requests: int, busy: int, idle: int) -> None:
        """Records `requests` live requests that arrived at once while `busy` instances were busy and `idle` ones idle."""
        interval_us = min(now_us - self._live_us, LONGEST_QUIET_US)
        self._live_us = now_us
        self._interval_us += (interval_us - self._interval_us) / _ARRIVALS
        self._allowance = min(self._allowance + requests, MAX_SAVED_COLLISIONS * COLLISION_ONE_IN)
        if self._running and not idle:
            self._allowance -= requests * COLLISION_ONE_IN
        counts = self._busy_counts
        counts[busy - self._running] += 1
        if counts.total() >= _BUSY_SAMPLES:
            self._usual_busy = _rarely_reached(counts)
            self._busy_counts = Counter({size: times // 2 for size, times in counts.items() if times > 1})

    def may_run_at_us(self, now_us: int, instances: int) -> int:
        """Returns when one more batch-lane batch may run on one of `instances` instances, if no live request arrives."""
        if self._allowance >= COLLISION_ONE_IN:
            reserved = instances if self._usual_busy is None else self._usual_busy + self._running
            if reserved < instances and self._slowdown < _MAX_SLOWDOWN:
                return now_us
            quiet_us = max(SHORTEST_QUIET_US, QUIET_INTERVALS * self._interval_us, self.cost.expected_us(1))
        else:
            quiet_us = LONGEST_QUIET_US
        return self._live_us + int(min(quiet_us, LONGEST_QUIET_US))

    @property
    def max_run_rows(self) -> float:
        """Rows of a batch-lane batch while live traffic is recent, beyond its first request."""
        cost = self.cost
        slack_us = BATCH_LANE_RUN_US - cost.expected_us(1)
        return min(cost.rows_within(slack_us), max(1, 2 * cost.most_rows)) if slack_us > 0 else 0

    @property
    def is_running(self) -> bool:
        """Whether a batch-lane batch runs."""
        return self._running > 0

    def run_started(self) -> None:
        """Records that a batch-lane batch was sent."""
        self._running += 1

    def run_ended(self, now_us: int) -> None:
        """Records that a batch-lane batch has ended."""
        self._running -= 1
        self._run_ended_us = now_us

    def record_run(self, now_us: int, run: BatchRun, instances: int) -> None:
        """Records the time of a batch that has run."""
        is_beside_batch_lane = not run.is_batch_lane and (self._running > 0 or self._run_ended_us > run.begun_us)
        if not is_beside_batch_lane:
            self.cost.record_run(run.rows, run.busy_us)
            self._slowdown += (1.0 - self._slowdown) / 2048
        elif expected_us := self.cost.expected_us(run.rows):
            self._slowdown += (run.busy_us / expected_us - self._slowdown) / 16
        if not run.is_batch_lane:
            self._busy_us += run.busy_us
        passed_us = now_us - self._since_us
        if passed_us >= _LOAD_WINDOW_US:
            load = min(1.0, self._busy_us / (passed_us * max(1, instances)))
            self._load += (load - self._load) / 2
            self._busy_us, self._since_us = 0, now_us

    def forget_cost(self) -> None:
        """Discards the measured cost of rows: batches are of another kind from now on."""
        self.cost = RowCost()

    def backfill_rows(self, rows: int) -> int:
        """Returns how many rows of backfill may join a batch of `rows` rows."""
        self._since_trial += 1
        free = 1 - self._load
        if self._since_trial >= (self._trial_interval if self._load < _BUSY else TRIAL_ONE_IN):
            most_rows = self.cost.most_rows
            if most_rows <= self._max_trial_rows:  # until the largest size has run, trials stay frequent
                self._trial_interval = min(2 * self._trial_interval, TRIAL_ONE_IN)
            self._since_trial, self._max_trial_rows = 0, most_rows
            return max(rows, self._rows_longer(rows, _TRIAL_SHARE, _TRIAL_UNCERTAINTY))
        return self._rows_longer(rows, BACKFILL_SHARE * free, _BACKFILL_UNCERTAINTY * free)

    def event_rows(self, rows: int) -> int:
        """Returns how many rows of events may join a batch of `rows` rows."""
        return max(rows, self._rows_longer(rows, EVENT_BACKFILL_SHARE))

    def _rows_longer(self, rows: int, share: float, stderrs: float = 0.0) -> int:
        """Returns the rows that make a batch longer by `share` at most, not far beyond the sizes seen so far."""
        cost = self.cost
        most = max(0, 2 * cost.most_rows - rows)
        return int(min(cost.rows_within(share * cost.expected_us(rows), stderrs), most))


def _rarely_reached(counts: Counter[int]) -> int:
    """Returns the smallest number of busy instances that live requests hardly ever found."""
    left = counts.total() * _RARE_SHARE
    for size in sorted(counts, reverse=True):
        left -= counts[size]
        if left < 0:
            return size + 1
    return 0


_MEMORY = 1 / 512
_MIN_BATCHES = 8
_OUTLIER = 4.0
_MIN_VARIANCE = 1e-4


class RowCost:
    """How long batches take by their number of rows: a straight line fitted to recent batches by least squares.

    It gives the time of a batch and the time that each row adds. It does not extrapolate far beyond the sizes that
    have run. On a busy machine the slope is uncertain; `stderr_us_per_row` is its standard error. Times are
    microseconds.
    """

    __slots__ = ("_covariance", "_mean_rows", "_mean_us", "_time_variance", "_variance", "_weight", "most_rows")

    def __init__(self) -> None:
        self._weight = 0.0  # weight of the recorded batches; newer ones count more
        self._mean_rows = self._mean_us = 0.0
        self._variance = self._covariance = self._time_variance = (
            0.0  # variance of rows, covariance with times, variance of times
        )
        self.most_rows = 0

    def record_run(self, rows: int, busy_us: float) -> None:
        """Records that a batch of `rows` rows took `busy_us`."""
        if self._weight >= _MIN_BATCHES:
            # An outlier waited for the machine and says nothing about rows.
            busy_us = min(busy_us, _OUTLIER * max(self._mean_us, self.expected_us(rows)))
        self.most_rows = max(self.most_rows, rows)
        self._weight += 1 - self._weight * _MEMORY
        share = 1 / self._weight
        from_mean_rows, from_mean_us = rows - self._mean_rows, busy_us - self._mean_us
        self._mean_rows += share * from_mean_rows
        self._mean_us += share * from_mean_us
        self._variance += share * (from_mean_rows * (rows - self._mean_rows) - self._variance)
        self._covariance += share * (from_mean_rows * (busy_us - self._mean_us) - self._covariance)
        self._time_variance += share * (from_mean_us * (busy_us - self._mean_us) - self._time_variance)

    @property
    def us_per_row(self) -> float:
        """The time that each row adds; infinite while it is unknown."""
        if self._weight < _MIN_BATCHES or self._variance < _MIN_VARIANCE:
            return inf
        return max(0.0, self._covariance / self._variance)

    @property
    def stderr_us_per_row(self) -> float:
        """The standard error of `us_per_row`; 0.0 while that is unknown."""
        if self.us_per_row == inf:
            return 0.0
        unexplained = max(0.0, self._time_variance - self._covariance**2 / self._variance)
        return sqrt(unexplained / (self._variance * self._weight))

    def expected_us(self, rows: int) -> float:
        """Returns the expected time of a batch of `rows` rows; 0.0 while it is unknown."""
        each_us = self.us_per_row
        if each_us == inf:
            return self._mean_us * max(1.0, rows / self._mean_rows) if self._mean_rows else 0.0
        return max(self._mean_us + each_us * (rows - self._mean_rows), each_us * rows)

    def rows_within(self, slack_us: float, stderrs: float = 0.0) -> float:
        """Returns how many more rows take at most `slack_us`, with the slope reduced by this many standard errors."""
        each_us = self.us_per_row
        if stderrs:
            each_us = max(0.0, each_us - stderrs * self.stderr_us_per_row)
        return inf if each_us == 0.0 else slack_us / each_us

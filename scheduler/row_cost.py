"""`RowCost`: how long batches of a version take by their rows, as far as those that have run tell.

A straight line through the recent ones, by least squares: what a batch takes, and what each row adds. Whether rows are
free decides how many of a job may ride with live requests. Nothing is believed of sizes far from those that have run.
On a machine that does much else the line is uncertain; how much it is tells `uncertain_us_per_row`.
"""

from __future__ import annotations

from math import inf, sqrt

_MEMORY = 1 / 512
_LEAST_BATCHES = 8
_OUTLIER = 4.0
_LEAST_VARIANCE = 1e-4


class RowCost:
    """See the module. Times are microseconds."""

    __slots__ = ("_mean_rows", "_mean_us", "_spread", "_together", "_variance", "_weight", "most_rows")

    def __init__(self) -> None:
        self._weight = 0.0  # of the batches that count, newer ones more
        self._mean_rows = self._mean_us = 0.0
        self._variance = self._together = self._spread = 0.0  # of rows, of rows with times, and of times
        self.most_rows = 0

    def has_run(self, rows: int, busy_us: float) -> None:
        """A batch of so many rows took so long."""
        if self._weight >= _LEAST_BATCHES:
            # One that waited for the machine says nothing of rows.
            busy_us = min(busy_us, _OUTLIER * max(self._mean_us, self.expected_us(rows)))
        self.most_rows = max(self.most_rows, rows)
        self._weight += 1 - self._weight * _MEMORY
        share = 1 / self._weight
        from_mean_rows, from_mean_us = rows - self._mean_rows, busy_us - self._mean_us
        self._mean_rows += share * from_mean_rows
        self._mean_us += share * from_mean_us
        self._variance += share * (from_mean_rows * (rows - self._mean_rows) - self._variance)
        self._together += share * (from_mean_rows * (busy_us - self._mean_us) - self._together)
        self._spread += share * (from_mean_us * (busy_us - self._mean_us) - self._spread)

    @property
    def us_per_row(self) -> float:
        """What a row adds; infinite while that is not known."""
        if self._weight < _LEAST_BATCHES or self._variance < _LEAST_VARIANCE:
            return inf
        return max(0.0, self._together / self._variance)

    @property
    def uncertain_us_per_row(self) -> float:
        """The standard error of `us_per_row`; 0.0 while that is not known."""
        if self.us_per_row == inf:
            return 0.0
        unexplained = max(0.0, self._spread - self._together**2 / self._variance)
        return sqrt(unexplained / (self._variance * self._weight))

    def expected_us(self, rows: int) -> float:
        """What a batch of so many rows takes; 0.0 while nothing is known."""
        each_us = self.us_per_row
        if each_us == inf:
            return self._mean_us * max(1.0, rows / self._mean_rows) if self._mean_rows else 0.0
        return max(self._mean_us + each_us * (rows - self._mean_rows), each_us * rows)

    def rows_within(self, slack_us: float, doubt: float = 0.0) -> float:
        """How many rows more take that much longer at most; `doubt` standard errors in favour of more."""
        each_us = self.us_per_row
        if doubt:
            each_us = max(0.0, each_us - doubt * self.uncertain_us_per_row)
        return inf if each_us == 0.0 else slack_us / each_us

"""`Leeway`: how much of its instances a version can give to offline jobs without making live requests wait.

A job's requests may ride in the empty places of other batches, and run alone on idle instances. What that costs live
requests is learnt from what comes and from what has run:
- **Riders** may make a batch a twentieth longer at most, and less the busier live requests keep the instances, where each
  delay is passed on to those behind. What a row costs tells `RowCost`, whose doubt speaks for riders: where executions
  differ for reasons of their own, rows that are free would else never be found to be, and riders themselves settle it.
  Now and then a batch takes as many riders as it has rows, or may become a little longer, and so tells what is not known.
- **Alone**, with several instances, a job's batches leave as many of them free as live requests are found to take at
  once, and one more; unless batches of live requests turn out to take longer beside them, for what they share.
- **Alone**, with no instance to spare, they run when no live request has come for several times as long as usual.
- However live requests come, at most one in `FOUND_ONE_IN` of them may have found all instances taken with one of these
  batches among them. Only a silence of `LONGEST_QUIET_US` is no steady traffic any more.

While live traffic is recent, a batch that runs alone is expected to take `ALONE_US` at most, or is a single request.
"""

from __future__ import annotations

from collections import Counter

from scheduler.row_cost import RowCost

RECENT_US = 30_000_000
"""After so long without a live request a job has its version for itself."""

QUIET_GAPS = 7
SHORTEST_QUIET_US = 20_000
LONGEST_QUIET_US = 2_000_000
FOUND_ONE_IN = 400
MOST_SAVED = 10
ALONE_US = 20_000

RIDERS_SHARE = 0.05
EVENTS_SHARE = 1.0
FIRST_TRIED_IN, TRIED_ONE_IN = 32, 1024

_ARRIVALS = 32  # that the usual gap is the mean of
_CROWD_MEMORY = 1024
_CROWD_SHARE = 0.004
_BUSY = 0.5  # here hardly anything is tried out
_TRIED_SHARE = 0.3
_TRIED_DOUBT, _RIDERS_DOUBT = 2.0, 0.5  # standard errors of what a row costs
_DRAGS = 1.1
_LOAD_WINDOW_US = 1_000_000


class Leeway:
    """See the module. Times are microseconds; `live_us` is when a live request came last, 0 if none has."""

    def __init__(self, live_us: int) -> None:
        self.cost = RowCost()
        self._live_us = live_us
        self._gap_us = float(LONGEST_QUIET_US)
        self._saved = 0  # how many live requests may still find a batch of a job's, times FOUND_ONE_IN
        self._crowds: Counter[int] = Counter()  # how often a live request found so many instances busy with others
        self._crowd: int | None = None  # so many were hardly ever found, or more; None: not known
        self._alone = 0
        self._alone_us = 0  # when one that ran alone ended last
        self._drag = 1.0  # how much longer batches take beside those
        self._untried, self._try_in, self._most_tried = 0, FIRST_TRIED_IN, 0
        self._load = 0.0
        self._busy_us = 0
        self._since_us = 0

    def is_watched(self, now_us: int) -> bool:
        """Whether live traffic is recent."""
        return self._live_us > 0 and now_us - self._live_us < RECENT_US

    def live_came(self, now_us: int, requests: int, busy: int, idle: int) -> None:
        """So many live requests have come at once, while so many instances were busy, and so many idle."""
        gap_us = min(now_us - self._live_us, LONGEST_QUIET_US)
        self._live_us = now_us
        self._gap_us += (gap_us - self._gap_us) / _ARRIVALS
        self._saved = min(self._saved + requests, MOST_SAVED * FOUND_ONE_IN)
        if self._alone and not idle:
            self._saved -= requests * FOUND_ONE_IN
        crowds = self._crowds
        crowds[busy - self._alone] += 1
        if crowds.total() >= _CROWD_MEMORY:
            self._crowd = _hardly_reached(crowds)
            self._crowds = Counter({size: times // 2 for size, times in crowds.items() if times > 1})

    def may_run_alone_us(self, now_us: int, instances: int) -> int:
        """From when on one more batch may run alone on an idle instance, of so many, if no live request comes."""
        if self._saved >= FOUND_ONE_IN:
            if self._drag < _DRAGS and self._crowd is not None and self._alone + 1 + self._crowd <= instances:
                return now_us
            quiet_us = max(SHORTEST_QUIET_US, QUIET_GAPS * self._gap_us, self.cost.expected_us(1))
        else:
            quiet_us = LONGEST_QUIET_US
        return self._live_us + int(min(quiet_us, LONGEST_QUIET_US))

    @property
    def alone_rows(self) -> float:
        """Rows of a batch that runs alone while live traffic is recent, beyond its first request."""
        cost = self.cost
        slack_us = ALONE_US - cost.expected_us(1)
        return min(cost.rows_within(slack_us), max(1, 2 * cost.most_rows)) if slack_us > 0 else 0

    def alone_began(self) -> None:
        """A batch of a job runs alone."""
        self._alone += 1

    def alone_ended(self, now_us: int) -> None:
        """It has ended."""
        self._alone -= 1
        self._alone_us = now_us

    def has_run(self, now_us: int, begun_us: int, rows: int, busy_us: int, is_alone: bool, instances: int) -> None:
        """A batch of so many rows has run."""
        is_beside = not is_alone and (self._alone > 0 or self._alone_us > begun_us)
        if not is_beside:
            self.cost.has_run(rows, busy_us)
            self._drag += (1.0 - self._drag) / 2048
        elif expected_us := self.cost.expected_us(rows):
            self._drag += (busy_us / expected_us - self._drag) / 16
        if not is_alone:
            self._busy_us += busy_us
        passed_us = now_us - self._since_us
        if passed_us >= _LOAD_WINDOW_US:
            load = min(1.0, self._busy_us / (passed_us * max(1, instances)))
            self._load += (load - self._load) / 2
            self._busy_us, self._since_us = 0, now_us

    def forget_cost(self) -> None:
        """Batches are of another kind from now on."""
        self.cost = RowCost()

    def riders(self, rows: int) -> int:
        """So many rows of a job may join a batch of so many rows."""
        self._untried += 1
        free = 1 - self._load
        if self._untried >= (self._try_in if self._load < _BUSY else TRIED_ONE_IN):
            most_rows = self.cost.most_rows
            if most_rows <= self._most_tried:  # sizes that have never run are soon come to
                self._try_in = min(2 * self._try_in, TRIED_ONE_IN)
            self._untried, self._most_tried = 0, most_rows
            return max(rows, self._rows_longer(rows, _TRIED_SHARE, _TRIED_DOUBT))
        return self._rows_longer(rows, RIDERS_SHARE * free, _RIDERS_DOUBT * free)

    def events(self, rows: int) -> int:
        """So many rows of events may join a batch of so many rows."""
        return max(rows, self._rows_longer(rows, EVENTS_SHARE))

    def _rows_longer(self, rows: int, share: float, doubt: float = 0.0) -> int:
        """Rows with which a batch takes longer by this share at most; not far from what has been seen."""
        cost = self.cost
        most = max(0, 2 * cost.most_rows - rows)
        return int(min(cost.rows_within(share * cost.expected_us(rows), doubt), most))


def _hardly_reached(crowds: Counter[int]) -> int:
    """The least number that hardly any of them reaches."""
    left = crowds.total() * _CROWD_SHARE
    for size in sorted(crowds, reverse=True):
        left -= crowds[size]
        if left < 0:
            return size + 1
    return 0

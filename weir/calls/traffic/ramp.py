"""`RampPolicy`: raises the share of a version step by step, and returns to the shares before when the version is worse.

The share of the version passes `STEPS` on its way to the goal, each for the same time. A step ends only after the version
has ended `MIN_REQUESTS` requests in it: a ramp without traffic waits.

Each condition of the ramp is tested sequentially, so that the ramp may go back after any request. `FailureTest` is a
mixture sequential probability ratio test of "at most a share p of the requests are bad" against shares above p. If the
version is not worse than the condition allows, the probability that its test ever ends the ramp is at most `FALSE_ALARM`.
Bad are, for `error_rate>p`, requests that failed; for `p99>1.5x`, those that took longer than 1.5 times the 99th percentile
of the other versions as of the moment before, of which p is 1 %; for `p99>200ms`, those above 200 ms.

Sans-IO. Source: Wald, Sequential Analysis (1947); Robbins (1970) for mixtures; Ville's inequality.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from weir.telemetry.instruments import DurationSketch

STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""The shares of the steps, relative to the goal."""

MIN_REQUESTS = 20
"""Requests of the version that must have ended in a step before the next one begins."""

FALSE_ALARM = 0.01
"""The probability with which a ramp of a version that is as good as its conditions ask goes back, over all conditions."""

MIN_BASELINE = 100
"""Requests of the other versions from which their 99th percentile is taken."""

_P99 = 0.99
_ALTERNATIVES = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 90.0)

_TERM = re.compile(
    r"(?:error_rate\s*>\s*(?P<rate>[0-9]+(?:\.[0-9]+)?)\s*%|p99\s*>\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>x|ms|s))"
)


class AbortConditions(NamedTuple):
    """When a ramp goes back: 0 for a condition that it does not have. `error_rate` is a share of 1; `p99_us` are
    microseconds.
    """

    error_rate: float = 0.0
    p99_factor: float = 0.0
    p99_us: float = 0.0


def read_conditions(text: str) -> AbortConditions:
    """The conditions in a text such as `error_rate>1% or p99>1.5x`. Raises ValueError with what is wrong."""
    found: dict[str, float] = {}
    for part in re.split(r"\s+or\s+", text.strip()):
        term = _TERM.fullmatch(part.strip())
        if term is None:
            raise ValueError(f"'{part[:100]}' is not a condition: expected error_rate>1%, p99>1.5x or p99>200ms")
        if term["rate"]:
            name, value = "error_rate", float(term["rate"]) / 100
            if not 0 < value < 1:
                raise ValueError(f"error_rate must be between 0 % and 100 %, got {term['rate']}%")
        elif term["unit"] == "x":
            name, value = "p99_factor", float(term["number"])
            if value < 1:
                raise ValueError(f"p99 must be compared with at least 1x, got {term['number']}x")
        else:
            name, value = "p99_us", float(term["number"]) * (1e3 if term["unit"] == "ms" else 1e6)
            if not value:
                raise ValueError("p99 must be compared with a time above 0")
        if name in found:
            raise ValueError(f"'{part[:100]}' repeats a condition")
        found[name] = value
    return AbortConditions(**found)


class FailureTest:
    """Tests sequentially whether more than a share `limit` of requests is bad. `alarm` is when its evidence suffices."""

    def __init__(self, limit: float, false_alarm: float) -> None:
        self._threshold = math.log(1 / false_alarm)
        shares = [limit * times for times in _ALTERNATIVES if limit * times < 1] or [(1 + limit) / 2]
        # For each alternative: what a bad and a good request add to its log-likelihood ratio.
        self._gains = [(math.log(share / limit), math.log((1 - share) / (1 - limit))) for share in shares]
        self._ratios = [0.0] * len(shares)
        self.requests = 0
        self.bad = 0

    def add(self, requests: int, bad: int) -> None:
        """Adds the outcomes of requests."""
        self.requests += requests
        self.bad += bad
        good = requests - bad
        self._ratios = [
            ratio + bad * gain + good * loss for ratio, (gain, loss) in zip(self._ratios, self._gains, strict=True)
        ]

    @property
    def alarm(self) -> bool:
        """Whether the evidence that too many are bad suffices: the mean of the likelihood ratios exceeds the threshold."""
        highest = max(self._ratios)
        total = sum(math.exp(ratio - highest) for ratio in self._ratios)
        return highest + math.log(total / len(self._ratios)) >= self._threshold


class Observed(NamedTuple):
    """Requests that ended since the last look: how many, how many failed, and the bins of those that succeeded."""

    requests: int = 0
    failures: int = 0
    bins: Mapping[int, int] = {}


class Step(NamedTuple):
    """What to do: set the version's share (of 1) to `share`. `is_over` after the last step, or, with a `reason`, because
    the version is worse.
    """

    share: float
    is_over: bool = False
    reason: str = ""


class RampPolicy:
    """One ramp to `goal` (a share of 1) within `over_s`, from step number `step` on, which began at `now_s`."""

    def __init__(self, goal: float, over_s: float, conditions: AbortConditions, now_s: float, step: int = 0) -> None:
        self.step = step
        self._goal = goal
        self._step_s = over_s / len(STEPS)
        self._conditions = conditions
        self._began_s = now_s
        self._requests = 0  # of the version, in this step
        self._others = DurationSketch()
        self._compared = 0  # requests in that sketch
        tests = sum(map(bool, conditions))
        alarm = FALSE_ALARM / max(1, tests)
        self._failures = FailureTest(conditions.error_rate, alarm) if conditions.error_rate else None
        self._relative = FailureTest(1 - _P99, alarm) if conditions.p99_factor else None
        self._absolute = FailureTest(1 - _P99, alarm) if conditions.p99_us else None

    @property
    def share(self) -> float:
        """The share of the version in the current step."""
        return self._goal * STEPS[self.step]

    def look(self, now_s: float, version: Observed, others: Observed) -> Step | None:
        """What to do after these requests ended; None: nothing."""
        self._requests += version.requests
        reason = self._worse(version)
        self._others.add_bins(others.bins)
        self._compared += sum(others.bins.values())
        if reason:
            return Step(0.0, True, reason)
        if now_s < self._began_s + self._step_s or self._requests < MIN_REQUESTS:
            return None
        if self.step == len(STEPS) - 1:
            return Step(self.share, True)
        self.step += 1
        self._began_s, self._requests = now_s, 0
        return Step(self.share)

    def _worse(self, version: Observed) -> str:
        """Why the version is worse than a condition allows; "" where the evidence does not suffice."""
        limits = self._conditions
        if self._failures is not None:
            self._failures.add(version.requests, version.failures)
            if self._failures.alarm:
                test = self._failures
                return f"{test.bad} of {test.requests} requests failed, more than {limits.error_rate:.3%}"
        if self._relative is not None and self._compared >= MIN_BASELINE:
            bound_us = limits.p99_factor * self._others.quantile(_P99)
            if self._is_slow(self._relative, version, bound_us):
                test = self._relative
                return (
                    f"{test.bad} of {test.requests} requests took longer than {limits.p99_factor:g} times the 99th "
                    f"percentile of the other versions, now {bound_us / 1000:.1f} ms"
                )
        if self._absolute is not None and self._is_slow(self._absolute, version, limits.p99_us):
            test = self._absolute
            return f"{test.bad} of {test.requests} requests took longer than {limits.p99_us / 1000:g} ms"
        return ""

    @staticmethod
    def _is_slow(test: FailureTest, version: Observed, bound_us: float) -> bool:
        slow = sum(count for bin, count in version.bins.items() if DurationSketch.duration_us(bin) > bound_us)
        test.add(sum(version.bins.values()), slow)
        return test.alarm


def ramp_weights(before: Mapping[int, float], version: int, share: float) -> dict[int, float]:
    """The weights, of 100, that give `version` this share (of 1), and the others the rest as they had it `before`."""
    others = {number: weight for number, weight in before.items() if number != version}
    total = sum(others.values())
    rest = 100 * (1 - share)
    weights = {number: round(rest * weight / total, 6) if total else 0.0 for number, weight in others.items()}
    return dict(sorted({**weights, version: round(100 * share, 6)}.items()))

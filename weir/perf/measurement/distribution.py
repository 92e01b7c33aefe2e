"""`Distribution`: durations in bounded memory; `Window`: what became of the requests in one stretch of time."""

from __future__ import annotations

import re
from collections import Counter

from weir.perf.clients.session import Answer
from weir.telemetry.instruments import DurationSketch

MAX_ERROR_TEXTS = 20
OTHER_ERRORS = "other errors"
"""Errors beyond `MAX_ERROR_TEXTS` different texts are counted together."""

_NUMBER = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")


def error_kind(text: str) -> str:
    """Equal for texts that differ only in numbers, as in ids, sizes and durations."""
    return _NUMBER.sub("0", text)


class Distribution:
    """Durations in seconds: their number, mean and maximum, and quantiles within 1 %."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0
        self._sketch = DurationSketch()

    def add(self, seconds: float) -> None:
        """Counts a duration."""
        self.count += 1
        self.sum_s += seconds
        if seconds > self.max_s:
            self.max_s = seconds
        self._sketch.add(seconds * 1e6)

    def merge(self, other: Distribution) -> None:
        """Counts all durations of `other`."""
        self.count += other.count
        self.sum_s += other.sum_s
        self.max_s = max(self.max_s, other.max_s)
        self._sketch.add_bins(other._sketch.bins())

    @property
    def mean_s(self) -> float:
        """The mean; 0 without durations."""
        return self.sum_s / self.count if self.count else 0.0

    def quantile_s(self, share: float) -> float:
        """The duration that this share of all does not exceed; 0 without durations."""
        return min(self._sketch.quantile(share) / 1e6, self.max_s) if self.count else 0.0


class Window:
    """The requests that ended between two points in time, in seconds of `time.perf_counter`."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.seconds = 0.0
        self.failed = 0
        self.responses = 0
        self.latency = Distribution()
        self.first_response = Distribution()
        self.between_responses = Distribution()
        self.send_delay = Distribution()
        self.errors: Counter[str] = Counter()
        self._texts: dict[str, str] = {}

    @property
    def succeeded(self) -> int:
        """How many requests were answered."""
        return self.latency.count

    @property
    def per_s(self) -> float:
        """Answered requests per second."""
        return self.succeeded / self.seconds if self.seconds else 0.0

    def end(self, now_s: float) -> None:
        """Ends the window."""
        self.seconds = now_s - self.started_s

    def answered(self, from_s: float, answer: Answer, streams: bool) -> None:
        """Counts a request whose latency counts from `from_s`; with `streams`, also the times of its responses."""
        self.latency.add(answer.end_s - from_s)
        self.responses += len(answer.responses_s)
        if streams and answer.responses_s:
            self.first_response.add(answer.responses_s[0] - from_s)
            for earlier_s, later_s in zip(answer.responses_s, answer.responses_s[1:], strict=False):
                self.between_responses.add(later_s - earlier_s)

    def failure(self, text: str, count: int = 1) -> None:
        """Counts requests that failed with this text, or with one that differs only in numbers: the first one is kept."""
        self.failed += count
        kind = error_kind(text)
        if kind not in self._texts and len(self._texts) < MAX_ERROR_TEXTS:
            self._texts[kind] = text
        self.errors[self._texts.get(kind, OTHER_ERRORS)] += count

    def merge(self, other: Window) -> None:
        """Adds another window; the seconds of both are added."""
        self.seconds += other.seconds
        self.responses += other.responses
        for mine, theirs in (
            (self.latency, other.latency),
            (self.first_response, other.first_response),
            (self.between_responses, other.between_responses),
            (self.send_delay, other.send_delay),
        ):
            mine.merge(theirs)
        for text, count in other.errors.items():
            self.failure(text, count)

"""`CacheCounters`: the hits and misses of one caller, by Triton's counting rules.

Source: Triton's statistics extension and metrics, and a running Triton 2.51. A hit is a success with its own duration, and
a request that was queued; it adds nothing to what counts runs of the model. A miss is counted when the answer is there and
is kept, for answers that are errors are not; its duration is that of the look-up and of keeping the answer, and adds to
that of the request.
"""

from __future__ import annotations

from typing import Any

from telemetry.quantiles import RecentDurations

Key = tuple[str, int]
"""A model's name and a version."""


class _Row:
    """One version: each [count, nanoseconds]."""

    def __init__(self, has_summaries: bool) -> None:
        self.hits = [0, 0]
        self.misses = [0, 0]
        names = ("queue", "cache_hit", "cache_miss") if has_summaries else ()
        self.summaries = {name: RecentDurations() for name in names}

    def add(self, kind: str, total: list[int], ns: int) -> None:
        total[0] += 1
        total[1] += ns
        if self.summaries:
            self.summaries[kind].add(ns // 1000)
            if kind == "cache_hit":
                self.summaries["queue"].add(0)


class CacheCounters:
    """See the module."""

    def __init__(self, has_summaries: bool = False) -> None:
        self._has_summaries = has_summaries
        self._rows: dict[Key, _Row] = {}

    def hit(self, key: Key, ns: int) -> None:
        """A request was answered from the cache."""
        row = self._row(key)
        row.add("cache_hit", row.hits, ns)

    def miss(self, key: Key, ns: int) -> None:
        """A request was answered by the model, as the cache had no answer."""
        row = self._row(key)
        row.add("cache_miss", row.misses, ns)

    def versions(self) -> list[Key]:
        """The versions of which something was counted."""
        return list(self._rows)

    def forget(self, key: Key) -> None:
        """A version was unloaded: it starts at zero when it is loaded again."""
        self._rows.pop(key, None)

    def snapshot(self) -> list[dict[str, Any]]:
        """All of it, in the form of `schemas.statistics.VersionCounters`."""
        return [_told(key, row) for key, row in self._rows.items()]

    def _row(self, key: Key) -> _Row:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(self._has_summaries)
        return row


def _told(key: Key, row: _Row) -> dict[str, Any]:
    hits, hits_ns = row.hits
    return {
        "model": key[0],
        "version": key[1],
        "success": [hits, hits_ns + row.misses[1]],
        "queue": [hits, 0],
        **{name: [0, 0] for name in ("fail", "compute_input", "compute_infer", "compute_output")},
        "inference_count": 0,
        "execution_count": 0,
        "last_inference_ms": 0,
        "failures": {},
        "cache_hit": list(row.hits),
        "cache_miss": list(row.misses),
        "summaries": {name: summary.snapshot() for name, summary in row.summaries.items()},
    }

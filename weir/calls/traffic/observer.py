"""`VersionObserver`: the requests that ended since the last look, of one version of a model and of its other versions."""

from __future__ import annotations

from collections import Counter

from weir.calls.traffic.counters import TrafficTotals
from weir.calls.traffic.ramp import Observed
from weir.calls.traffic.split import SPLIT, STICKY
from weir.schemas.wire.traffic import ArmRow


class VersionObserver:
    """Compares `version` of `model` with its other versions, by requests that their rule has placed.

    What a process had counted before it was first seen here is not counted, unless it has appeared since.
    """

    def __init__(self, totals: TrafficTotals, model: str, version: int) -> None:
        self._totals = totals
        self._model = model
        self._version = version
        self._seen: dict[tuple[str, int, str], ArmRow] = {}
        self.look()

    def look(self) -> tuple[Observed, Observed]:
        """(the version's requests, those of the others) since the last look."""
        sums = {True: [0, 0], False: [0, 0]}
        bins: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        for process, row in self._totals.rows(self._model):
            if row.arm not in (SPLIT, STICKY):
                continue
            key, mine = (process, row.version, row.arm), row.version == self._version
            seen = self._seen.get(key)
            self._seen[key] = row
            sums[mine][0] += row.requests - (0 if seen is None else seen.requests)
            sums[mine][1] += row.failures - (0 if seen is None else seen.failures)
            for bin, count in row.bins.items():
                bins[mine][bin] += count - (0 if seen is None else seen.bins.get(bin, 0))
        version, others = (Observed(sums[mine][0], sums[mine][1], dict(+bins[mine])) for mine in (True, False))
        return version, others

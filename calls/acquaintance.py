"""`Acquaintance`: whether a gateway has heard what the cluster has, so that what it has not heard of is not there.

Broker and gateways may be back before workers are, and those load for a while. A gateway that called their models unknown
meanwhile would have clients give up: so it says that it does not know yet. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemas.registry import WorkerRecord

LOADING_PATIENCE_S = 30.0
"""How long workers that are still loading keep a gateway that has just begun from calling a model unknown."""


class Acquaintance:
    """See the module. It is over for good once all workers that are there have settled, and there is one."""

    def __init__(self) -> None:
        self._some_since_s: float | None = None
        self._is_whole = False

    def is_made(self, now_s: float, workers: Iterable[WorkerRecord], is_any_known: bool) -> bool:
        """Whether a model that nobody tells of is not there. `is_any_known`: some are known to be away.

        Without a worker that has settled nobody can know, later on as well.
        """
        there = [record for record in workers if not record.draining]
        if not is_any_known and not any(record.settled for record in there):
            return False
        if self._some_since_s is None:
            self._some_since_s = now_s
        is_late = now_s - self._some_since_s >= LOADING_PATIENCE_S
        self._is_whole = self._is_whole or is_late or all(record.settled for record in there)
        return self._is_whole

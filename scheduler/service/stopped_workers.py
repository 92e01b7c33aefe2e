"""`StoppedWorkers`: finds workers of this host that stand still, long before their heartbeats count as missing.

A worker that was stopped (SIGSTOP, a debugger, a frozen control group) keeps its connection, so nats-server notices
nothing. On its own host a scheduler can look at the process. It does so only once a heartbeat is late, and believes what
it sees twice: the process stands still both times and has used no processor time in between. A worker that is busy, or
short of processor time, is never taken for one that stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weir.bus.kv.registry import HEARTBEAT_INTERVAL_S, WorkerView
from weir.bus.naming.identity import shares_memory
from weir.runtime.processes.state import ProcessIdentity, ProcessState, look_at

LATE_S = HEARTBEAT_INTERVAL_S + 0.25
"""A worker without a heartbeat for this long is checked."""


class StoppedWorkers:
    """Decides which workers stand still. `look` returns the state of a process, None for one that cannot be seen."""

    def __init__(self, look: Callable[[ProcessIdentity], ProcessState | None] = look_at) -> None:
        self._look = look
        self._seen: dict[str, tuple[float, int]] = {}  # by worker: its last heartbeat, and its processor time

    def find(self, now_s: float, workers: Mapping[str, WorkerView]) -> list[str]:
        """Returns the workers that stand still. Called some times a second, with the time of the heartbeats' clock."""
        before, self._seen = self._seen, {}
        found: list[str] = []
        for worker, view in workers.items():
            if now_s - view.heard_s < LATE_S or not shares_memory(worker):
                continue
            record = view.record
            state = self._look(ProcessIdentity(record.pid, record.pid_namespace, record.started_ticks))
            if state is None or not state.stands_still:
                continue
            now = view.heard_s, state.cpu_ticks
            if before.get(worker) == now:
                found.append(worker)
            else:
                self._seen[worker] = now
        return found

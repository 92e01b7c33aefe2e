"""Which workers are taken for standing still, by what is seen of their processes."""

from __future__ import annotations

from collections.abc import Mapping

from weir.bus.kv.registry import WorkerView
from weir.bus.naming.identity import new_id
from weir.runtime.processes.state import ProcessIdentity, ProcessState
from weir.scheduler.service.stopped_workers import LATE_S, StoppedWorkers
from weir.schemas.wire.registry import WorkerRecord

HERE = new_id("worker")
ELSEWHERE = "worker-00000000-1"
STOPPED, FROZEN_LATER, RUNNING = ProcessState(True, 7), ProcessState(True, 8), ProcessState(False, 7)


class Host:
    """A host that shows one state for each process, and records which were looked at."""

    def __init__(self) -> None:
        self.state: ProcessState | None = None
        self.looked_at: list[ProcessIdentity] = []

    def look(self, process: ProcessIdentity) -> ProcessState | None:
        self.looked_at.append(process)
        return self.state


def workers(*names: str) -> Mapping[str, WorkerView]:
    views = {name: WorkerView(name, 0.0) for name in names}
    for name, view in views.items():
        view.record = WorkerRecord(name, 70, pid_namespace=3, started_ticks=5)
    return views


def found(host: Host, views: Mapping[str, WorkerView], *states: ProcessState | None) -> list[list[str]]:
    """What a finder reports at looks a quarter of a second apart, at each of which the host shows the next state."""
    finder, results = StoppedWorkers(host.look), []
    for number, state in enumerate(states):
        host.state = state
        results.append(finder.find(LATE_S + 0.25 * number, views))
    return results


def test_a_process_that_stands_still_twice_is_found() -> None:
    host = Host()
    assert found(host, workers(HERE), STOPPED, STOPPED) == [[], [HERE]]
    assert host.looked_at == [ProcessIdentity(70, 3, 5)] * 2


def test_a_process_that_has_run_in_between_is_not() -> None:
    assert found(Host(), workers(HERE), STOPPED, FROZEN_LATER, RUNNING, STOPPED) == [[], [], [], []]


def test_a_heartbeat_in_between_begins_anew() -> None:
    host, views = Host(), workers(HERE)
    finder = StoppedWorkers(host.look)
    host.state = STOPPED
    assert finder.find(LATE_S, views) == []
    views[HERE].heard_s = 0.1
    assert finder.find(LATE_S + 0.25, views) == []
    assert finder.find(LATE_S + 0.5, views) == [HERE]


def test_nobody_is_looked_at_before_a_heartbeat_is_late() -> None:
    host = Host()
    host.state = STOPPED
    finder = StoppedWorkers(host.look)
    assert [finder.find(now_s, workers(HERE)) for now_s in (0.5, 1.0, LATE_S - 0.01)] == [[], [], []]
    assert host.looked_at == []


def test_a_process_that_cannot_be_seen_or_is_on_another_host_is_not_found() -> None:
    assert found(Host(), workers(HERE), None, None) == [[], []]
    host = Host()
    assert found(host, workers(ELSEWHERE), STOPPED, STOPPED) == [[], []]
    assert host.looked_at == []

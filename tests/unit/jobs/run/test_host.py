"""`JobHost`: requests the leases of the jobs whose turn it is, and releases those of jobs that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from weir.jobs.records.folders import BatchRoots
from weir.jobs.records.record import DesiredState, Job, JobEntry, JobProgress, JobSpec, JobState
from weir.jobs.run.host import MAX_RUNNING, MAX_RUNNING_OF_MODEL, JobHost
from weir.jobs.run.run import RunContext


class Leases:
    """Notes which leases are requested; the test decides who holds them."""

    def __init__(self) -> None:
        self.requested: dict[str, Callable[[], None]] = {}

    def acquire(self, name: str, on_acquired: Callable[[], None], _on_lost: Callable[[], None]) -> None:
        self.requested[name] = on_acquired

    def release(self, name: str) -> None:
        del self.requested[name]

    def holds(self, _name: str) -> bool:
        return False


class Store:
    """Stands for `JobStore`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.jobs: dict[str, Job] = {}
        self.opened = asyncio.Event()
        self.opened.set()
        self.listeners: list[Callable[[str], None]] = []

    def on_change(self, listener: Callable[[str], None]) -> None:
        self.listeners.append(listener)

    def find(self, id: str) -> Job | None:
        return self.jobs.get(id)

    def all(self) -> list[Job]:
        return list(self.jobs.values())

    def add(self, id: str, model: str, **progress: Any) -> None:
        spec = JobSpec(model=model, inputs=(str(self.root / "in"),), output=str(self.root / id))
        self.jobs[id] = Job(JobEntry(id=id, spec=spec, created_ms=len(self.jobs)), JobProgress(**progress))
        self.changed(id)

    def changed(self, id: str) -> None:
        for listener in self.listeners:
            listener(id)


def host_of(root: Path) -> tuple[JobHost, Store, Leases]:
    store, leases = Store(root), Leases()
    roots = BatchRoots([str(root)])
    context = RunContext(owner_id="d", inference=cast(Any, None), catalog=cast(Any, None), roots=roots, attempts=5)
    return JobHost(cast(Any, store), cast(Any, leases), context), store, leases


async def test_few_jobs_of_a_model_run_at_a_time_and_the_oldest_first(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as background:
        host, store, leases = host_of(tmp_path)
        host.start(background)
        for number in range(MAX_RUNNING_OF_MODEL + 2):
            store.add(f"a{number}", "a")
        assert set(leases.requested) == {f"job.a{number}" for number in range(MAX_RUNNING_OF_MODEL)}
        for number in range(2 * MAX_RUNNING):
            store.add(f"b{number}", f"b{number}")
        assert len(leases.requested) == MAX_RUNNING
        await host.stop()


async def test_the_lease_of_a_job_that_has_ended_is_released_for_the_next_one(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as background:
        host, store, leases = host_of(tmp_path)
        host.start(background)
        for number in range(MAX_RUNNING_OF_MODEL + 1):
            store.add(f"a{number}", "a")
        last = f"job.a{MAX_RUNNING_OF_MODEL}"
        assert last not in leases.requested
        ended = store.jobs["a0"]
        store.jobs["a0"] = Job(ended.entry, JobProgress(state=JobState.SUCCEEDED))
        store.changed("a0")
        assert "job.a0" not in leases.requested
        assert last in leases.requested
        await host.stop()


async def test_jobs_outside_of_the_batch_roots_are_left_to_other_processes(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as background:
        host, store, leases = host_of(tmp_path / "root")
        host.start(background)
        store.root = tmp_path / "elsewhere"
        store.add("a", "a")
        assert not leases.requested
        await host.stop()


async def test_a_stopped_host_requests_nothing(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as background:
        host, store, leases = host_of(tmp_path)
        host.start(background)
        await host.stop()
        store.add("a", "a")
        assert not leases.requested
        assert store.jobs["a"].entry.wanted is DesiredState.RUN

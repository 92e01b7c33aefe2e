"""What nobody foresaw ends one item of a job, or one job, and never the gateway; jobs are looked at in one thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weir.calls.catalog import ServedModel
from weir.jobs.api import service
from weir.jobs.api.service import Asker, JobService
from weir.jobs.formats.items import ItemResult, JobItem
from weir.jobs.records.folders import BatchRoots
from weir.jobs.records.record import Job, JobEntry, JobProgress, JobSpec
from weir.jobs.records.store import no_job
from weir.jobs.run.plan import PlanLimits
from weir.jobs.run.runner import ItemReader, ItemRunner
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, internal
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor

BAD = 3
COUNT = 10


class Model:
    """Answers each request with its input; `faulty` says where it raises what nobody foresaw."""

    def __init__(self, faulty: str) -> None:
        self._faulty = faulty
        self.abandoned = 0

    def submit(self, request: InferRequest, on_response: Any, traffic_key: str) -> Any:
        is_bad = request.id == str(BAD)
        if is_bad and self._faulty == "submit":
            raise RuntimeError("raised by the test")
        outputs: Any = 5 if is_bad else request.inputs  # 5: no outputs that anybody could look at
        response = InferResponse("m", "1", request.id, outputs)

        def deliver() -> None:
            try:
                on_response(response, True)
            except TypeError:
                on_response(internal("unexpected"), True)  # once more, as `ResponseDispatcher` does

        asyncio.get_running_loop().call_soon(deliver)
        return SimpleNamespace(request=request)

    def cancel(self, _pending: Any) -> None:
        self.abandoned += 1


@pytest.mark.parametrize("faulty", ["submit", "answer"])
async def test_what_nobody_foresaw_fails_one_item(faulty: str) -> None:
    source: Any = SimpleNamespace(
        items=lambda start: iter(
            JobItem(number, str(number), [Tensor("IN", "INT8", [1], b"1")]) for number in range(COUNT)
        )
    )
    written: list[ItemResult] = []

    def write(results: Sequence[ItemResult]) -> int:
        written.extend(results)
        return sum(result.error is not None for result in results)

    with ThreadPoolExecutor(2) as threads:
        reader = ItemReader(source, threads, start=0)
        runner = ItemRunner(JobSpec(model="m"), cast(Any, Model(faulty)), reader, write, threads, 0, PlanLimits())
        await asyncio.wait_for(runner.run(), 10)
    assert [result.number for result in written] == list(range(COUNT))
    assert [result.number for result in written if result.error is not None] == [BAD]


class Jobs:
    """Stands for `JobStore`; notes in which threads its jobs are looked at."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.jobs: dict[str, Job] = {}
        self.read: list[str] = []
        self.opened = asyncio.Event()
        self.opened.set()

    def all(self) -> list[Job]:
        self.threads.add(threading.current_thread().name)
        return list(self.jobs.values())

    def get(self, id: str) -> Job:
        if id not in self.jobs:
            raise no_job(id)
        return self.jobs[id]

    def find(self, id: str) -> Job | None:
        return self.jobs.get(id)

    async def refresh(self, id: str) -> None:
        self.read.append(id)

    async def create(self, entry: JobEntry) -> None:
        self.jobs[entry.id] = Job(entry, JobProgress())


def service_of(root: Path, jobs: Jobs) -> JobService:
    config = ModelConfig.model_validate({"name": "m", "backend": "python"})
    catalog: Any = SimpleNamespace(resolve=lambda name, version: ServedModel("m", config, [1], {}))
    return JobService(cast(Any, jobs), BatchRoots([str(root)]), catalog)


def job_in(folder: Path) -> dict[str, str]:
    (folder / "in.jsonl").write_text(json.dumps({"IN": [1]}))
    return {"model": "m", "input": str(folder / "in.jsonl"), "output": str(folder / "out")}


async def test_jobs_are_looked_at_in_the_event_loop_alone(tmp_path: Path) -> None:
    jobs = Jobs()
    await service_of(tmp_path, jobs).submit(job_in(tmp_path))
    assert jobs.threads == {threading.main_thread().name}


async def test_a_job_that_comes_before_the_jobs_were_read_waits_for_them(tmp_path: Path) -> None:
    jobs = Jobs()
    jobs.opened.clear()
    submission = asyncio.create_task(service_of(tmp_path, jobs).submit(job_in(tmp_path)))
    await asyncio.sleep(0)
    assert not jobs.jobs
    assert not submission.done()
    jobs.opened.set()
    assert (await submission)["id"] in jobs.jobs


async def test_a_job_is_rejected_if_the_jobs_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "OPEN_TIMEOUT_S", 0.01)
    jobs = Jobs()
    jobs.opened.clear()
    with pytest.raises(WeirError, match="the jobs have not been read from the message broker yet") as rejected:
        await service_of(tmp_path, jobs).submit(job_in(tmp_path))
    assert rejected.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("verb", ["status", "result", "cancel", "retry", "delete"])
async def test_the_job_of_another_owner_takes_as_much_work_as_one_that_does_not_exist(
    tmp_path: Path, verb: str
) -> None:
    jobs = Jobs()
    jobs.jobs["batch-a"] = Job(
        JobEntry(id="batch-a", spec=JobSpec(model="m"), created_ms=0, owner="key alice"), JobProgress()
    )
    stranger = Asker("key bob", lambda entry: entry.owner == "key bob", lambda _model: None)
    texts = []
    for id in ("batch-a", "batch-b"):
        try:
            await getattr(service_of(tmp_path, jobs), verb)(id, stranger)
            texts.append("")
        except WeirError as error:
            texts.append(error.message.replace(id, ""))
    assert texts[0] == texts[1]
    # One record is read of the broker for each, and none that is there: to decode it would take time.
    assert len(jobs.read) == 2
    assert "batch-a" not in jobs.read
    assert "batch-a" in jobs.jobs

"""The state of a model over loads, failed loads and unloads, how it is published, and the order of operations."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from nats.errors import ConnectionClosedError, MaxPayloadError

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, invalid
from weir.schemas.wire.registry import UNLOADED, ModelRecord, ModelState, VersionRecord
from weir.worker.lifecycle.loader import LoadResult
from weir.worker.lifecycle.model_state import ManagedModel, ManagedModels, OperationTasks, RecordPublisher

LOADING, READY, UNLOADING, UNAVAILABLE = ModelState


@dataclass(eq=False)
class Version:
    """A loaded version with two instances."""

    instances: list[Any] = field(default_factory=lambda: [None, None])

    @property
    def record(self) -> VersionRecord:
        return VersionRecord(READY, instances=len(self.instances), load_duration_s=1.5)


def loaded(*numbers: int, **kept: Version) -> LoadResult:
    served: dict[int, Any] = {number: Version() for number in numbers} | {int(n[1:]): v for n, v in kept.items()}
    return LoadResult("m", ModelConfig(name="m"), served=served)


def failed(number: int) -> LoadResult:
    return LoadResult("m", records={number: VersionRecord(UNAVAILABLE, "Internal: no")}, error=invalid("no"))


def model() -> ManagedModel:
    return ManagedModel("m", clock_ns=lambda: 5)


def states(m: ManagedModel) -> dict[int, tuple[ModelState, str, int]]:
    return {number: (row.state, row.reason, row.instances) for number, row in m.record().versions.items()}


def test_a_model_that_was_never_loaded_is_blank():
    m = model()
    assert m.is_blank
    assert (m.record().versions, m.record().config, m.failure) == ({}, None, "")


def test_a_reload_replaces_changed_versions_keeps_equal_ones_and_retires_the_rest():
    m = model()
    first = loaded(1, 2, 3)
    assert m.adopt(first) == []
    old = dict(first.served)
    assert m.adopt(loaded(3, 4, v2=old[2])) == [old[3]]
    assert states(m) == {1: (UNLOADING, "", 2), 2: (READY, "", 2), 3: (READY, "", 2), 4: (READY, "", 2)}
    assert m.served[1] is old[1]
    del m.served[1]
    assert states(m)[1] == (UNLOADING, "", 0)
    m.record_unloaded({1})
    assert states(m)[1] == (UNAVAILABLE, UNLOADED, 0)
    assert m.failure == ""


def test_a_failed_reload_leaves_the_serving_versions():
    m = model()
    m.adopt(loaded(1))
    m.reject(failed(1))
    m.error = invalid("why")
    assert states(m) == {1: (READY, "", 2)}
    assert (m.record().error_code, m.record().error) == (4, "why")
    m.reject(failed(2))
    assert states(m)[2] == (UNAVAILABLE, "Internal: no", 0)
    assert m.failure == "Internal: no"
    m.adopt(loaded(1))
    assert list(states(m)) == [1], "earlier failures are obsolete"


def test_an_unload_ends_with_records_that_do_not_count_as_failures():
    m = model()
    m.adopt(loaded(1, 2))
    m.in_force = 9
    m.retire()
    assert not m.is_serving
    assert m.record().in_force == 0
    assert {state for state, _, _ in states(m).values()} == {UNLOADING}
    m.served.clear()
    m.record_unloaded({1, 2})
    assert states(m) == {1: (UNAVAILABLE, UNLOADED, 0), 2: (UNAVAILABLE, UNLOADED, 0)}


def test_a_load_overtakes_an_unload():
    m = model()
    m.adopt(loaded(1))
    m.retire()
    (replaced,) = m.adopt(loaded(1))
    assert m.served[1] is not replaced
    assert states(m) == {1: (READY, "", 2)}
    m.record_unloaded({1})  # the cancelled drain ends
    assert states(m) == {1: (READY, "", 2)}


def test_an_unload_that_ends_late_does_not_end_a_second_unload():
    m = model()
    m.adopt(loaded(1))
    m.retire()
    m.served.clear()
    m.result = None
    m.adopt(loaded(1))
    m.retire()
    m.record_unloaded({1})  # the first
    assert {state for state, _, _ in states(m).values()} == {UNLOADING}
    m.served.clear()
    m.record_unloaded({1})
    assert states(m) == {1: (UNAVAILABLE, UNLOADED, 0)}


def test_a_model_that_moves_is_reported_elsewhere_until_its_next_failure():
    m = model()
    m.adopt(loaded(1))
    m.is_moving = True
    m.retire()
    assert m.record().elsewhere
    m.served.clear()
    m.record_unloaded({1})
    m.reject(failed(1))
    assert not m.record().elsewhere, "a later failure here is a failure"


def test_a_rejected_reload_is_reported_until_a_load_succeeds() -> None:
    m = model()
    m.reject(failed(1))
    assert m.record().rejected == "", "nothing serves, so the version has the reason"
    m.adopt(loaded(1))
    m.reject(failed(1))
    assert m.record().rejected == "Internal: no"
    assert states(m) == {1: (READY, "", 2)}
    m.adopt(loaded(1))
    assert m.record().rejected == ""


def test_an_operation_that_raises_is_a_failure_and_serving_versions_stay() -> None:
    m = model()
    m.requested_revision = 7
    m.fail(RuntimeError("oops"))
    assert (m.record().reason, m.record().revision) == ("Internal: RuntimeError: oops", 7)
    assert m.record().error == "load failed for model 'm': RuntimeError: oops"
    m.adopt(loaded(1))
    m.fail(RuntimeError("oops"))
    assert states(m) == {1: (READY, "", 2)}
    assert m.record().rejected == "Internal: RuntimeError: oops"


# Publishing records


class Registry:
    """A registry that stores records of up to 1000 bytes while `is_available`."""

    def __init__(self) -> None:
        self.is_available = True
        self.written: list[ModelRecord] = []
        self.removed: list[str] = []

    async def write_model(self, record: ModelRecord) -> None:
        if not self.is_available:
            raise ConnectionClosedError
        if len(record.pack()) > 1000:
            raise MaxPayloadError
        self.written.append(record)

    async def remove_model(self, name: str) -> None:
        self.removed.append(name)

    async def describe(self, **changes: Any) -> None:
        raise NotImplementedError


READY_RECORD = ModelRecord("m", {1: VersionRecord(READY, instances=1)}, {"name": "m"}, {"y": ["cat"]})


async def test_a_record_that_is_too_large_for_a_message_is_published_as_unavailable() -> None:
    registry = Registry()
    records = RecordPublisher(registry)
    await records.write(READY_RECORD)
    large = ModelRecord("m", READY_RECORD.versions, READY_RECORD.config, {"y": ["x" * 2000]})
    await records.write(large)
    first, second = registry.written
    assert first == READY_RECORD
    assert (second.versions[1].state, second.labels) == (UNAVAILABLE, {})
    assert "larger than a message of NATS may be" in second.versions[1].reason
    assert second.error_code == ErrorCode.INVALID_ARG.number


async def test_a_broker_that_is_away_does_not_fail_the_operation() -> None:
    registry = Registry()
    registry.is_available = False
    await RecordPublisher(registry).write(READY_RECORD)
    assert registry.written == []


async def test_the_record_of_a_model_without_versions_is_removed_after_it_was_written() -> None:
    registry = Registry()
    m = model()
    m.error, m.revision = invalid("why"), 3
    await RecordPublisher(registry).publish(m)
    assert [record.error for record in registry.written] == ["why"]
    assert registry.removed == ["m"]


# Operations


async def test_an_operation_that_raises_fails_only_its_own_model() -> None:
    registry = Registry()
    models = ManagedModels(RecordPublisher(registry))

    async def operate(name: str) -> str:
        async with models.turn(name):
            if name == "broken":
                raise RuntimeError("oops")
        return name

    assert await asyncio.gather(*map(operate, ("good", "broken", "other"))) == ["good", "broken", "other"]
    assert [record.reason for record in registry.written] == ["Internal: RuntimeError: oops"]
    assert models.failures(["good", "broken"]) == {"broken": "Internal: RuntimeError: oops"}
    async with models.turn("broken") as broken:
        assert broken.reason, "the next operation runs"


async def test_models_without_state_are_removed() -> None:
    models = ManagedModels(RecordPublisher(Registry()))
    async with models.turn("m"):
        assert models.find("m") is not None
    assert models.find("m") is None


async def test_a_task_that_raises_does_not_end_the_others() -> None:
    tasks = OperationTasks()
    ended: list[str] = []

    async def fail() -> None:
        raise RuntimeError("injected")

    async def succeed() -> None:
        ended.append("operation")

    async with asyncio.TaskGroup() as background:
        tasks.start(background)
        await asyncio.gather(tasks.operate(fail()), tasks.clean_up(fail()), tasks.operate(succeed()))
    assert ended == ["operation"]


async def test_shutdown_cancels_operations_and_waits_for_cleanups() -> None:
    tasks = OperationTasks()
    ended: list[str] = []

    async def clean_up() -> None:
        await asyncio.sleep(0.01)
        ended.append("cleanup")

    async with asyncio.TaskGroup() as background:
        tasks.start(background)
        assert tasks.is_open
        operation = tasks.operate(asyncio.sleep(60))
        tasks.clean_up(clean_up())
        await asyncio.sleep(0)
        tasks.cancel_operations()
        assert not tasks.is_open
        await tasks.wait_for_cleanups(5)
        assert operation.cancelled() or operation.done()
    assert ended == ["cleanup"]

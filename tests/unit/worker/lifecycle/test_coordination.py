"""Drains end when the schedulers of all partitions agree; rolling reloads follow the order of the worker names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

import weir.worker.lifecycle.coordination
from weir.bus.nats.connection import Message
from weir.schemas.core.errors import ErrorCode
from weir.schemas.wire.model_control import DrainMessage
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord
from weir.worker.lifecycle.coordination import DrainCoordinator, first_failure, preceding_records


class Owners:
    """A bus on which the owner of each partition replies with the versions it agrees to in `agreed`; None: no reply."""

    is_connected = True

    def __init__(self) -> None:
        self.agreed: dict[int, list[int] | None] = {}
        self.requested: list[list[int]] = []
        self._callback: Callable[[Message], None] | None = None

    async def subscribe(self, subject: str, callback: Callable[[Message], None]) -> None:
        self._callback = callback

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        assert (subject, reply) == ("drain.m", "drained.w")
        self.requested.append(DrainMessage.unpack(data).versions)
        assert self._callback is not None
        for partition, versions in self.agreed.items():
            if versions is not None:
                self._callback(Message(reply, "", DrainMessage.of("scheduler", "m", versions, partition).pack(), ""))


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"SETTLE_S": 0.0, "_ASK_INTERVAL_S": 0.001, "DRAIN_TIMEOUT_S": 0.05}.items():
        monkeypatch.setattr(weir.worker.lifecycle.coordination, name, seconds)


async def start_drains(owners: Owners) -> DrainCoordinator:
    drains = DrainCoordinator(cast(Any, owners), "w")
    await drains.start()
    return drains


async def test_a_drain_waits_for_every_partition() -> None:
    owners = Owners()
    owners.agreed = {0: [1, 2], 1: [1], 2: []}
    waiting = asyncio.create_task((await start_drains(owners)).wait("m", {1, 2}, 3))
    while len(owners.requested) < 100:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
    assert not waiting.done(), "all have replied, so none has timed out"
    owners.agreed[1] = [2]
    owners.agreed[2] = [1]
    await asyncio.sleep(0.01)
    owners.agreed[2] = [2]
    await waiting
    assert [2] in owners.requested


async def test_a_partition_without_an_owner_times_out(caplog: pytest.LogCaptureFixture) -> None:
    owners = Owners()
    owners.agreed = {0: [1], 1: None, 5: [1]}
    await (await start_drains(owners)).wait("m", {1}, 2)
    assert "no scheduler has replied" in caplog.text


# Rolling reloads


def record(revision: int, state: ModelState = ModelState.READY, code: int = 0, elsewhere: bool = False) -> ModelRecord:
    version = VersionRecord(state)
    return ModelRecord("m", {1: version}, revision=revision, error_code=code, error="why", elsewhere=elsewhere)


def test_workers_with_smaller_names_that_serve_the_model_reload_first() -> None:
    records = {"c": record(1), "a": record(2), "b": record(3, ModelState.LOADING), "d": record(4)}
    assert [one.revision for one in preceding_records("d", records)] == [2, 1]
    assert preceding_records("a", records) == []


def test_a_failure_of_this_operation_stops_the_reload() -> None:
    bad = ErrorCode.INVALID_ARG.number
    failure = first_failure([record(5), record(5, code=bad)], 5)
    assert failure is not None
    assert (failure.code, failure.message) == (ErrorCode.INVALID_ARG, "why")
    assert first_failure([record(4, code=bad)], 5) is None, "it is the failure of an earlier operation"
    assert first_failure([record(5, code=bad, elsewhere=True)], 5) is None, "the model does not belong on that worker"
    assert first_failure([record(5, code=ErrorCode.INTERNAL.number)], 5) is None, "that worker has no such folder"

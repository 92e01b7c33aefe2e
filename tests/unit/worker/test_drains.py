"""When a worker may unload: all partitions of the model must have let go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

import worker.drains
from bus.connection import Message
from schemas.drain import pack_drain, unpack_drain
from worker.drains import Drains


class Owners:
    """A bus on which the owner of each partition answers: `frees` tells which versions each lets go, None for silence."""

    is_connected = True

    def __init__(self) -> None:
        self.frees: dict[int, list[int] | None] = {}
        self.asked: list[list[int]] = []
        self._callback: Callable[[Message], None] | None = None

    async def subscribe(self, subject: str, callback: Callable[[Message], None]) -> None:
        self._callback = callback

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        assert (subject, reply) == ("drain.m", "drained.w")
        self.asked.append(unpack_drain(data).versions)
        assert self._callback is not None
        for partition, versions in self.frees.items():
            if versions is not None:
                self._callback(Message(reply, "", pack_drain("scheduler", "m", versions, partition), ""))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"SETTLE_S": 0.0, "_ASK_INTERVAL_S": 0.001, "PATIENCE_S": 0.05}.items():
        monkeypatch.setattr(worker.drains, name, seconds)


async def asking(owners: Owners) -> Drains:
    drains = Drains(cast(Any, owners), "w")
    await drains.start()
    return drains


async def test_each_partition_must_let_go() -> None:
    owners = Owners()
    owners.frees = {0: [1, 2], 1: [1], 2: []}
    waiting = asyncio.create_task((await asking(owners)).wait("m", {1, 2}, 3))
    while len(owners.asked) < 100:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
    assert not waiting.done(), "nobody lost patience: all have answered"
    owners.frees[1] = [2]
    owners.frees[2] = [1]
    await asyncio.sleep(0.01)
    owners.frees[2] = [2]
    await asyncio.wait_for(waiting, 5)
    assert [2] in owners.asked


async def test_a_partition_that_nobody_owns_is_not_waited_for_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    owners = Owners()
    owners.frees = {0: [1], 1: None, 5: [1]}
    await asyncio.wait_for((await asking(owners)).wait("m", {1}, 2), 5)
    assert "no scheduler answers" in caplog.text

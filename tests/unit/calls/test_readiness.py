"""Readiness queries to fake workers over a fake bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bus.nats.connection import Message
from weir.calls import readiness as module
from weir.calls.readiness import Readiness
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.model_control import ReadinessQuery, ReadinessReply
from weir.schemas.wire.registry import ModelState, VersionRecord


class AskedBus:
    """Answers as `react(worker)` says: with these bytes, or not at all (None)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, int]]] = []
        self.react: Callable[[str], bytes | None] = lambda worker: ReadinessReply(True).pack()
        self._callback: Callable[[Message], None] = lambda message: None

    async def subscribe(self, subject: str, callback: Callable[[Message], None]) -> None:
        assert subject == "ready.asker.*"
        self._callback = callback

    def publish(self, subject: str, data: bytes, reply: str) -> None:
        worker = subject.removeprefix("readiness.")
        query = ReadinessQuery.unpack(data)
        self.asked.append((worker, (query.model, query.version)))
        asyncio.get_running_loop().call_later(0.01, self.answer, worker, reply)

    def answer(self, worker: str, reply: str) -> None:
        data = self.react(worker)
        if data is not None:
            self._callback(Message(reply, "", data, ""))


class Told:
    """What the registry tells of version 1 of model `m`, by worker; it is a catalog as far as is needed here."""

    def __init__(self, is_strict: bool = True, **rows: VersionRecord) -> None:
        self.is_strict = is_strict
        self.rows = rows

    def is_ready(self, name: str, version: str) -> bool:
        return name == "m" and any(not row.problem for row in self.rows.values())

    def resolve(self, name: str, version: str) -> Any:
        return SimpleNamespace(name=name, latest="1", versions=[1])

    def ready_replicas(self, identity: str, version: int) -> list[tuple[str, VersionRecord]]:
        return list(self.rows.items())

    def server_ready(self) -> bool:
        return self.is_ready("m", "")

    def served(self) -> list[Any]:
        return [self.resolve("m", "")]


ASKS = VersionRecord(ModelState.READY, instances=1, checks_readiness=True)
SILENT = VersionRecord(ModelState.READY, instances=1)
AWAY = VersionRecord(ModelState.READY, problem="its process has died", checks_readiness=True)


async def opened(told: Told) -> tuple[Readiness, AskedBus]:
    bus = AskedBus()
    readiness = Readiness(bus, "asker", told)  # type: ignore[arg-type]
    await readiness.start()
    return readiness, bus


async def test_models_without_a_check_are_not_queried() -> None:
    readiness, bus = await opened(Told(a=SILENT, b=ASKS))
    assert await readiness.is_ready("m", "")
    assert await readiness.is_server_ready()
    assert not await readiness.is_ready("other", "")
    assert bus.asked == []


async def test_one_ready_worker_is_enough_and_draining_ones_are_not_queried() -> None:
    readiness, bus = await opened(Told(a=ASKS, b=ASKS, c=AWAY))
    bus.react = lambda worker: ReadinessReply(worker == "b").pack()
    assert await readiness.is_ready("m", "1")
    assert await readiness.is_server_ready()
    assert {worker for worker, _ in bus.asked} == {"a", "b"}
    assert {question for _, question in bus.asked} == {("m", 1)}


@pytest.mark.parametrize("answer", [ReadinessReply(False).pack(), b"", None, b"garbage"])
async def test_negative_missing_and_malformed_replies_mean_not_ready(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESPONSE_TIMEOUT_S", 0.1)
    readiness, bus = await opened(Told(a=ASKS))
    bus.react = lambda worker: answer
    assert not await readiness.is_ready("m", "")
    assert not await readiness.is_server_ready()
    assert readiness.malformed_messages == (2 if answer == b"garbage" else 0)


async def test_without_strict_readiness_no_model_is_queried() -> None:
    readiness, bus = await opened(Told(is_strict=False, a=ASKS))
    bus.react = lambda worker: ReadinessReply(False).pack()
    assert await readiness.is_server_ready()
    assert bus.asked == []


async def test_requests_during_a_query_share_the_next_one() -> None:
    readiness, bus = await opened(Told(a=ASKS))
    first = asyncio.create_task(readiness.is_ready("m", ""))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    others = [asyncio.create_task(readiness.is_ready("m", "")) for _ in range(20)]
    assert all(await asyncio.gather(first, *others))
    assert len(bus.asked) == 2


def test_messages_survive_packing() -> None:
    query = ReadinessQuery("m", 3)
    assert ReadinessQuery.unpack(query.pack()) == query
    assert ReadinessReply.unpack(ReadinessReply(True).pack()).is_ready is True


@given(
    st.binary(max_size=20)
    | st.lists(st.none() | st.booleans() | st.integers(-9, 9) | st.text(), max_size=4).map(msgpack.packb)
)
def test_anything_else_is_malformed(data: bytes) -> None:
    for unpack in (ReadinessReply.unpack, ReadinessQuery.unpack):
        try:
            unpack(data)
        except MalformedMessage:
            continue
        assert data[0] in range(0x92, 0x95), "an array of at least the message's fields; more are of a later release"

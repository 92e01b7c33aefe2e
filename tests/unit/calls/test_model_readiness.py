"""Questions whether a model is ready, to workers that are only numbers, over a bus that is a list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.connection import Message
from calls import readiness as module
from calls.readiness import Readiness
from schemas.readiness import (
    pack_readiness,
    pack_readiness_question,
    unpack_readiness,
    unpack_readiness_question,
)
from schemas.registry import ModelState, VersionRecord
from schemas.wire import MalformedMessage


class AskedBus:
    """Answers as `react(worker)` says: with these bytes, or not at all (None)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, int]]] = []
        self.react: Callable[[str], bytes | None] = lambda worker: pack_readiness(True)
        self._callback: Callable[[Message], None] = lambda message: None

    async def subscribe(self, subject: str, callback: Callable[[Message], None]) -> None:
        assert subject == "ready.asker.*"
        self._callback = callback

    def publish(self, subject: str, data: bytes, reply: str) -> None:
        worker = subject.removeprefix("readiness.")
        self.asked.append((worker, unpack_readiness_question(data)))
        asyncio.get_running_loop().call_later(0.01, self.answer, worker, reply)

    def answer(self, worker: str, reply: str) -> None:
        data = self.react(worker)
        if data is not None:
            self._callback(SimpleNamespace(subject=reply, data=data))  # type: ignore[arg-type]


class Told:
    """What the registry tells of version 1 of model `m`, by worker; it is a catalog as far as is needed here."""

    def __init__(self, is_strict: bool = True, **rows: VersionRecord) -> None:
        self.is_strict = is_strict
        self.rows = rows

    def is_ready(self, name: str, version: str) -> bool:
        return name == "m" and any(not row.problem for row in self.rows.values())

    def resolve(self, name: str, version: str) -> Any:
        return SimpleNamespace(name=name, latest="1", versions=[1])

    def told_of(self, identity: str, version: int) -> list[tuple[str, VersionRecord]]:
        return list(self.rows.items())

    def server_ready(self) -> bool:
        return self.is_ready("m", "")

    def served(self) -> list[Any]:
        return [self.resolve("m", "")]


ASKS = VersionRecord(ModelState.READY, instances=1, asks=True)
SILENT = VersionRecord(ModelState.READY, instances=1)
AWAY = VersionRecord(ModelState.READY, problem="its process has died", asks=True)


async def opened(told: Told) -> tuple[Readiness, AskedBus]:
    bus = AskedBus()
    readiness = Readiness(bus, "asker", told)  # type: ignore[arg-type]
    await readiness.start()
    return readiness, bus


async def test_models_without_a_say_are_not_asked() -> None:
    readiness, bus = await opened(Told(a=SILENT, b=ASKS))
    assert await readiness.is_ready("m", "")
    assert await readiness.is_server_ready()
    assert not await readiness.is_ready("other", "")
    assert bus.asked == []


async def test_one_worker_that_says_yes_is_enough_and_those_away_are_not_asked() -> None:
    readiness, bus = await opened(Told(a=ASKS, b=ASKS, c=AWAY))
    bus.react = lambda worker: pack_readiness(worker == "b")
    assert await readiness.is_ready("m", "1")
    assert await readiness.is_server_ready()
    assert {worker for worker, _ in bus.asked} == {"a", "b"}
    assert {question for _, question in bus.asked} == {("m", 1)}


@pytest.mark.parametrize("answer", [pack_readiness(False), b"", None, b"garbage"])
async def test_no_silence_and_garbage_are_no(answer: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.1)
    readiness, bus = await opened(Told(a=ASKS))
    bus.react = lambda worker: answer
    assert not await readiness.is_ready("m", "")
    assert not await readiness.is_server_ready()
    assert readiness.malformed_messages == (2 if answer == b"garbage" else 0)


async def test_a_server_that_is_not_strict_asks_nobody() -> None:
    readiness, bus = await opened(Told(is_strict=False, a=ASKS))
    bus.react = lambda worker: pack_readiness(False)
    assert await readiness.is_server_ready()
    assert bus.asked == []


async def test_who_asks_meanwhile_shares_the_next_question() -> None:
    readiness, bus = await opened(Told(a=ASKS))
    first = asyncio.create_task(readiness.is_ready("m", ""))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    others = [asyncio.create_task(readiness.is_ready("m", "")) for _ in range(20)]
    assert all(await asyncio.gather(first, *others))
    assert len(bus.asked) == 2


def test_messages_come_out_as_they_went_in() -> None:
    assert unpack_readiness_question(pack_readiness_question("m", 3)) == ("m", 3)
    assert unpack_readiness(pack_readiness(True)) is True


@given(
    st.binary(max_size=20)
    | st.lists(st.none() | st.booleans() | st.integers(-9, 9) | st.text(), max_size=4).map(msgpack.packb)
)
def test_anything_else_is_malformed(data: bytes) -> None:
    for unpack in (unpack_readiness, unpack_readiness_question):
        try:
            unpack(data)
        except MalformedMessage:
            continue
        assert data[0] in (0x92, 0x93)

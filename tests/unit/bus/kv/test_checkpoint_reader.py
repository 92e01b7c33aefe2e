"""What is found of a sequence whose scheduler was lost; with a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from weir.bus.kv import sequence_states
from weir.bus.kv.sequence_states import PIECE_BYTES, CheckpointReader, SequenceStates, StoredSequence
from weir.bus.links.framing import Outgoing
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.schemas.core.requests import SEQUENCE_START


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


class Bucket:
    """The bucket, as a worker writes it and a scheduler reads it. `every` is 3."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.states = SequenceStates(bus)
        self.reader = CheckpointReader(bus)

    async def write(self, messages: list[Outgoing]) -> None:
        for subject, data in messages:
            self._bus.publish(subject, data)
        await self._bus.flush()

    async def ran(self, id: int | str, *numbers: int, run: int = 1) -> None:
        """These requests of a sequence have run: each is key `number` of gateway `g`."""
        key = subjects.sequence_key("m", 1, id, "s", run)
        for number in numbers:
            if number % 3:
                await self.write(self.states.requested(key, number, 3, b"body %d" % number, ("g", number)))
            else:
                await self.write(self.states.written(key, number, 3, b"state", ("g", number)))

    async def find(self, id: int | str, number: int = 0) -> StoredSequence | None:
        found = await self.reader.find("m", 1, id, 3, number)
        return found and found._replace(age_us=0)


@asynccontextmanager
async def bucket(nats: EmbeddedNats) -> AsyncIterator[Bucket]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        made = Bucket(bus)
        await asyncio.to_thread(made.states.prepare)
        yield made
        await bus.close()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_states, "FETCH_TIMEOUT_S", 0.1)


async def test_a_checkpoint_and_the_requests_since_are_found(nats: EmbeddedNats) -> None:
    async with bucket(nats) as to:
        await to.ran(1, 1)
        first = StoredSequence(("s", 1), 0, ("g", 1), 0, [(SEQUENCE_START, b"body 1")])
        assert await to.find(1) == first
        await to.ran(1, 2, 3)
        assert await to.find(1) == StoredSequence(("s", 1), 3, ("g", 3), 0, [])
        await to.ran(1, 4, 5, 6, 7, 8)
        since = [(0, b"body 7"), (0, b"body 8")]
        assert await to.find(1, 8) == StoredSequence(("s", 1), 6, ("g", 8), 0, since)
        assert await to.find("1") is None, "a text is another id than a number"
        assert await to.find(2) is None


async def test_the_sequence_that_ran_last_is_found(nats: EmbeddedNats) -> None:
    """An earlier one of the same id was left without an end."""
    async with bucket(nats) as to:
        await to.ran("id", *range(1, 8))
        await to.ran("id", 1, 2, run=2)
        found = await to.find("id")
        assert found is not None
        assert (found.origin, found.checkpoint, len(found.requests)) == (("s", 2), 0, 2)


async def test_what_is_not_there_yet_is_waited_for(nats: EmbeddedNats) -> None:
    async with bucket(nats) as to:
        await to.ran(3, 1, 2, 3)
        finding = asyncio.create_task(to.find(3, 4))
        await asyncio.sleep(0)
        await to.ran(3, 4)
        found = await finding
        assert found is not None
        assert found.last == ("g", 4)
        assert await to.find(3, 5) is None


async def test_a_sequence_that_can_not_continue_is_not_found(nats: EmbeddedNats) -> None:
    async with bucket(nats) as to:
        await to.ran(4, 1, 2, 3)
        key = subjects.sequence_key("m", 1, 4, "s", 1)
        assert to.states.requested(key, 4, 3, bytes(PIECE_BYTES + 1), ("g", 4)) == to.states.broken(key)
        await to.write(to.states.broken(key))
        assert await to.find(4) is None
        await to.ran(5, 1, 3, 5)
        assert await to.find(5) is None, "the fourth request is missing"
        await to.ran(6, 1)
        await to.write(to.states.removed(subjects.sequence_key("m", 1, 6, "s", 1)))
        assert await to.find(6) is None


async def test_garbage_is_not_found(nats: EmbeddedNats, caplog: pytest.LogCaptureFixture) -> None:
    async with bucket(nats) as to:
        await to.write([(subjects.sequence_state(subjects.sequence_key("m", 1, 9, "s", 1), 0, 0), b"garbage")])
        assert await to.find(9) is None
        assert "could not be read" in caplog.text

"""`StoredResults` lets in as many requests of an owner as its limit leaves, whatever else is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.errors import NoRespondersError

from weir.bus.naming import durable_subjects as subjects
from weir.durable.api.acceptance import AsyncRequestIds
from weir.durable.api.errors import StatusError
from weir.durable.api.stored_results import MAX_AGE_S, REST, ResultsLimit, StoredResults
from weir.schemas.core.errors import ErrorCode, WeirError

IDS = AsyncRequestIds(lambda: b"s" * 32)


def full() -> WeirError:
    return WeirError(ErrorCode.RESOURCE_EXHAUSTED, "full")


class Streams:
    """What is stored, and a clock that goes on while the lists are read."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.reading_takes_s = 0.0
        self.waiting: set[str] = set()
        self.kept: set[str] = set()
        self.readings = 0
        self.is_away = False
        self.while_reading: Callable[[], Awaitable[None]] | None = None
        self.counts = StoredResults(self, IDS.group, IDS.group_of, lambda: self.now_s)

    async def subject_counts(self, stream: str, filter: str) -> dict[str, int]:
        if self.is_away:
            raise NoRespondersError
        self.readings += 1
        self.now_s += self.reading_takes_s / 2
        stored = {subjects.QUEUE_STREAM: self.waiting, subjects.RESULT_STREAM: self.kept}[stream]
        told = dict.fromkeys(stored, 1)
        if self.while_reading is not None:
            meanwhile, self.while_reading = self.while_reading, None
            await meanwhile()
        return told

    async def store(self, owner: str, limit: int, version: str = "") -> str:
        """Stores a request; returns its id, "" if it was refused."""
        id = IDS.new(owner)
        try:
            async with self.counts.room(ResultsLimit(owner, limit, full)):
                self.waiting.add(subjects.job_event("m", id, version))
        except WeirError as error:
            return error.message.replace("full", "")
        return id

    def end(self, id: str) -> None:
        """It has its record; the stream of requests forgets it a moment later."""
        self.kept.add(subjects.result("m", id))

    def forget(self, id: str) -> None:
        for stored in (self.waiting, self.kept):
            stored -= {subject for subject in stored if id in subject}


def test_each_owner_has_its_own_limit_and_a_request_counts_until_its_result_goes() -> None:
    async def scenario() -> None:
        streams = Streams()
        streams.kept |= {"result.m.of-a-producer", f"result.m.{'0' * 48}", f"result.m.{'0' * 60}"}
        first = await streams.store("a", 2, version="1")
        assert first
        assert await streams.store("a", 2)
        assert not await streams.store("a", 2)
        assert await streams.store("b", 1)
        assert not await streams.store("b", 1)
        streams.end(first)
        streams.now_s += 2 * MAX_AGE_S
        assert not await streams.store("a", 2), "it waits no more, and its result is kept"
        streams.forget(first)
        streams.now_s += 2 * MAX_AGE_S
        assert await streams.store("a", 2)
        assert not await streams.store("a", 2)

    asyncio.run(scenario())


def test_requests_without_an_owner_count_together_and_apart_from_the_ids_of_producers() -> None:
    async def scenario() -> None:
        streams = Streams()
        streams.kept |= {f"result.m.order-{number}" for number in range(100)}
        assert await streams.store("", 2)
        assert await streams.store("", 2)
        assert not await streams.store("", 2)
        streams.now_s += 2 * MAX_AGE_S
        assert not await streams.store("", 2)

    asyncio.run(scenario())


def test_long_lists_are_read_for_a_tenth_of_the_time() -> None:
    async def scenario() -> None:
        streams = Streams()
        streams.reading_takes_s = 3.0
        begin_s = streams.now_s
        while streams.now_s < begin_s + 600.0:
            await streams.store("a", 10**9)
            streams.now_s += 0.1
        assert 15 <= streams.readings / 2 <= 21
        assert REST == 9.0

    asyncio.run(scenario())


def test_what_is_stored_while_the_lists_are_read_is_counted() -> None:
    async def scenario() -> None:
        streams = Streams()
        stored = asyncio.Event()
        held = ResultsLimit("a", 2, full)

        async def slow() -> None:
            async with streams.counts.room(held):
                await stored.wait()
                streams.waiting.add(subjects.job_event("m", IDS.new("a")))

        storing = asyncio.create_task(slow())
        await asyncio.sleep(0)
        streams.now_s += 2 * MAX_AGE_S

        async def meanwhile() -> None:
            stored.set()
            await storing

        streams.while_reading = meanwhile
        assert await streams.store("a", 2)
        assert not await streams.store("a", 2)

    asyncio.run(scenario())


def test_what_could_not_be_stored_counts_no_more() -> None:
    async def scenario() -> None:
        streams = Streams()
        with pytest.raises(OSError, match="lost"):
            async with streams.counts.room(ResultsLimit("a", 1, full)):
                raise OSError("lost")
        assert await streams.store("a", 1)

    asyncio.run(scenario())


def test_without_a_broker_a_limited_request_gets_503_and_nothing_is_forgotten() -> None:
    async def scenario() -> None:
        streams = Streams()
        assert await streams.store("a", 1)
        streams.now_s += 2 * MAX_AGE_S
        streams.is_away = True
        with pytest.raises(StatusError, match="the message broker is not available"):
            async with streams.counts.room(ResultsLimit("a", 1, full)):
                pass
        async with streams.counts.room(None):
            pass
        streams.is_away = False
        assert not await streams.store("a", 1)

    asyncio.run(scenario())


STEPS = st.lists(st.sampled_from(["store", "store b", "end", "forget", "wait"]), max_size=60)


@settings(max_examples=500)
@given(STEPS, st.integers(0, 5))
def test_one_gateway_never_passes_a_limit_and_refuses_only_at_it(steps: list[str], limit: int) -> None:
    async def scenario() -> None:
        streams = Streams()
        mine: list[str] = []
        freed = 0  # since the lists were read
        for step in steps:
            readings = streams.readings
            if step.startswith("store"):
                id = await streams.store("b", 10**6) if step == "store b" else await streams.store("a", limit)
                freed = 0 if streams.readings != readings else freed
                if step == "store":
                    assert bool(id) == (len(mine) + freed < limit)
                    mine += [id] if id else []
            elif step == "end" and mine:
                streams.end(mine[0])
            elif step == "forget" and mine:
                streams.forget(mine.pop())
                freed += 1
            elif step == "wait":
                streams.now_s += 2 * MAX_AGE_S
        assert len(mine) <= limit

    asyncio.run(scenario())

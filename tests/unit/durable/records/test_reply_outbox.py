"""Answers on reply subjects come at least once, and a stream stores each once: with a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.support.clients.nats_flush import flush
from tests.support.waiting import eventually
from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.nats.headers import pack_headers
from weir.durable.records import reply_outbox
from weir.durable.records.reply_outbox import ReplyOutbox


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedNats(Path(tmp_path_factory.mktemp("nats")))
    server.start()
    yield server.url
    server.stop()


class Setting:
    """A gateway's outbox, and a client of the same server."""

    def __init__(self, bus: Bus, outbox: ReplyOutbox, client: Any) -> None:
        self.bus = bus
        self.outbox = outbox
        self.client = client
        self.came: list[bytes] = []
        self.left: list[bytes] = []

    async def subscribe(self, subject: str) -> None:
        async def take(message: Any) -> None:
            self.came.append(message.data)

        await self.client.subscribe(subject, cb=take)
        await flush(self.client)

    def send(self, subject: str, data: bytes, is_repeated: bool = False) -> None:
        block = pack_headers({"Nats-Msg-Id": data.decode()})
        self.outbox.send(subject, data, block, lambda: self.left.append(data), is_repeated)

    def lose_connection(self) -> None:
        protocol = self.bus._protocol
        assert protocol is not None
        protocol.abort()


@asynccontextmanager
async def setting(url: str) -> AsyncIterator[Setting]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "g", background)
        outbox = ReplyOutbox(bus, bus.jetstream, f"{subjects.durable_inbox('g')}.answered")
        await outbox.start(background)
        client = await nats.connect(url)
        try:
            yield Setting(bus, outbox, client)
        finally:
            outbox.stop()
            await client.close()
            await bus.close()


async def test_an_answer_has_left_when_it_was_passed_on(nats_url: str) -> None:
    async with setting(nats_url) as to:
        await to.subscribe("orders.*")
        for number in range(50):
            to.send(f"orders.{number}", b"%d" % number)
        await eventually(lambda: len(to.left) == 50)
        await eventually(lambda: len(set(to.came)) == 50)  # again where the broker was slow
        assert len(to.outbox) == 0


async def test_who_does_not_subscribe_delays_nobody(nats_url: str) -> None:
    async with setting(nats_url) as to:
        to.send("nobody.listens", b"1")
        await eventually(lambda: to.left == [b"1"])


async def test_after_a_takeover_a_subscriber_is_waited_for(nats_url: str) -> None:
    async with setting(nats_url) as to:
        to.send("late.listener", b"1", is_repeated=True)
        await asyncio.sleep(0.05)
        assert to.left == []
        await to.subscribe("late.*")
        await eventually(lambda: to.came == to.left == [b"1"])


async def test_a_gateway_that_stops_waits_for_no_subscriber(nats_url: str) -> None:
    async with setting(nats_url) as to:
        to.send("late.stopping", b"1", is_repeated=True)
        to.outbox.stop_waiting()
        await eventually(lambda: to.left == [b"1"])


async def test_a_gateway_that_stops_delivers_the_responses_of_requests_that_end_meanwhile(nats_url: str) -> None:
    async with setting(nats_url) as to:
        await to.subscribe("stopping.*")
        to.outbox.stop_waiting()
        to.send("stopping.1", b"1")
        await eventually(lambda: to.left == [b"1"])
        await eventually(lambda: to.came == [b"1"])


async def test_what_had_not_left_when_the_connection_was_lost_comes(nats_url: str) -> None:
    async with setting(nats_url) as to:
        await to.subscribe("lost.*")
        to.send("lost.1", b"1")
        to.lose_connection()  # ahead of the turn's end: it was never written
        to.send("lost.2", b"2")
        await eventually(lambda: set(to.came) == {b"1", b"2"})
        await eventually(lambda: sorted(to.left) == [b"1", b"2"])


async def test_what_left_just_before_the_connection_was_lost_comes_again(nats_url: str) -> None:
    async with setting(nats_url) as to:
        await to.subscribe("again.*")
        to.send("again.1", b"1")
        await eventually(lambda: to.left)
        to.lose_connection()
        await eventually(lambda: to.came == [b"1", b"1"])
        await eventually(lambda: not len(to.outbox))
        assert to.left == [b"1"]


async def test_what_left_before_is_not_sent_again(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_outbox, "RECENT_S", 0.0)
    async with setting(nats_url) as to:
        await to.subscribe("before.*")
        to.send("before.1", b"1")
        await eventually(lambda: to.left)
        to.lose_connection()
        to.send("before.2", b"2")
        await eventually(lambda: b"2" in to.came)
        assert to.came == [b"1", b"2"]


async def test_a_stream_stores_each_answer_once(nats_url: str) -> None:
    async with setting(nats_url) as to:
        jetstream = to.client.jetstream()
        await jetstream.add_stream(name="ANSWERS", subjects=["answers.mine.*"])
        for _ in range(2):
            to.send("answers.mine.1", b"1")
            to.send("answers.mine.2", b"2")
            await eventually(lambda: len(to.left) in (2, 4))
            to.lose_connection()
            await eventually(lambda: to.bus.is_connected and not len(to.outbox))
        assert (await jetstream.stream_info("ANSWERS")).state.messages == 2
        await jetstream.delete_stream("ANSWERS")


async def test_an_answer_that_a_stream_refuses_is_sent_again(nats_url: str) -> None:
    async with setting(nats_url) as to:
        jetstream = to.client.jetstream()
        await jetstream.add_stream(name="FULL", subjects=["full.*"], max_msgs=1, discard="new")
        to.send("full.1", b"1")
        await eventually(lambda: to.left == [b"1"])
        to.send("full.2", b"2")
        await asyncio.sleep(0.1)
        assert to.left == [b"1"]
        await jetstream.purge_stream("FULL")
        await eventually(lambda: to.left == [b"1", b"2"])
        await jetstream.delete_stream("FULL")


async def test_an_answer_that_a_subscriber_answers_has_left(nats_url: str) -> None:
    async with setting(nats_url) as to:

        async def answer(message: Any) -> None:
            await message.respond(b"thank you")

        await to.client.subscribe("polite.*", cb=answer)
        await flush(to.client)
        to.send("polite.1", b"1")
        await eventually(lambda: to.left == [b"1"])

"""The client of JetStream: its requests, their repetition in a cluster, and reads of whole streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from nats.errors import NoRespondersError
from nats.js.api import ConsumerConfig, StorageType, StreamConfig
from nats.js.errors import BadRequestError, KeyWrongLastSequenceError, NoStreamResponseError, NotFoundError

from weir.bus.nats import jetstream
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.nats.jetstream import DeliveryInfo, JetStream, parse_ack_subject

NO_LEADER = b'{"type":"x","error":{"code":503,"err_code":10008,"description":"temporarily unavailable"}}'
NOT_FOUND = b'{"error":{"code":404,"err_code":10059,"description":"stream not found"}}'


class Scripted:
    """A bus whose broker gives these responses in order; None for none."""

    inbox_prefix = "_INBOX_test"
    losses = 0
    is_connected = True

    def __init__(self, *responses: bytes | None, is_clustered: bool = True) -> None:
        self.is_clustered = is_clustered
        self.requests: list[tuple[str, bytes]] = []
        self._responses = list(responses)
        self._on_reply: Any = None

    async def subscribe(self, _subject: str, callback: Any) -> None:
        self._on_reply = callback

    def on_loss(self, _listener: Any) -> None:
        pass

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        self.requests.append((subject, data))
        response = self._responses.pop(0)
        if response is not None:
            status = "503" if response == b"503" else ""
            message = Message(reply, "", b"" if status else response, status)
            asyncio.get_running_loop().call_soon(self._on_reply, message)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRY_S", "_RETRY_WAIT_S", "_READ_RETRY_WAIT_S"):
        monkeypatch.setattr(jetstream, name, 0.01)


async def client(*responses: bytes | None, is_clustered: bool = True) -> tuple[JetStream, Scripted]:
    bus = Scripted(*responses, is_clustered=is_clustered)
    started = JetStream(cast(Bus, bus))
    await started.start()
    return started, bus


@pytest.mark.parametrize("failure", [None, b"503", NO_LEADER])
async def test_a_request_to_a_cluster_without_a_leader_is_repeated(failure: bytes | None) -> None:
    api, bus = await client(failure, failure, b'{"seq": 7}')
    assert await api.ask("STREAM.INFO.S", {"a": 1}) == {"seq": 7}
    assert bus.requests == [("$JS.API.STREAM.INFO.S", b'{"a":1}')] * 3


async def test_a_response_to_an_earlier_copy_of_a_request_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetstream, "TRY_S", 5.0)
    monkeypatch.setattr(jetstream, "RESEND_S", 0.01)
    api, bus = await client(None, None, b'{"seq": 7}')
    assert await api.ask("STREAM.INFO.S") == {"seq": 7}  # within one try
    assert len(bus.requests) == 3


async def test_a_read_whose_server_was_lost_finds_another_one() -> None:
    api, bus = await client(None, b"503", None, b"garbage")
    with pytest.raises(ConnectionError, match="can't be read"):
        await api.last("S", "s")
    assert len(bus.requests) == 4


async def test_a_request_to_a_single_server_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetstream, "API_TIMEOUT_S", 0.01)
    api, bus = await client(None, b"503", is_clustered=False)
    with pytest.raises(TimeoutError):
        await api.ask("INFO")
    with pytest.raises(NoRespondersError):
        await api.ask("INFO")
    assert len(bus.requests) == 2


async def test_a_request_that_is_to_be_sent_once_is_sent_once() -> None:
    api, bus = await client(None)
    with pytest.raises(TimeoutError):
        await api.ask("INFO", once_s=0.01)
    assert len(bus.requests) == 1


async def test_requests_are_repeated_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetstream, "RETRY_FOR_S", 0.0)
    api, _ = await client(NO_LEADER)
    with pytest.raises(jetstream.APIError) as raised:
        await api.ask("INFO")
    assert jetstream.is_transient(raised.value)


async def test_a_message_is_published_again_only_where_no_stream_took_it() -> None:
    api, bus = await client(b"503", b'{"stream":"S","seq":3}', None)
    assert (await api.publish("s", b"x")).seq == 3
    with pytest.raises(TimeoutError):  # it may have been stored
        await api.publish("s", b"x", timeout=0.01)
    assert len(bus.requests) == 3


async def test_errors_are_raised_by_their_kind() -> None:
    api, _ = await client(NOT_FOUND, b"no json", NOT_FOUND)
    with pytest.raises(NotFoundError):
        await api.ask("STREAM.INFO.S")
    with pytest.raises(ConnectionError, match="not JSON"):
        await api.ask("STREAM.INFO.S")
    assert await api.find_stream("S") is None


async def test_a_read_of_a_message_waits_for_its_stream_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    api, _ = await client(b"503", b"garbage", is_clustered=False)
    with pytest.raises(ConnectionError, match="can't be read"):
        await api.last("S", "s")
    monkeypatch.setattr(jetstream, "API_TIMEOUT_S", 0.05)
    api, _ = await client(*[b"503"] * 100, is_clustered=False)
    with pytest.raises(TimeoutError, match="stream S"):
        await api.last("S", "s")


@pytest.mark.parametrize("subject", ["", "$JS.ACK.S.c.x.1.2.3.4", "answers.a.b"])
def test_other_subjects_are_no_acknowledgement_s(subject: str) -> None:
    assert parse_ack_subject(subject) is None


def test_both_forms_of_acknowledgement_subjects_are_read() -> None:
    for prefix in ("$JS.ACK", "$JS.ACK._.account"):
        assert parse_ack_subject(f"{prefix}.S.c.2.7.5.99.1") == DeliveryInfo(2, 7, 99, 1, 5)


# With nats-server


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def connected(nats: EmbeddedNats) -> AsyncIterator[Bus]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        yield bus
        await bus.close()


@asynccontextmanager
async def stream(nats: EmbeddedNats, *messages: tuple[str, bytes]) -> AsyncIterator[Bus]:
    """Stream S, which holds these messages."""
    async with connected(nats) as bus:
        await bus.jetstream.add_stream(
            StreamConfig(name="S", subjects=["s.>"], storage=StorageType.MEMORY, allow_direct=True)
        )
        try:
            for subject, data in messages:
                await bus.jetstream.publish(subject, data, headers={"Name": data.decode()})
            yield bus
        finally:
            await bus.jetstream.delete_stream("S")


FOUR = (("s.a", b"1"), ("s.b", b"2"), ("s.a", b"3"), ("s.c", b"4"))


async def test_single_messages_are_read(nats: EmbeddedNats) -> None:
    async with stream(nats, *FOUR) as bus:
        api = bus.jetstream
        found = [
            await api.last("S", "s.a"),
            await api.last("S", "s.*"),
            await api.last("S", "s.b", "s.a"),
            await api.next("S", "s.a"),
            await api.next("S", "s.*", 2),
            await api.stored("S", subject="s.a"),
            await api.stored("S", sequence=4),
        ]
        read = [(m.sequence, m.data, m.headers["name"]) for m in found if m]
        assert read == [(n, b"%d" % n, str(n)) for n in (3, 4, 3, 1, 2, 3, 4)]
        assert all(abs(m.stored_ms - found[0].stored_ms) < 10_000 for m in found if m and found[0])
        await api.delete("S", 4)
        await api.delete("S", 4)
        assert await api.last("S", "s.c") is None
        assert await api.stored("S", subject="s.c") is None
        assert await api.stored("S", sequence=4) is None
        assert await api.next("S", "s.*", 4) is None
        with pytest.raises(NotFoundError):
            await api.stored("NONE", sequence=1)


async def test_a_stream_is_described(nats: EmbeddedNats) -> None:
    async with stream(nats, *FOUR) as bus:
        api = bus.jetstream
        assert await api.stream_state("S") == (4, 4, 0)
        assert await api.subject_counts("S", "s.>") == {"s.a": 2, "s.b": 1, "s.c": 1}
        info = await api.find_stream("S", "s.a")
        assert info is not None
        assert info["state"]["subjects"] == {"s.a": 2}
        assert [row["config"]["name"] for row in await api.list_all("STREAM.LIST", "streams")] == ["S"]
        await api.purge("S", "s.a", below=3)
        assert await api.subject_counts("S", "s.>") == {"s.a": 1, "s.b": 1, "s.c": 1}
        await api.purge("S", "s.a")
        assert (await api.stream_state("S")).messages == 2


async def test_a_scan_reads_the_last_message_of_each_subject_or_all_from_one_on(nats: EmbeddedNats) -> None:
    async with stream(nats, *FOUR) as bus:
        api = bus.jetstream
        assert [(m.subject, m.data) async for m in api.scan("S", "s.>")] == [
            ("s.b", b"2"),
            ("s.a", b"3"),
            ("s.c", b"4"),
        ]
        assert [m.sequence async for m in api.scan("S", "s.a")] == [3]
        assert [m.sequence async for m in api.scan("S", "s.>", start=2)] == [2, 3, 4]
        heads = [m async for m in api.scan("S", "s.>", start=4, headers_only=True)]
        assert [(m.data, m.headers["nats-msg-size"], m.headers["name"]) for m in heads] == [(b"", "1", "4")]
        assert [m async for m in api.scan("S", "s.none")] == []
        with pytest.raises(NotFoundError):
            [m async for m in api.scan("NONE", "s.>")]


async def test_a_scan_takes_part_in_flow_control(nats: EmbeddedNats) -> None:
    async with stream(nats) as bus:
        for number in range(3000):
            bus.publish(f"s.{number}", bytes(16_384))
            if number % 100 == 0:
                await bus.flush()
        while (await bus.jetstream.stream_state("S")).messages < 3000:
            await asyncio.sleep(0.01)
        assert [message.sequence async for message in bus.jetstream.scan("S", "s.>")] == list(range(1, 3001))


@pytest.mark.parametrize("start", [None, 1])
async def test_a_scan_ends_where_messages_are_removed_meanwhile(nats: EmbeddedNats, start: int | None) -> None:
    async with stream(nats) as bus:
        for number in range(1000):
            bus.publish(f"s.{number}", bytes(16_384))
        while (await bus.jetstream.stream_state("S")).messages < 1000:
            await asyncio.sleep(0.01)
        messages = bus.jetstream.scan("S", "s.>", start=start)
        assert (await anext(messages)).sequence == 1
        await bus.jetstream.purge("S", "s.*")
        async with asyncio.timeout(10):
            assert len([message async for message in messages]) < 999


async def test_a_scan_ends_with_the_connection(nats: EmbeddedNats) -> None:
    async with stream(nats, *FOUR) as bus:
        messages = bus.jetstream.scan("S", "s.>")
        await anext(messages)
        bus.losses += 1
        with pytest.raises(ConnectionError):
            await anext(messages)


async def test_one_message_of_a_consumer_is_pulled_at_a_time(nats: EmbeddedNats) -> None:
    async with stream(nats, *FOUR) as bus:
        await bus.jetstream.add_consumer("S", ConsumerConfig(durable_name="c", ack_policy="explicit"))
        for number in range(1, 5):
            message = await bus.jetstream.pull_one("S", "c", 1.0)
            assert message is not None
            assert message.data == b"%d" % number
            bus.publish(message.reply, b"+ACK")
        assert await bus.jetstream.pull_one("S", "c", 0.1) is None


async def test_nats_py_administers_on_the_connection_of_the_bus(nats: EmbeddedNats) -> None:
    async with connected(nats) as bus:
        bucket = await bus.jetstream.create_key_value(bucket="b")
        results = await asyncio.gather(*(bucket.create("k", b"v") for _ in range(3)), return_exceptions=True)
        assert sum(isinstance(result, KeyWrongLastSequenceError) for result in results) == 2
        assert (await bucket.get("k")).value == b"v"
        store = await bus.jetstream.create_object_store("o")
        await store.put("name", bytes(300_000))
        assert (await store.get_info("name")).size == 300_000
        await store.delete("name")
        with pytest.raises(BadRequestError):
            await bus.jetstream.add_stream(StreamConfig(name="OTHER", subjects=["$KV.b.>"]))
        with pytest.raises(NoStreamResponseError):
            await bus.jetstream.publish("nowhere", b"")

"""Messages are stored once and in order, whatever happens to the connection, and each publish has a result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from tests.support.servers.full_disk import FREE_BYTES, full_disk
from weir.bus.kv.cluster_secret import SECRET_BYTES, ClusterSecret
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.nats.headers import pack_headers
from weir.bus.streams import acked_publisher
from weir.bus.streams.acked_publisher import AckedPublisher, StoreAck, read_ack


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def publishing(nats: EmbeddedNats, name: str, subject: str) -> AsyncIterator[tuple[Bus, AckedPublisher]]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        config = StreamConfig(name=name, subjects=[subject], storage=StorageType.FILE, discard=DiscardPolicy.NEW)
        await bus.jetstream.add_stream(config, max_msgs=5)
        publisher = AckedPublisher(bus, f"test-{name}")
        await publisher.start(background)
        yield bus, publisher
        publisher.stop()
        await bus.close()


async def test_each_publish_has_its_result(nats: EmbeddedNats) -> None:
    async with publishing(nats, "RESULTS", "results.>") as (bus, publisher):
        acks = await asyncio.gather(*(publisher.store("results.a", b"%d" % number) for number in range(4)))
        assert [ack.sequence for ack in acks] == [1, 2, 3, 4]
        again = pack_headers({"Nats-Expected-Last-Subject-Sequence": "1"})
        conflict = await publisher.store("results.a", b"", again)
        assert conflict.is_conflict
        assert not conflict.is_stored
        first, second = [await publisher.store("results.a", b"", pack_headers({"Nats-Msg-Id": "x"})) for _ in "ab"]
        assert (first.is_duplicate, second.is_duplicate, second.sequence) == (False, True, first.sequence)
        full = await publisher.store("results.a", b"")
        assert full.error_code
        assert len(publisher) == 0
        assert (await bus.jetstream.stream_state("RESULTS")).messages == 5


async def test_a_message_without_a_stream_waits_for_it(nats: EmbeddedNats) -> None:
    async with publishing(nats, "EARLY", "early.>") as (bus, publisher):
        waiting = asyncio.create_task(publisher.store("late.a", b"x"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await bus.jetstream.add_stream(StreamConfig(name="LATE", subjects=["late.>"], storage=StorageType.MEMORY))
        assert (await asyncio.wait_for(waiting, 10)).sequence == 1


async def test_messages_are_stored_after_a_lost_connection(nats: EmbeddedNats) -> None:
    async with publishing(nats, "LOST", "lost.>") as (bus, publisher):
        bus.suspect_loss("test")
        stored = [
            asyncio.create_task(publisher.store("lost.a", b"x", pack_headers({"Nats-Msg-Id": id}))) for id in "ab"
        ]
        assert all([(await asyncio.wait_for(task, 10)).is_stored for task in stored])
        assert (await bus.jetstream.stream_state("LOST")).messages == 2


async def test_a_stream_without_room_is_stalled_until_it_stores_again(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path)
    server.start()
    try:
        async with publishing(server, "QUEUE", "event.*") as (_, publisher):
            assert (await publisher.store("event.a", b"x")).sequence == 1
            told: asyncio.Queue[StoreAck | None] = asyncio.Queue()
            assert server.pid is not None
            with full_disk(server.pid, tmp_path):
                publisher.publish("event.a", bytes(2 * FREE_BYTES), b"", told.put_nowait, lambda: told.put_nowait(None))
                assert await told.get() is None
                assert publisher.stalled == {"QUEUE"}
            assert "1.blk: file too large" in server.write_error()
            assert server.process is not None
            server.process.terminate()
            server.process.wait()
            server.start()
            stored = await told.get()
            assert stored is not None
            assert stored.sequence == 2
            assert not publisher.stalled
            assert server.write_error() == ""
    finally:
        server.stop()


async def test_a_stream_that_does_not_tell_its_state_may_be_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedNats(tmp_path)
    server.start()
    asked = asyncio.Semaphore(0)

    async def stream_state(_stream: str) -> None:
        asked.release()
        raise TimeoutError

    try:
        async with publishing(server, "QUEUE", "event.*") as (bus, publisher):
            monkeypatch.setattr(bus.jetstream, "stream_state", stream_state)
            assert server.pid is not None
            with full_disk(server.pid, tmp_path):
                publisher.publish("event.a", bytes(2 * FREE_BYTES), b"", lambda _ack: None)
                await asked.acquire()
                await asked.acquire()
                assert not publisher.stalled
            monkeypatch.undo()
    finally:
        server.stop()


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"garbage", b'{"error": {}}', b'{"seq": "x"}'])
def test_other_responses_are_no_acknowledgements(data: bytes) -> None:
    assert read_ack(data).is_no_ack


def test_acknowledgements_are_read() -> None:
    assert read_ack(b'{"stream":"S", "seq":7}') == StoreAck(7)
    assert read_ack(b'{"stream":"S","seq":7,"duplicate":true}') == StoreAck(7, True)
    error = read_ack(b'{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"}}')
    assert error.is_full
    assert not error.is_stored


async def test_all_gateways_have_one_secret(nats: EmbeddedNats) -> None:
    async with publishing(nats, "ONE", "one.>") as first, publishing(nats, "TWO", "two.>") as second:
        secrets = [ClusterSecret(bus) for bus, _ in (first, second)]
        await asyncio.gather(*(secret.start() for secret in secrets))
        assert len(secrets[0].value) == SECRET_BYTES
        assert secrets[0].value == secrets[1].value
        late = ClusterSecret(second[0])
        await late.start()
        assert late.value == secrets[0].value


class SilentCluster:
    """Stands for a `Bus` to a cluster that tells the state of streams, and acknowledges no message."""

    is_clustered = is_connected = True
    losses = 0

    def __init__(self) -> None:
        self.published = 0
        self.jetstream = self

    def publish(self, *_: object) -> None:
        self.published += 1

    async def subscribe(self, *_: object) -> None: ...

    def on_reconnect(self, *_: object) -> None: ...

    async def stream_state(self, _stream: str) -> None: ...


async def test_a_stream_of_a_cluster_is_stalled_though_messages_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    intervals = {"CHECK_INTERVAL": 0.01, "CLUSTER_ACK_TIMEOUT": 0.02, "CLUSTER_STALLED": 0.1, "GRACE": 0.0}
    for name, interval_s in intervals.items():
        monkeypatch.setattr(acked_publisher, f"_{name}_S", interval_s)
    bus, stalled = SilentCluster(), asyncio.Event()
    async with asyncio.TaskGroup() as background:
        publisher = AckedPublisher(cast(Any, bus), "test")
        await publisher.start(background)
        publisher.publish("event.a", b"x", b"", lambda _ack: None, stalled.set)
        await asyncio.wait_for(stalled.wait(), 10)
        publisher.stop()
    assert publisher.stalled == {"QUEUE"}
    assert bus.published > 1

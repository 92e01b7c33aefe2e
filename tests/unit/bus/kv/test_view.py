"""Views of buckets after an outage of the broker, with a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from nats.js.errors import NotFoundError

from tests.support.waiting import eventually
from weir.bus.kv.desired_models import DesiredModels
from weir.bus.kv.known_models import KnownModels
from weir.bus.kv.registry import RegistryView, RegistryWriter
from weir.bus.kv.settings import TRACE, SharedSettings
from weir.bus.kv.view import KvBucket, KvView
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.declarations import Bucket, ensure_bucket, ensure_streams
from weir.runtime import containment
from weir.schemas.wire.model_control import DesiredModel, WantedModel
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord, WorkerRecord


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


class Role:
    """A connection, and the tasks that recover it."""

    def __init__(self, bus: Bus, background: asyncio.TaskGroup) -> None:
        self.bus = bus
        self.background = background
        self.recoveries = 0

    async def count_recovery(self) -> None:
        self.recoveries += 1

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """What is published meanwhile does not come here, as while the broker is away."""
        callbacks = dict(self.bus._callbacks)
        self.bus._callbacks.clear()
        try:
            yield
        finally:
            self.bus._callbacks.update(callbacks)

    async def recover(self) -> None:
        """The broker is back: all listeners for that have run when it returns."""
        self.bus.suspect_loss("test")
        await asyncio.gather(*self.bus._recoveries.values())


@asynccontextmanager
async def connected(nats: EmbeddedNats) -> AsyncIterator[Role]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        await ensure_streams(bus)
        yield Role(bus, background)
        await bus.close()


async def put(desired: DesiredModels, entry: DesiredModel) -> None:
    await desired.update(entry.name, lambda _known: entry)


READY = {1: VersionRecord(ModelState.READY)}


async def test_a_model_that_was_unloaded_meanwhile_is_not_in_the_registry_view(nats: EmbeddedNats) -> None:
    async with connected(nats) as worker, connected(nats) as gateway:
        writer, view = RegistryWriter(worker.bus, "w"), RegistryView(gateway.bus)
        await writer.write_worker(WorkerRecord("w", 1))
        for name in ("stays", "goes"):
            await writer.write_model(ModelRecord(name, READY))
        await view.start(gateway.background)
        assert set(view.workers["w"].models) == {"stays", "goes"}
        changed: list[str] = []
        view.on_model_change(changed.append)
        with gateway.deaf():
            await writer.remove_model("goes")
            await writer.write_model(ModelRecord("comes", READY))
            await gateway.bus.flush()
        await gateway.recover()
        assert set(view.workers["w"].models) == {"stays", "comes"}
        assert {"goes", "comes"} <= set(changed)
        with gateway.deaf():
            await writer.remove_all()
            await gateway.bus.flush()
        await gateway.recover()
        assert "w" not in view.workers


async def test_a_model_that_was_forgotten_meanwhile_is_not_known_again(nats: EmbeddedNats) -> None:
    async with connected(nats) as first, connected(nats) as second, connected(nats) as gateway:
        writers = KnownModels(first.bus), KnownModels(second.bus)
        reader = KnownModels(gateway.bus)
        for known in writers:
            await known.start()
        await reader.start(is_maker=False)
        for name in ("stays", "goes"):
            await writers[0].write(ModelRecord(name, READY, config={"name": name}, written_ns=1))
        await eventually(lambda: writers[1].names() == reader.names() == {"stays", "goes"})
        with gateway.deaf(), second.deaf():
            await writers[0].forget("goes")
            await second.bus.flush()
            await gateway.bus.flush()
        await gateway.recover()
        assert reader.names() == {"stays"}
        # A writer writes again what the broker has lost, and not what another has forgotten.
        await second.recover()
        assert writers[1].names() == {"stays"}
        late = KnownModels(gateway.bus)
        await late.start(is_maker=False)
        assert late.names() == {"stays"}


async def test_a_writer_makes_a_bucket_again_that_another_has_removed(nats: EmbeddedNats) -> None:
    async with connected(nats) as first, connected(nats) as second:
        keeps, removes = KnownModels(first.bus), KnownModels(second.bus)
        await keeps.start()
        await keeps.write(ModelRecord("one", READY, config={"name": "one"}, written_ns=1))
        reader = KnownModels(second.bus)
        await reader.start(is_maker=False)
        await eventually(lambda: "one" in reader.names())
        await removes.remove_bucket()
        await eventually(lambda: "one" not in reader.names())
        await keeps.write(ModelRecord("two", READY, config={"name": "two"}, written_ns=1))
        await eventually(lambda: "two" in reader.names())


async def test_what_is_no_longer_desired_does_not_come_back(nats: EmbeddedNats) -> None:
    async with connected(nats) as gateway, connected(nats) as worker:
        writer, reader = DesiredModels(gateway.bus), DesiredModels(worker.bus)
        await writer.start()
        await reader.start()
        for name in ("stays", "goes"):
            await put(writer, DesiredModel(name, 7, WantedModel(True, "{}")))
        await eventually(lambda: len(reader.all()) == 2)
        with worker.deaf():
            await writer.update("goes", lambda _entry: None)
            await worker.bus.flush()
        await worker.recover()
        assert reader.get("goes") is None
        assert reader.get("stays") is not None
        late = DesiredModels(worker.bus)
        await late.start()
        assert late.get("goes") is None, "the worker must not have written it again"


async def test_settings_that_were_reset_meanwhile_stay_reset(nats: EmbeddedNats) -> None:
    async with connected(nats) as gateway, connected(nats) as worker:
        followed: dict[str, bytes] = {}
        writer, reader = SharedSettings(gateway.bus), SharedSettings(worker.bus)
        reader.follow(TRACE, followed.__setitem__)
        await writer.start()
        await reader.start()
        for model in ("kept", "emptied", "removed"):
            await writer.change(TRACE, model, lambda _value: b"{}")
        await eventually(lambda: len(followed) == 3)
        with worker.deaf():
            await writer.change(TRACE, "emptied", lambda _value: b"")
            bucket = KvBucket(gateway.bus, subjects.SETTINGS_BUCKET)
            await bucket.delete(subjects.settings_key(TRACE, "removed"))
            await worker.bus.flush()
        await worker.recover()
        assert followed == {"kept": b"{}", "emptied": b"", "removed": b""}
        assert (await bucket.entry(subjects.settings_key(TRACE, "emptied")))[0] == b""


async def test_one_key_that_fails_costs_the_others_nothing(nats: EmbeddedNats) -> None:
    async with connected(nats) as role:
        await ensure_bucket(role.bus, Bucket("any"))
        bucket = KvBucket(role.bus, "any")
        for key in ("a", "bad", "c"):
            await bucket.put(key, key.encode())
        found: dict[str, bytes] = {}

        def take(key: str, data: bytes) -> None:
            if key == "bad":
                raise ValueError(key)
            found[key] = data

        view = KvView(role.bus, "any", take, lambda key: None)
        failures = sum(containment.failures().values())
        await view.start()
        assert found == {"a": b"a", "c": b"c"}
        assert sum(containment.failures().values()) == failures + 1


async def test_a_write_that_comes_during_a_read_is_newer(nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(nats) as role:
        await ensure_bucket(role.bus, Bucket("raced"))
        bucket = KvBucket(role.bus, "raced")
        await bucket.put("key", b"old")
        found: dict[str, bytes] = {}
        view = KvView(role.bus, "raced", found.__setitem__, lambda key: None)
        read_values = view.bucket.values

        async def write_meanwhile(keys: str) -> dict[str, bytes]:
            read = await read_values(keys)
            await bucket.put("key", b"new")
            await eventually(lambda: found.get("key") == b"new")
            return read

        monkeypatch.setattr(view.bucket, "values", write_meanwhile)
        await view.start()
        assert found == {"key": b"new"}


class Mirror:
    """What a view reports."""

    def __init__(self, role: Role, bucket: str, keys: str = ">") -> None:
        self.values: dict[str, bytes] = {}
        self.view = KvView(role.bus, bucket, self.values.__setitem__, lambda key: self.values.pop(key, None), keys)


async def test_a_key_that_was_purged_meanwhile_is_pruned(nats: EmbeddedNats) -> None:
    async with connected(nats) as role, connected(nats) as other:
        await ensure_bucket(role.bus, Bucket("purged"))
        bucket, mirror = KvBucket(other.bus, "purged"), Mirror(role, "purged")
        for key in ("goes", "stays"):
            await bucket.put(key, b"1")
        await mirror.view.start()
        with role.deaf():
            await other.bus.jetstream.purge("KV_purged", "$KV.purged.goes")  # without a marker
        await mirror.view.read(lambda: {"goes": b"1"})
        assert mirror.values == {"stays": b"1"}
        assert await bucket.keys() == ["stays"]


async def test_a_bucket_that_was_lost_gets_its_values_again(nats: EmbeddedNats) -> None:
    async with connected(nats) as first, connected(nats) as second:
        await ensure_bucket(first.bus, Bucket("lost"))
        mirrors = Mirror(first, "lost"), Mirror(second, "lost")
        for mirror in mirrors:
            await mirror.view.start()
        await mirrors[0].view.bucket.put("a", b"1")
        await mirrors[0].view.bucket.put("b", b"2")
        await eventually(lambda: all(mirror.values == {"a": b"1", "b": b"2"} for mirror in mirrors))
        await first.bus.jetstream.delete_stream("KV_lost")
        await ensure_bucket(first.bus, Bucket("lost"))
        await mirrors[0].view.bucket.put("b", b"newer")
        for mirror in mirrors:
            values = dict(mirror.values)
            await mirror.view.read(lambda values=values: values)  # type: ignore[misc]
        assert await KvBucket(first.bus, "lost").values() == {"a": b"1", "b": b"newer"}
        await eventually(lambda: all(mirror.values == {"a": b"1", "b": b"newer"} for mirror in mirrors))


async def test_keys_of_a_lost_bucket_stay_until_their_removal_is_written(nats: EmbeddedNats) -> None:
    async with connected(nats) as role:
        removed: list[str] = []
        bucket = KvBucket(role.bus, "replaced")
        view = KvView(role.bus, "replaced", lambda *_: None, removed.append)
        await ensure_bucket(role.bus, Bucket("replaced"))
        for key in ("owner", "other"):
            await bucket.put(key, b"value")
        await view.start()
        await role.bus.jetstream.delete_key_value("replaced")
        await ensure_bucket(role.bus, Bucket("replaced"))
        await view.read()
        await bucket.put("other", b"value")
        await view.read()  # the owner of the first key has not written it again yet
        assert not removed
        await bucket.put("owner", b"value")
        await view.read()
        await role.bus.jetstream.purge("KV_replaced", "$KV.replaced.owner")
        await view.read()
        assert removed == ["owner"]


async def test_a_view_of_some_keys_has_no_others(nats: EmbeddedNats) -> None:
    async with connected(nats) as role:
        await ensure_bucket(role.bus, Bucket("parts"))
        bucket, mirror = KvBucket(role.bus, "parts"), Mirror(role, "parts", "mine.*")
        await bucket.put("mine.a", b"1")
        await bucket.put("other.a", b"1")
        await mirror.view.start()
        await bucket.put("mine.b", b"1")
        await bucket.put("other.b", b"1")
        await eventually(lambda: mirror.values == {"mine.a": b"1", "mine.b": b"1"})


async def test_a_value_is_created_once_and_again_after_its_removal(nats: EmbeddedNats) -> None:
    async with connected(nats) as role:
        await ensure_bucket(role.bus, Bucket("once"))
        bucket = KvBucket(role.bus, "once")
        assert await bucket.create("a", b"1")
        assert not await bucket.create("a", b"2")
        await bucket.delete("a")
        assert await bucket.keys() == []
        assert await bucket.values() == {"a": b""}
        assert await bucket.create("a", b"3")
        assert await bucket.values() == {"a": b"3"}
        assert await KvBucket(role.bus, "nowhere").values() == {}
        with pytest.raises(NotFoundError):
            await KvBucket(role.bus, "nowhere").put("a", b"1")

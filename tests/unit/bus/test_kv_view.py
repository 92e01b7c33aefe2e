"""What a view of a bucket has missed while the broker was away, over a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from nats.js.api import KeyValueConfig

from bus import subjects
from bus.connection import Bus
from bus.desired_models import DesiredModels
from bus.embedded import EmbeddedNats
from bus.known_models import KnownModels
from bus.kv_view import KvView
from bus.registry import RegistryView, RegistryWriter
from bus.settings import TRACE, SharedSettings
from bus.streams import ensure_streams
from runtime import containment
from schemas.desired import DesiredModel, WantedModel
from schemas.registry import ModelRecord, ModelState, VersionRecord, WorkerRecord


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
        self.bus.doubt("test")
        await asyncio.gather(*self.bus._recoveries.values())


@asynccontextmanager
async def connected(nats: EmbeddedNats) -> AsyncIterator[Role]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        await ensure_streams(bus)
        yield Role(bus, background)
        await bus.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


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
        for known, role in zip(writers, (first, second), strict=True):
            await known.start(role.background, is_writer=True)
        await reader.start(gateway.background)
        for name in ("stays", "goes"):
            await writers[0].write(ModelRecord(name, READY, config={"name": name}, written_ns=1))
        await until(lambda: writers[1].names() == reader.names() == {"stays", "goes"})
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
        await late.start(gateway.background)
        assert late.names() == {"stays"}


async def test_a_writer_makes_a_bucket_again_that_another_has_removed(nats: EmbeddedNats) -> None:
    async with connected(nats) as first, connected(nats) as second:
        keeps, removes = KnownModels(first.bus), KnownModels(second.bus)
        await keeps.start(first.background, is_writer=True)
        await keeps.write(ModelRecord("one", READY, config={"name": "one"}, written_ns=1))
        reader = KnownModels(second.bus)
        await reader.start(second.background)
        await until(lambda: "one" in reader.names())
        await removes.abolish()
        await until(lambda: "one" not in reader.names())
        await keeps.write(ModelRecord("two", READY, config={"name": "two"}, written_ns=1))
        await until(lambda: "two" in reader.names())


async def test_what_is_no_longer_desired_does_not_come_back(nats: EmbeddedNats) -> None:
    async with connected(nats) as gateway, connected(nats) as worker:
        writer, reader = DesiredModels(gateway.bus), DesiredModels(worker.bus)
        await writer.start()
        await reader.start()
        for name in ("stays", "goes"):
            await writer.write(DesiredModel(name, 7, WantedModel(True, "{}")))
        await until(lambda: len(reader.all()) == 2)
        with worker.deaf():
            await writer.remove("goes")
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
            await writer.write(TRACE, model, b"{}")
        await until(lambda: len(followed) == 3)
        with worker.deaf():
            await writer.write(TRACE, "emptied", b"")
            bucket = await gateway.bus.jetstream.key_value(subjects.SETTINGS_BUCKET)
            await bucket.delete(subjects.settings_key(TRACE, "removed"))
            await worker.bus.flush()
        await worker.recover()
        assert followed == {"kept": b"{}", "emptied": b"", "removed": b""}
        assert (await bucket.get(subjects.settings_key(TRACE, "emptied"))).value in (None, b"")


async def test_one_key_that_fails_costs_the_others_nothing(nats: EmbeddedNats) -> None:
    async with connected(nats) as role:
        bucket = await role.bus.jetstream.create_key_value(KeyValueConfig(bucket="any"))
        for key in ("a", "bad", "c"):
            await bucket.put(key, key.encode())
        found: dict[str, bytes] = {}

        def take(key: str, data: bytes) -> None:
            if key == "bad":
                raise ValueError(key)
            found[key] = data

        view = KvView(role.bus, "any", take, lambda key: None)
        failures = sum(containment.failures().values())
        await view.listen()
        assert await view.read() == {"a", "bad", "c"}
        assert found == {"a": b"a", "c": b"c"}
        assert sum(containment.failures().values()) == failures + 1


async def test_a_write_that_comes_during_a_read_is_newer(nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(nats) as role:
        bucket = await role.bus.jetstream.create_key_value(KeyValueConfig(bucket="raced"))
        await bucket.put("key", b"old")
        found: dict[str, bytes] = {}
        view = KvView(role.bus, "raced", found.__setitem__, lambda key: None)
        await view.listen()
        entries = view._entries

        async def write_meanwhile() -> dict[str, bytes]:
            read = await entries()
            await bucket.put("key", b"new")
            await until(lambda: found.get("key") == b"new")
            return read

        monkeypatch.setattr(view, "_entries", write_meanwhile)
        await view.read()
        assert found == {"key": b"new"}

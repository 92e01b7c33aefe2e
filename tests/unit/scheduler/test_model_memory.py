"""Which models stay known when their workers have gone, by a real registry; and what a gateway makes of it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.kv import KeyValue

from bus.connection import Bus, Message
from bus.embedded import EmbeddedNats
from bus.known_models import KnownModels
from bus.kv_view import KvView
from bus.registry import RegistryView, RegistryWriter, WorkerView
from bus.streams import ensure_streams
from bus.subjects import KNOWN_MODELS_BUCKET
from calls.catalog import RECOVERY_GRACE_S, Catalog
from scheduler import model_memory
from scheduler.model_memory import Fate, ModelMemory, entry_of, fate_of, is_news
from schemas.errors import WeirError
from schemas.model_config import ModelConfig
from schemas.registry import UNLOADED, ModelRecord, ModelState, VersionRecord, WorkerRecord

CONFIG = ModelConfig(name="m", backend="python").model_dump(exclude_defaults=True)
READY, GONE, LEAVES = ModelState.READY, ModelState.UNAVAILABLE, ModelState.UNLOADING


def record(*states: ModelState, reason: str = "", written_ns: int = 1, elsewhere: bool = False) -> ModelRecord:
    versions = {number: VersionRecord(state, reason, 1) for number, state in enumerate(states, 1)}
    return ModelRecord("m", versions, CONFIG, written_ns=written_ns, elsewhere=elsewhere)


def test_an_entry_has_the_versions_of_all_workers() -> None:
    entry = entry_of({"a": record(READY, GONE), "b": record(GONE, READY, written_ns=2), "c": record(LEAVES)})
    assert entry is not None
    assert (list(entry.versions), entry.written_ns) == ([1, 2], 2)
    assert entry_of({"a": record(GONE), "b": record(ModelState.LOADING)}) is None


@pytest.mark.parametrize(
    ("records", "served_by", "fate"),
    [
        ({}, {"a"}, Fate.STAYS),
        ({"b": record(GONE, reason="it could not be loaded")}, {"a"}, Fate.STAYS),
        ({"b": record(GONE, reason="for another GPU", elsewhere=True)}, {"a"}, Fate.STAYS),
        ({"b": record(ModelState.LOADING)}, {"a"}, Fate.STAYS),
        ({"b": record(GONE, reason=UNLOADED)}, {"a"}, Fate.GOES),
        ({"b": record(LEAVES, LEAVES)}, {"b"}, Fate.GOES),
        ({}, {"b"}, Fate.GOES),
    ],
)
def test_what_becomes_of_an_entry(records: dict[str, ModelRecord], served_by: set[str], fate: Fate) -> None:
    assert fate_of(records, served_by, live={"b"}) is fate


def test_what_is_news() -> None:
    entry, later = record(READY), record(READY, written_ns=5)
    assert is_news(entry, None, 1)
    assert not is_news(later, entry, 1)
    assert is_news(record(READY, READY), entry, 1)
    assert is_news(later, entry, 90_000 * 10**9), "an entry is written again before it ends by its age"


class Cluster:
    """A scheduler's memory, a gateway's catalog with a clock of its own, and workers."""

    def __init__(self, bus: Bus, background: asyncio.TaskGroup) -> None:
        self.bus = bus
        self.now_s = 0.0
        self.registry = RegistryView(bus)
        self.memory = ModelMemory(bus, self.registry, lambda _model: True, is_on=True)
        self.known = KnownModels(bus)
        self.catalog = Catalog(self.registry, True, clock=lambda: self.now_s)
        self.catalog.keep(self.known)
        self._writers: dict[str, RegistryWriter] = {}

    async def start(self, background: asyncio.TaskGroup) -> None:
        await self.memory.start(background)
        await self.registry.start(background)
        await self.known.start(background)

    async def worker(self, name: str, draining: bool = False) -> None:
        told = WorkerRecord(name, 1, settled=True, draining=draining, written_ns=time.time_ns())
        await self._writer(name).write_worker(told)

    async def tell(self, worker: str, state: ModelState, reason: str = "") -> None:
        await self._writer(worker).write_model(record(state, reason=reason, written_ns=time.time_ns()))
        await self.bus.flush()

    async def leave(self, worker: str) -> None:
        await self._writer(worker).remove_all()
        await self.bus.flush()

    async def remove(self, worker: str) -> None:
        await self._writer(worker).remove_model("m")
        await self.bus.flush()

    def is_accepted(self) -> bool:
        try:
            return self.catalog.resolve("m", "").name == "m"
        except WeirError:
            return False

    def _writer(self, worker: str) -> RegistryWriter:
        return self._writers.setdefault(worker, RegistryWriter(self.bus, worker))


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedNats(Path(tmp_path_factory.mktemp("nats")))
    yield server.start()
    server.stop()


@asynccontextmanager
async def cluster(nats_url: str) -> AsyncIterator[Cluster]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats_url, "test", background)
        await ensure_streams(bus)
        opened = Cluster(bus, background)
        await opened.start(background)
        try:
            yield opened
        finally:
            for task in opened.memory.tasks:
                # nats-py may lose a cancellation that comes with the broker's answer (wait_for of Python 3.11).
                while not task.done():
                    task.cancel()
                    await asyncio.wait({task}, timeout=0.1)
            for worker in list(opened.registry.workers):
                await opened.registry.erase(worker)
            await opened.known.abolish()
            await bus.close()


async def until(condition: Callable[[], bool], act: Callable[[], Awaitable[object]] | None = None) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await (act() if act else asyncio.sleep(0.005))


async def test_a_model_outlasts_its_workers(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        assert not c.catalog.server_ready()
        await c.worker("w")
        await c.tell("w", READY)
        await until(lambda: c.known.get("m") is not None)
        await c.worker("w", draining=True)
        await c.leave("w")
        await until(lambda: not c.registry.workers)
        c.now_s += 2 * RECOVERY_GRACE_S
        assert c.is_accepted()
        assert not c.catalog.is_ready("m", "")
        assert c.catalog.server_ready(), "it takes requests, and they bring a worker"
        assert c.catalog.index() == [
            {"name": "m", "versions": [], "state": "UNAVAILABLE", "reason": "no worker is there that serves it"}
        ]
        # So it does for a gateway that has never seen a worker.
        late = KnownModels(c.bus)
        catalog = Catalog(c.registry, True)
        catalog.keep(late)
        async with asyncio.TaskGroup() as background:
            await late.start(background)
        assert catalog.resolve("m", "1").versions == [1]
        with pytest.raises(WeirError, match="version 2 is not found"):
            catalog.resolve("m", "2")
        # A worker that fails to load it ends nothing: the next one may be luckier.
        await c.worker("w2")
        await c.tell("w2", GONE, reason="no memory")
        await until(lambda: not c.is_accepted())
        await c.leave("w2")
        await until(c.is_accepted)
        await c.worker("w3")
        await c.tell("w3", READY)
        await until(lambda: c.catalog.is_ready("m", ""))


@pytest.mark.parametrize("how", ["unloaded", "removed"])
async def test_what_goes_on_purpose_is_forgotten(nats_url: str, how: str) -> None:
    async with cluster(nats_url) as c:
        await c.worker("w")
        await c.tell("w", READY)
        await until(lambda: c.known.get("m") is not None)
        await (c.tell("w", GONE, UNLOADED) if how == "unloaded" else c.remove("w"))
        await until(lambda: c.known.get("m") is None)
        c.now_s += 2 * RECOVERY_GRACE_S
        assert not c.is_accepted()


async def test_without_the_option_nothing_stays_known(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.worker("w")
        await c.tell("w", READY)
        await until(lambda: c.known.get("m") is not None)
        async with asyncio.TaskGroup() as background:
            await ModelMemory(c.bus, c.registry, lambda _model: True, is_on=False).abolish()
            late = KnownModels(c.bus)
            await late.start(background)
        assert late.names() == set()


@pytest.mark.parametrize("how", ["unloaded", "removed"])
async def test_what_goes_while_it_is_being_written_is_forgotten(
    nats_url: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(nats_url) as c:
        is_written, may_go_on = asyncio.Event(), asyncio.Event()
        write = KnownModels.write

        async def slow_write(known: KnownModels, entry: ModelRecord) -> None:
            await write(known, entry)
            is_written.set()
            await may_go_on.wait()

        monkeypatch.setattr(KnownModels, "write", slow_write)
        await c.worker("w")
        await c.tell("w", READY)
        await is_written.wait()
        await (c.tell("w", GONE, UNLOADED) if how == "unloaded" else c.remove("w"))
        await until(lambda: not any(map(entry_of_worker, c.registry.workers.values())))
        may_go_on.set()
        await until(lambda: c.known.get("m") is None and c.memory.get("m") is None)


@pytest.mark.parametrize("call", ["put", "delete"])
async def test_what_the_broker_does_not_take_is_tried_again(
    nats_url: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_memory, "_RETRY_S", 0.01)
    refused: list[str] = []
    takes = getattr(KeyValue, call)

    async def refuse_once(bucket: KeyValue, key: str, *rest: Any) -> Any:
        if bucket._name == KNOWN_MODELS_BUCKET and not refused:
            refused.append(key)
            raise NatsTimeoutError
        return await takes(bucket, key, *rest)

    monkeypatch.setattr(KeyValue, call, refuse_once)
    async with cluster(nats_url) as c:
        await c.worker("w")
        await c.tell("w", READY)
        await until(lambda: c.known.get("m") is not None)
        await c.remove("w")
        await until(lambda: c.known.get("m") is None and c.memory.get("m") is None)
        assert refused


async def test_what_is_written_is_known_before_the_broker_s_echo_comes(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = KvView._on_write

    def hear_others(view: KvView, message: Message) -> None:
        if view._bucket != KNOWN_MODELS_BUCKET:
            hear(view, message)

    monkeypatch.setattr(KvView, "_on_write", hear_others)
    async with cluster(nats_url) as c:
        await c.worker("w")
        await c.tell("w", READY)
        await until(lambda: c.memory.get("m") is not None)
        await c.remove("w")
        await until(lambda: c.memory.get("m") is None)


def entry_of_worker(view: WorkerView) -> ModelRecord | None:
    """What is told of the model that makes it known."""
    return entry_of(view.models)

"""Which models are remembered after their workers have left, with a real registry and a gateway's catalog."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from tests.support.waiting import eventually
from weir.bus.kv.known_models import KnownModels
from weir.bus.kv.registry import RegistryView, RegistryWriter, WorkerView
from weir.bus.kv.view import KvBucket, KvView
from weir.bus.naming.subjects import KNOWN_MODELS_BUCKET
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.declarations import ensure_streams
from weir.calls.catalog import RECOVERY_GRACE_S, Catalog
from weir.scheduler.service import known_models as model_memory
from weir.scheduler.service.known_models import EntryAction, KnownModelStore, action_for, entry_of, needs_write
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.wire.registry import UNLOADED, ModelRecord, ModelState, VersionRecord, WorkerRecord

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
        ({}, {"a"}, EntryAction.KEEP),
        ({"b": record(GONE, reason="it could not be loaded")}, {"a"}, EntryAction.KEEP),
        ({"b": record(GONE, reason="for another GPU", elsewhere=True)}, {"a"}, EntryAction.KEEP),
        ({"b": record(ModelState.LOADING)}, {"a"}, EntryAction.KEEP),
        ({"b": record(GONE, reason=UNLOADED)}, {"a"}, EntryAction.REMOVE),
        ({"b": record(LEAVES, LEAVES)}, {"b"}, EntryAction.REMOVE),
        ({}, {"b"}, EntryAction.REMOVE),
    ],
)
def test_the_action_for_an_entry(records: dict[str, ModelRecord], served_by: set[str], fate: EntryAction) -> None:
    assert action_for(records, served_by, live={"b"}) is fate


def test_when_an_entry_is_written() -> None:
    entry, later = record(READY), record(READY, written_ns=5)
    assert needs_write(entry, None, 1)
    assert not needs_write(later, entry, 1)
    assert needs_write(record(READY, READY), entry, 1)
    assert needs_write(later, entry, 90_000 * 10**9), "an entry is written again before it ends by its age"


class Cluster:
    """A scheduler's memory, a gateway's catalog with a clock of its own, and workers."""

    def __init__(self, bus: Bus, background: asyncio.TaskGroup) -> None:
        self.bus = bus
        self.now_s = 0.0
        self.registry = RegistryView(bus)
        self.memory = KnownModelStore(bus, self.registry, lambda _model: True, is_on=True)
        self.known = KnownModels(bus)
        self.catalog = Catalog(self.registry, True, clock=lambda: self.now_s)
        self.catalog.accept_known(self.known)
        self._writers: dict[str, RegistryWriter] = {}

    async def start(self, background: asyncio.TaskGroup) -> None:
        await self.memory.start(background)
        await self.registry.start(background)
        await self.known.start(is_maker=False)

    async def worker(self, name: str, draining: bool = False) -> None:
        reported = WorkerRecord(name, 1, settled=True, draining=draining, written_ns=time.time_ns())
        await self._writer(name).write_worker(reported)

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
            await opened.known.remove_bucket()
            await bus.close()


async def test_a_model_outlasts_its_workers(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        assert not c.catalog.server_ready()
        await c.worker("w")
        await c.tell("w", READY)
        await eventually(lambda: c.known.get("m") is not None)
        await c.worker("w", draining=True)
        await c.leave("w")
        await eventually(lambda: not c.registry.workers)
        c.now_s += 2 * RECOVERY_GRACE_S
        assert c.is_accepted()
        assert not c.catalog.is_ready("m", "")
        assert c.catalog.server_ready(), "it takes requests, and they bring a worker"
        assert c.catalog.index() == [
            {"name": "m", "versions": [], "state": "UNAVAILABLE", "reason": "no worker serves the model"}
        ]
        # So it does for a gateway that has never seen a worker.
        late = KnownModels(c.bus)
        catalog = Catalog(c.registry, True)
        catalog.accept_known(late)
        await late.start(is_maker=False)
        assert catalog.resolve("m", "1").versions == [1]
        with pytest.raises(WeirError, match="version 2 is not found"):
            catalog.resolve("m", "2")
        # A worker that fails to load it ends nothing: the next one may be luckier.
        await c.worker("w2")
        await c.tell("w2", GONE, reason="no memory")
        await eventually(lambda: not c.is_accepted())
        await c.leave("w2")
        await eventually(c.is_accepted)
        await c.worker("w3")
        await c.tell("w3", READY)
        await eventually(lambda: c.catalog.is_ready("m", ""))


@pytest.mark.parametrize("how", ["unloaded", "removed"])
async def test_an_unloaded_model_is_removed(nats_url: str, how: str) -> None:
    async with cluster(nats_url) as c:
        await c.worker("w")
        await c.tell("w", READY)
        await eventually(lambda: c.known.get("m") is not None)
        await (c.tell("w", GONE, UNLOADED) if how == "unloaded" else c.remove("w"))
        await eventually(lambda: c.known.get("m") is None)
        c.now_s += 2 * RECOVERY_GRACE_S
        assert not c.is_accepted()


async def test_without_the_option_no_model_is_remembered(nats_url: str) -> None:
    async with cluster(nats_url) as c:
        await c.worker("w")
        await c.tell("w", READY)
        await eventually(lambda: c.known.get("m") is not None)
        await KnownModelStore(c.bus, c.registry, lambda _model: True, is_on=False).models.remove_bucket()
        late = KnownModels(c.bus)
        await late.start(is_maker=False)
        assert late.names() == set()


@pytest.mark.parametrize("how", ["unloaded", "removed"])
async def test_a_model_unloaded_during_the_write_is_removed(
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
        await eventually(lambda: not any(map(entry_of_worker, c.registry.workers.values())))
        may_go_on.set()
        await eventually(lambda: c.known.get("m") is None and c.memory.models.get("m") is None)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_failed_write_is_retried(nats_url: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write, or the second one, which removes the record."""
    monkeypatch.setattr(model_memory, "_RETRY_S", 0.01)
    calls: list[str] = []
    swap = KvBucket.swap

    async def refuse_one(bucket: KvBucket, key: str, *rest: Any) -> int:
        if bucket.stream == f"KV_{KNOWN_MODELS_BUCKET}":
            calls.append(key)
            if len(calls) == number + 1:
                raise NatsTimeoutError
        return await swap(bucket, key, *rest)

    monkeypatch.setattr(KvBucket, "swap", refuse_one)
    async with cluster(nats_url) as c:
        await c.worker("w")
        await c.tell("w", READY)
        await eventually(lambda: c.known.get("m") is not None)
        await c.remove("w")
        await eventually(lambda: c.known.get("m") is None and c.memory.models.get("m") is None)
        assert len(calls) == 3


async def test_a_written_entry_is_known_before_the_brokers_echo(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hear = KvView._on_write

    def hear_others(view: KvView, message: Message) -> None:
        if view.bucket.stream != f"KV_{KNOWN_MODELS_BUCKET}":
            hear(view, message)

    monkeypatch.setattr(KvView, "_on_write", hear_others)
    async with cluster(nats_url) as c:
        await c.worker("w")
        await c.tell("w", READY)
        await eventually(lambda: c.memory.models.get("m") is not None)
        await c.remove("w")
        await eventually(lambda: c.memory.models.get("m") is None)


def entry_of_worker(view: WorkerView) -> ModelRecord | None:
    """The record that makes the model known."""
    return entry_of(view.models)

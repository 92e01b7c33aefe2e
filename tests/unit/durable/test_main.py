"""`weir durable`, run within the test against a nats-server."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from weir.bus.kv.desired_models import DesiredModels
from weir.bus.kv.known_models import KnownModels
from weir.bus.kv.registry import RegistryWriter
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.durable import main
from weir.durable.api.reporting import CounterReporter
from weir.durable.background import BackgroundWork
from weir.durable.settings import DurableSettings
from weir.schemas.wire.model_control import DesiredModel, WantedModel
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord, WorkerRecord
from weir.schemas.wire.statistics import GatewayCounters, unpack_counters
from weir.telemetry.log_settings import LogSettings
from weir.telemetry.logs import RoleLog

MODEL = ModelRecord("m", {1: VersionRecord(ModelState.READY, instances=1)}, {"name": "m"}, written_ns=1)


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def served(nats: EmbeddedNats, stop: asyncio.Event) -> AsyncIterator[tuple[Bus, asyncio.TaskGroup]]:
    """Runs the process until `stop`; its counters are those of "d". Yields a connection of the test's own."""
    ready = asyncio.Event()
    settings = DurableSettings(nats_url=nats.url, durable_id="d")
    async with asyncio.timeout(20), asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        await bus.subscribe(subjects.LAST_COUNTERS, lambda _message: ready.set())
        process = background.create_task(main._serve(settings, RoleLog("durable", LogSettings()), stop, background))
        await ready.wait()
        yield bus, background
        stop.set()
        assert await process == 0
        await bus.close()


async def test_the_final_counters_have_what_ended_in_the_drain(
    nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    stop_work, stop_reporter = BackgroundWork.stop, CounterReporter.stop

    async def drained(work: BackgroundWork, timeout_s: float) -> None:
        await stop_work(work, timeout_s)
        events.append("drained")

    def reported(reporter: CounterReporter) -> None:
        events.append("reported")
        stop_reporter(reporter)

    monkeypatch.setattr(BackgroundWork, "stop", drained)
    monkeypatch.setattr(CounterReporter, "stop", reported)
    last: list[GatewayCounters] = []

    def on_counters(message: Message) -> None:
        counters = unpack_counters(message.data)
        assert isinstance(counters, GatewayCounters)
        last.append(counters)

    stop = asyncio.Event()
    async with served(nats, stop) as (bus, _):
        await bus.subscribe(subjects.LAST_COUNTERS, on_counters)
        await bus.flush()
        stop.set()
        while not last:
            await asyncio.sleep(0.01)
    assert last[0].leaving
    assert events == ["drained", "reported"]


async def test_a_model_that_a_client_unloads_is_known_no_longer(nats: EmbeddedNats) -> None:
    async with served(nats, asyncio.Event()) as (bus, _):
        known, desired, writer = KnownModels(bus), DesiredModels(bus), RegistryWriter(bus, "w")
        await known.start()
        await known.write(MODEL)
        await writer.write_worker(WorkerRecord("w", 1, settled=True, model_control_mode="explicit"))
        await desired.start()
        await desired.update("m", lambda _known: DesiredModel("m", 1, WantedModel(load=False)))
        while known.get("m") is not None:
            await asyncio.sleep(0.01)

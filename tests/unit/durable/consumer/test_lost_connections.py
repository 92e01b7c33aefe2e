"""The connection is lost at every stage of a durable request: the next request has its record within seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nats
import pytest

from tests.support.access.doors import open_gate
from tests.support.gateway.durable_lane import SERVED, Model, body_of
from tests.unit.durable.consumer.test_lane_consumer import STEPS, replace_step
from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.nats.jetstream import JetStream
from weir.durable.api.store import DurableStore
from weir.durable.consumer.consumer import DurableConsumer
from weir.durable.requests.request import DurableRequest
from weir.durable.settings import QueueSettings
from weir.runtime.memory_ledger import MemoryLedger
from weir.runtime.offload import Offload
from weir.schemas.core.request_limits import DEFAULT_LIMITS
from weir.schemas.kserve.regions import no_regions

HEALTHY_S = 5.0
CHUNK_BYTES = 128 << 10


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedNats(Path(tmp_path_factory.mktemp("nats")))
    server.start()
    yield server.url
    server.stop()


class Gateway:
    """A gateway's durable intake with a real broker, and a producer."""

    def __init__(self, bus: Bus, client: Any) -> None:
        self.bus = bus
        self.client = client
        self.jetstream = client.jetstream()
        self.answers: list[str] = []
        self._sent = 0

    def lose_connections(self) -> None:
        """The connection ends, as if its socket was reset."""
        protocol = self.bus._protocol
        if protocol is not None:
            protocol.abort()

    async def ask(self, body: bytes, **headers: str) -> str:
        self._sent += 1
        id = f"r{self._sent}"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await self.jetstream.publish("event.m", body, headers={"Nats-Msg-Id": id, **named})
        return id

    async def outcome(self, id: str) -> str:
        """What is recorded of a request, once it is."""
        while True:
            try:
                found = await self.jetstream.get_last_msg(subjects.RESULT_STREAM, subjects.result("m", id))
                return str((found.headers or {})["Weir-Outcome"])
            except nats.js.errors.NotFoundError:
                await asyncio.sleep(0.01)

    async def check_healthy(self, unlucky: str) -> None:
        """A request that comes now has its record in time, and so has the one that was hit."""
        healthy = await self.ask(body_of(2))
        async with asyncio.timeout(HEALTHY_S):
            assert await self.outcome(healthy) == "succeeded"
            assert await self.outcome(unlucky) == "succeeded"


@asynccontextmanager
async def gateway(url: str) -> AsyncIterator[Gateway]:
    settings = QueueSettings()
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "g", background)
        client = await nats.connect(url)
        store = DurableStore(bus, "g", settings)
        await store.start(background)
        catalog = SimpleNamespace(
            resolve=lambda name, version: SERVED, knows=lambda name: True,
            served_model=lambda name: SERVED, ready_replicas=lambda name, version: [],
        )  # fmt: skip
        services: Any = SimpleNamespace(
            catalog=catalog,
            inference=Model(),
            limits=DEFAULT_LIMITS,
            find_region=no_regions,
            ledger=MemoryLedger(),
            offload=Offload(),
            gate=open_gate(),
            has_workers=lambda: True,
        )
        intake = DurableConsumer(store, services, "g", settings)
        await intake.start(background)
        running = Gateway(bus, client)

        async def take(message: Any) -> None:
            running.answers.append((message.headers or {})["Weir-Id"])

        await client.subscribe("orders.answers", cb=take)
        try:
            yield running
        finally:
            await intake.stop(1.0)
            store.stop()
            await client.close()
            await bus.close()


async def test_a_healthy_request_is_recorded_soon_whenever_the_connection_is_lost(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(nats_url) as to:
        hit = ""
        stages: list[str] = []

        def losing(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal hit
                requests = [argument for argument in arguments if isinstance(argument, DurableRequest)]
                is_hit = bool(requests) and not hit
                if is_hit:
                    hit = requests[0].id
                result = function(*arguments, **named)
                if is_hit:
                    to.lose_connections()
                return result

            return call

        for owner, name in STEPS:
            hit = ""
            with monkeypatch.context() as patched:
                replace_step(patched, owner, name, losing)
                store = await to.jetstream.object_store(subjects.REQUEST_OBJECTS)
                body = f"{owner.__name__}.{name}"
                await store.put(body, body_of(1))
                unlucky = await to.ask(b"", Weir_Object=body, Weir_Reply_To="orders.answers")
                await to.check_healthy(unlucky)
                if hit:
                    stages.append(name)
            async with asyncio.timeout(HEALTHY_S):
                while unlucky not in to.answers:
                    await asyncio.sleep(0.01)
        assert len(stages) > 6  # others are not on the way of a request that succeeds


async def test_an_object_is_read_on_after_the_connection_was_lost(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(nats_url) as to:
        losses_left = 3
        ask_next = JetStream.next

        async def losing_next(messages: JetStream, *arguments: Any) -> Any:
            nonlocal losses_left
            if losses_left:
                losses_left -= 1
                asyncio.get_running_loop().call_soon(to.lose_connections)
            return await ask_next(messages, *arguments)

        monkeypatch.setattr(JetStream, "next", losing_next)
        store = await to.jetstream.object_store(subjects.REQUEST_OBJECTS)
        for number in range(8):
            await store.put(f"large{number}", body_of(1, CHUNK_BYTES))
        asked = [await to.ask(b"", Weir_Object=f"large{number}") for number in range(8)]
        await to.check_healthy(asked[0])
        async with asyncio.timeout(HEALTHY_S):
            assert [await to.outcome(id) for id in asked] == ["succeeded"] * 8

"""Detection of the NATS server's durability, with real servers that sync before they acknowledge and ones that don't."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.support.servers.nats import GivenNats
from tests.support.servers.roles import RoleProcess
from tests.support.waiting import eventually
from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import SYNCED_SERVER_VARIABLE, EmbeddedNats
from weir.bus.streams import durability
from weir.bus.streams.consumers import QueueConsumers
from weir.bus.streams.declarations import QueueLimits, ensure_durable_streams
from weir.bus.streams.durability import NO, YES, Durability, DurabilityCheck
from weir.bus.streams.guard import StreamGuard
from weir.durable.api.metrics import Backlog, DurableCounters
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import Lane

LIMITS = QueueLimits(max_messages=100, max_bytes=1 << 24, result_ttl_s=300.0, result_max_bytes=1 << 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def synced(folder: Path) -> Iterator[GivenNats]:
    server = GivenNats(folder / "synced", "always")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def unsynced(folder: Path) -> Iterator[GivenNats]:
    server = GivenNats(folder / "unsynced")
    yield server
    server.stop()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "embedded")
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[Bus, asyncio.TaskGroup]]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "test", background)
        try:
            yield bus, background
        finally:
            await bus.close()


async def reply(url: str, monitor: str = "") -> Durability:
    async with connected(url) as (bus, _):
        check = DurabilityCheck(bus, monitor)
        await check.start()
        return check.result


async def test_a_monitor_tells(synced: GivenNats, unsynced: GivenNats, caplog: pytest.LogCaptureFixture) -> None:
    assert await reply(synced.url, synced.monitor) == YES
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert await reply(unsynced.url, f" {unsynced.monitor}/ ") == NO
    assert "ack = fsync: no" in caplog.text
    assert "a power loss may lose what it accepted" in caplog.text


async def test_nobody_tells(synced: GivenNats, unsynced: GivenNats, caplog: pytest.LogCaptureFixture) -> None:
    silent = await reply(synced.url)
    assert silent.ack_is_fsync is None
    assert "--nats-monitor" in silent.reason
    assert "ack = fsync: unknown" in caplog.text
    another = await reply(unsynced.url, synced.monitor)
    assert another.reason.startswith("the monitoring URL is that of another")
    nobody = await reply(synced.url, "http://user:secret@127.0.0.1:1")
    assert nobody.reason.startswith("its monitor does not respond at 127.0.0.1:1: ")
    assert (await reply(synced.url, "file:///etc/passwd")).ack_is_fsync is None
    assert (await reply(synced.url, f"{synced.monitor}/nowhere")).ack_is_fsync is None


async def test_a_monitor_on_the_usual_port_is_found(
    synced: GivenNats, unsynced: GivenNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "_USUAL_PORT", int(synced.monitor.rpartition(":")[2]))
    assert await reply(synced.url) == YES
    assert (await reply(unsynced.url)).ack_is_fsync is None  # another server's


async def test_the_system_account_is_told_without_a_monitor(folder: Path) -> None:
    for syncs, expected in (("always", YES), (None, NO)):
        users = [{"user": "s", "password": "s"}]
        accounts = {"S": {"users": users}, "A": {"jetstream": True, "users": [{"user": "a", "password": "a"}]}}
        server = GivenNats(folder / f"system-{syncs}", syncs, False, accounts=accounts, system_account="S")
        try:
            # A check needs no streams: as it happens, the system account has none.
            assert await reply(server.url.replace("//", "//s:s@")) == expected
            assert (await reply(server.url.replace("//", "//a:a@"))).ack_is_fsync is None
        finally:
            server.stop()


async def test_the_embedded_server_is_known_by_its_name(
    embedded: EmbeddedNats, synced: GivenNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert embedded.synced_name
    monkeypatch.setenv(SYNCED_SERVER_VARIABLE, embedded.synced_name)
    assert await reply(embedded.url) == durability.EMBEDDED
    assert (await reply(synced.url)).ack_is_fsync is None
    config = embedded.data_dir / "nats-server.conf"
    config.write_text(json.dumps({**json.loads(config.read_text()), "jetstream": {"sync_interval": "2m"}}))
    assert embedded.synced_name == ""


@pytest.mark.timeout(60)
def test_a_gateway_tells(unsynced: GivenNats, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    options = (f"--nats={unsynced.url}", f"--nats-monitor={unsynced.monitor}")
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    gateway = RoleProcess(tmp_path / "logs", "gateway", *options, *ports)
    try:
        assert gateway.facts["durability"] == {"ack_is_fsync": False, "reason": NO.reason}
        assert "ack = fsync: no" in gateway.log()
        import tritonclient.grpc
        import tritonclient.http

        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{gateway.facts['http_port']}") as http:
            metadata = http.get_server_metadata()
        assert metadata["durability"] == {"ack_is_fsync": False, "reason": NO.reason}
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{gateway.facts['grpc_port']}") as grpc:
            assert list(grpc.get_server_metadata().extensions) == metadata["extensions"]
        import urllib.request

        page = urllib.request.urlopen(f"http://127.0.0.1:{gateway.facts['metrics_port']}/metrics").read().decode()
        assert "\nweir_durable_ack_is_fsync 0\n" in page
        assert '\nweir_durable_stream_bytes{stream="QUEUE"} 0\n' in page
        assert "\nweir_durable_owned_models 0\n" in page
    finally:
        assert gateway.end() == 0


async def test_a_gateway_refuses_streams_that_are_not_what_it_relies_on(embedded: EmbeddedNats) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"name": "QUEUE", "subjects": ["event.>", "batch.>"]}, "stream QUEUE has subjects"),
        (
            {"name": "QUEUE", "subjects": list(subjects.QUEUE_SUBJECTS), "storage": "memory"},
            "stream QUEUE has retention 'limits' but Weir needs 'workqueue'",
        ),
        (
            {"name": "DEAD", "subjects": ["dead.>"], "storage": "memory", "allow_direct": True},
            "stream DEAD has storage 'memory' but Weir needs 'file'",
        ),
        ({"name": "DEAD", "subjects": ["dead.>"]}, "stream DEAD has allow_direct off but Weir needs on"),
        (
            {"name": "DEAD", "subjects": ["dead.>"], "allow_direct": True, "deny_delete": True},
            "stream DEAD has deny_delete on but Weir needs off",
        ),
    )
    for config, problem in cases:
        async with connected(embedded.url) as (bus, background):
            await bus.jetstream.add_stream(**config)
            with pytest.raises(WeirError) as refused:
                await StreamGuard(bus, LIMITS).start(background)
            assert refused.value.message.startswith(problem)
            assert "change it back, or delete the stream" in refused.value.message
            for name in ("QUEUE", "RESULT", "DEAD"):
                await bus.jetstream.delete_stream(name)
    async with connected(embedded.url) as (bus, background):
        await ensure_durable_streams(bus, LIMITS)
        info = await bus.jetstream.stream_info("QUEUE")
        await bus.jetstream.update_stream(info.config.evolve(max_age=600.0))
        with pytest.raises(WeirError, match="stream QUEUE has max_age 600000000000 but Weir needs off"):
            await StreamGuard(bus, LIMITS).start(background)


async def test_limits_follow_the_options(embedded: EmbeddedNats) -> None:
    async with connected(embedded.url) as (bus, background):
        await StreamGuard(bus, LIMITS).start(background)
        queue = (await bus.jetstream.stream_info("QUEUE")).config
        await bus.jetstream.update_stream(queue.evolve(description="the operator's own", max_bytes=5))
        changed = QueueLimits(max_messages=7, max_bytes=1 << 20, result_ttl_s=60.0, result_max_bytes=1 << 21)
        await StreamGuard(bus, changed).start(background)
        queue = (await bus.jetstream.stream_info("QUEUE")).config
        assert (queue.max_msgs_per_subject, queue.max_bytes) == (7, 1 << 20)
        assert queue.description == "the operator's own"
        assert queue.discard_new_per_subject
        result = (await bus.jetstream.stream_info("RESULT")).config
        assert (result.max_age, result.max_bytes, result.max_msgs_per_subject) == (60.0, 1 << 21, 1)
        await StreamGuard(bus, LIMITS).start(background)
        assert (await bus.jetstream.stream_info("RESULT")).config.max_age == 300.0


async def test_a_broker_without_room_for_the_streams_names_their_options(folder: Path) -> None:
    small = GivenNats(folder / "small", jetstream={"store_dir": str(folder / "small"), "max_file_store": 40 << 20})
    limits = replace(LIMITS, dead_max_bytes=1 << 24)
    try:
        async with connected(small.url) as (bus, background):
            with pytest.raises(WeirError) as caught:
                await StreamGuard(bus, limits).start(background)
            # What was made before there was no more room is no obstacle for smaller ones.
            smaller = replace(limits, max_bytes=1 << 20, result_max_bytes=1 << 20)
            await StreamGuard(bus, smaller).start(background)
            infos = [await bus.jetstream.stream_info(name) for name in ("QUEUE", "RESULT", "DEAD")]
            assert [info.config.max_bytes for info in infos] == [1 << 20, 1 << 20, 1 << 24]
    finally:
        small.stop()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert "has no room for the durable streams: insufficient storage resources available" in caught.value.message
    for option in ("--queue-max-bytes", "--result-max-bytes", "--dead-max-bytes", "max_file_store"):
        assert option in caught.value.message


async def test_more_models_than_nats_server_gives_consumers_by_itself(unsynced: GivenNats) -> None:
    async with connected(unsynced.url) as (bus, _):
        await ensure_durable_streams(bus, LIMITS)
        consumers = QueueConsumers(bus)
        for first in range(0, 1020, 102):
            await asyncio.gather(*(consumers.ensure("event", f"m{number}") for number in range(first, first + 102)))
        assert (await bus.jetstream.stream_info("QUEUE")).state.consumer_count >= 1020
        assert (await consumers.acquire("event", "m1019", "owner")).previous_owner == ""
        await bus.jetstream.delete_stream("QUEUE")


async def test_a_stream_that_is_deleted_is_made_anew_and_told(
    embedded: EmbeddedNats, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(embedded.url) as (bus, background):
        guard = StreamGuard(bus, LIMITS)
        await guard.start(background)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        made: list[str] = []
        guard.on_recreated(made.append)
        await bus.jetstream.delete_stream("QUEUE")
        await eventually(lambda: made)
        assert made == ["QUEUE"]
        assert "stream QUEUE was deleted while it was in use" in caplog.text
        assert (await bus.jetstream.stream_info("QUEUE")).config.retention == "workqueue"
        # Changed under us: told, and left as it is.
        info = await bus.jetstream.stream_info("DEAD")
        await bus.jetstream.update_stream(info.config.evolve(deny_purge=True))
        await eventually(lambda: "stream DEAD has deny_purge on" in caplog.text)
        caplog.clear()
    # Deleted while no gateway was there.
    for name, is_told in (("DEAD", False), ("RESULT", True)):  # DEAD is made last: that it is not there tells nothing
        client = await nats.connect(embedded.url)
        await client.jetstream().delete_stream(name)
        await client.close()
        async with connected(embedded.url) as (bus, background):
            await StreamGuard(bus, LIMITS).start(background)
        assert ("stream RESULT does not exist although DEAD does" in caplog.text) == is_told


async def test_the_broker_tells_what_waits(embedded: EmbeddedNats) -> None:
    async with connected(embedded.url) as (bus, _):
        await ensure_durable_streams(bus, LIMITS)
        jetstream = bus.jetstream
        await jetstream.add_consumer(
            "QUEUE",
            durable_name="event-m=2En",
            filter_subjects=list(subjects.durable_filters("event", "m.n")),
            ack_policy="explicit",
        )
        began_s = time.time()
        for _ in range(3):
            await jetstream.publish("event.m=2En", b"x")
        await jetstream.pull_one("QUEUE", "event-m=2En", 1.0)
        await jetstream.publish("dead.m=2En", b"x" * 1000)
        await jetstream.publish("dead.nobody", b"")
        counters = DurableCounters(lambda name: name == "m.n")
        backlog = Backlog(bus, counters)
        await backlog.refresh()
        assert counters.waiting == {("m.n", "event"): 2}
        assert counters.in_flight == {("m.n", "event"): 1}
        assert backlog.dead_letters == {"m.n": 1, "_other": 1}
        assert backlog.sizes["DEAD"].messages == 2
        assert backlog.sizes["DEAD"].size_bytes > 1000
        assert began_s <= backlog.sizes["QUEUE"].first_s <= time.time()
        # Not asked again at once; and what is gone has no gauge.
        await jetstream.delete_consumer("QUEUE", "event-m=2En")
        await backlog.refresh()
        assert counters.waiting
        backlog._fresh_until_s = 0
        await backlog.refresh()
        assert counters.waiting == counters.in_flight == {}
        counters.set_waiting("m.n", Lane.BATCH, 1)
        counters.forget("m.n")
        assert counters.waiting == {}


async def test_a_stream_that_is_deleted_while_another_is_made_anew_is_too(
    embedded: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(embedded.url) as (bus, background):
        guard, restored = StreamGuard(bus, LIMITS), list[str]()
        await guard.start(background)
        restore = guard._restore

        async def restore_and_lose(is_logged: bool = False) -> None:
            await restore(is_logged)
            if not restored:
                restored.append("once")
                await bus.jetstream.delete_stream("QUEUE")
                await bus.flush()

        monkeypatch.setattr(guard, "_restore", restore_and_lose)
        await bus.jetstream.delete_stream("DEAD")
        async with asyncio.timeout(10):
            while not restored or await bus.jetstream.find_stream("QUEUE") is None:
                await asyncio.sleep(0.02)
        guard.stop()

"""Schedulers that divide queues between them, hand them over and take them over, on a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from weir.bus.kv.known_models import KnownModels
from weir.bus.kv.queue_owners import QueueOwners
from weir.bus.kv.registry import RegistryWriter
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.declarations import AcquiredQueue, ensure_streams
from weir.scheduler.ownership import controller as controller_module
from weir.scheduler.ownership import policy
from weir.scheduler.ownership.controller import OwnershipController
from weir.scheduler.service.service import SchedulerService, ServiceOptions
from weir.schemas.core.errors import ErrorCode
from weir.schemas.wire.batches import QueueOwner
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord, WorkerRecord

MODELS = [f"m{number}" for number in range(4)]


class Scheduler:
    """One scheduler with a connection of its own."""

    def __init__(self, bus: Bus, name: str, cluster: Cluster, options: ServiceOptions) -> None:
        background = cluster.background
        self._cluster = cluster
        self.bus = bus
        self.name = name
        self.service = SchedulerService(bus, name, background, options)
        self.controller = OwnershipController(bus, name, self.service, background)

    async def start(self) -> None:
        await self.service.start()
        await self.controller.start()

    @property
    def queues(self) -> set[str]:
        return {queue.model for queue in self.service.queues.by_name}

    async def leave(self) -> None:
        self._cluster.running.remove(self)
        await self.controller.hand_over_all(3.0)
        await self.service.stop(1.0)
        await self.controller.withdraw()
        await self.bus.close()

    async def crash(self) -> None:
        """Ends the connection without any message, as when the process is killed."""
        self._cluster.running.remove(self)
        await self.bus.close()


class Cluster:
    """A nats-server, a worker that serves some models, and schedulers."""

    def __init__(self, nats_url: str, bus: Bus, background: asyncio.TaskGroup) -> None:
        self.bus = bus
        self.owners = QueueOwners(bus)
        self._nats_url = nats_url
        self.background = background
        self.running: list[Scheduler] = []

    async def serve(self, models: Sequence[str]) -> None:
        registry = RegistryWriter(self.bus, "worker")
        await registry.write_worker(WorkerRecord("worker", 1, settled=True))
        for model in models:
            config = {"name": model, "max_batch_size": 1}
            await registry.write_model(ModelRecord(model, {1: VersionRecord(ModelState.READY, instances=1)}, config))

    async def scheduler(self, name: str, **options: bool) -> Scheduler:
        bus = await Bus.connect(self._nats_url, name, self.background)
        scheduler = Scheduler(bus, name, self, ServiceOptions(**options))
        await scheduler.start()
        self.running.append(scheduler)
        return scheduler

    async def owner(self, model: str) -> str:
        return (await self.owners.read(LiveQueue(model))).owner


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    server = EmbeddedNats(tmp_path)
    url = server.start()
    before = asyncio.all_tasks()
    async with asyncio.TaskGroup() as group:
        bus = await Bus.connect(url, "test", group)
        await ensure_streams(bus)
        cluster = Cluster(url, bus, group)
        yield cluster
        for scheduler in list(cluster.running):
            await scheduler.leave()
        await bus.close()
        while others := asyncio.all_tasks() - before - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=0.2)
    server.stop()


async def test_one_scheduler_owns_all_queues_and_writes_their_records(cluster: Cluster) -> None:
    await cluster.serve(MODELS)
    only = await cluster.scheduler("a")
    assert only.queues == set(MODELS)
    assert [await cluster.owner(model) for model in MODELS] == ["a"] * 4
    await cluster.serve(["later"])
    await eventually(lambda: "later" in only.queues)


async def test_a_scheduler_that_stops_renews_its_lease_until_it_withdraws(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without, the ends of batches that run longer than the lease would never arrive, and the stop wait for them."""
    await cluster.serve(["m0"])
    only = await cluster.scheduler("a")
    await only.controller.hand_over_all(3.0)
    gate = only.service.lease_gate
    renewed: list[float] = []
    renew = gate.renew
    monkeypatch.setattr(gate, "renew", lambda sent_s: renewed.append(sent_s) or renew(sent_s))
    await eventually(lambda: len(renewed) >= 3)
    assert gate.is_open
    assert only.queues == {"m0"}


async def test_a_load_of_an_unknown_or_unreadable_model_makes_no_queue(cluster: Cluster) -> None:
    await cluster.serve(["m0"])
    only = await cluster.scheduler("a")
    registry = RegistryWriter(cluster.bus, "worker")
    await registry.write_model(
        ModelRecord("nowhere", revision=1, error_code=ErrorCode.INTERNAL.number, error="failed to load 'nowhere'")
    )
    await registry.write_model(
        ModelRecord("unreadable", reason="config.pbtxt:1:1: ...", revision=1, error_code=ErrorCode.INTERNAL.number)
    )
    await cluster.serve(["m1"])
    await eventually(lambda: "m1" in only.queues)
    assert only.queues == {"m0", "m1"}


async def test_a_second_scheduler_gets_half_of_the_queues(cluster: Cluster) -> None:
    await cluster.serve(MODELS)
    first = await cluster.scheduler("a")
    second = await cluster.scheduler("b")
    await eventually(lambda: len(second.queues) == 2)
    await eventually(lambda: len(first.queues) == 2)
    assert first.queues | second.queues == set(MODELS)
    for scheduler in (first, second):
        assert {await cluster.owner(model) for model in scheduler.queues} == {scheduler.name}


async def test_a_scheduler_that_leaves_hands_its_queues_over(cluster: Cluster) -> None:
    await cluster.serve(MODELS)
    first = await cluster.scheduler("a")
    second = await cluster.scheduler("b")
    await eventually(lambda: len(second.queues) == 2)
    await first.leave()
    assert [await cluster.owner(model) for model in MODELS] == ["b"] * 4
    await eventually(lambda: second.queues == set(MODELS))  # it serves a queue only after it has read the record
    await second.leave()
    assert [await cluster.owner(model) for model in MODELS] == [""] * 4, "no scheduler is left to own them"


async def test_the_queues_of_a_scheduler_that_crashed_are_taken_over(cluster: Cluster) -> None:
    await cluster.serve(MODELS)
    first = await cluster.scheduler("a")
    second = await cluster.scheduler("b")
    await eventually(lambda: len(first.queues) == len(second.queues) == 2)
    epochs = {queue.model: owned.epoch for queue, owned in first.service.queues.by_name.items()}
    await first.crash()
    await eventually(lambda: second.queues == set(MODELS))
    taken = {queue.model: owned.epoch for queue, owned in second.service.queues.by_name.items()}
    assert all(taken[model] > epoch for model, epoch in epochs.items())


async def test_a_queue_that_was_taken_meanwhile_is_dropped(cluster: Cluster) -> None:
    """As after a pause of the process: its heartbeats are late, and another scheduler has written the record."""
    await cluster.serve(MODELS[:1])
    only = await cluster.scheduler("a")
    queue = LiveQueue(MODELS[0])
    assert only.queues == {queue.model}
    record = await cluster.owners.read(queue)
    only.service.lease_gate.close()
    assert await cluster.owners.write(queue, "another", record) is not None
    await eventually(lambda: only.service.lease_gate.is_open)
    assert only.queues == set()
    # The other one never sends a heartbeat, so the queue returns.
    await eventually(lambda: only.queues == {queue.model})
    assert await cluster.owner(queue.model) == "a"


async def test_a_lost_record_is_written_again_by_the_owner(cluster: Cluster) -> None:
    await cluster.serve(MODELS[:1])
    only = await cluster.scheduler("a")
    await cluster.bus.jetstream.purge_stream(subjects.OWNERS_STREAM)
    only.service.lease_gate.close()
    await eventually(lambda: only.service.lease_gate.is_open)
    assert await cluster.owner(MODELS[0]) == "a"
    assert only.queues == set(MODELS[:1])


@pytest.mark.parametrize("is_checked", [True, False])
async def test_a_queue_that_is_acquired_again_has_one_subscription(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    """Another scheduler has taken the queue and died between two heartbeats; a lease check may run meanwhile."""
    await cluster.serve(MODELS[:1])
    only = await cluster.scheduler("a")
    queue = LiveQueue(MODELS[0])
    is_acquiring, may_end = asyncio.Event(), asyncio.Event()
    epochs: list[int] = []
    acquire = controller_module.acquire_live_consumer

    async def slow(bus: Bus, queue: LiveQueue, epoch: int) -> AcquiredQueue:
        epochs.append(epoch)
        is_acquiring.set()
        await may_end.wait()
        return await acquire(bus, queue, epoch)

    async def nothing() -> None:
        pass

    monkeypatch.setattr(controller_module, "acquire_live_consumer", slow)
    monkeypatch.setattr(only.controller, "_check_consumers", nothing)
    monkeypatch.setattr(policy, "_RETRY_S", 0.0)
    taken = await cluster.owners.write(queue, "b", await cluster.owners.read(queue))
    assert taken is not None
    announcement = QueueOwner(*queue, "b", taken.epoch).pack()
    only.controller._on_announcement(Message(subjects.owner_announcement(*queue), "", announcement, ""))
    only.controller._on_scheduler_lost("b")
    await is_acquiring.wait()
    if is_checked:
        await only.controller._check()
        only.controller._act()
        while len(only.controller._tasks_in_progress) > 1 and len(epochs) < 2:
            await asyncio.sleep(0.01)
    may_end.set()
    await eventually(lambda: only.queues == {queue.model} and not only.controller._tasks_in_progress)
    subscribed = [subject for subject, _ in only.bus._subjects.values()]
    for subject in (queue.inbox("a"), queue.cancel_subject, queue.drain_subject):
        assert subscribed.count(subject) == 1, subject
    owned = only.service.queues.by_name.get(queue)
    assert owned is not None
    assert owned.epoch == (await cluster.owners.read(queue)).epoch


async def test_a_policy_that_raised_is_replaced(cluster: Cluster) -> None:
    await cluster.serve(MODELS[:1])
    only = await cluster.scheduler("a")
    queue = LiveQueue(MODELS[0])
    broken = only.service.queues.by_name.get(queue)
    assert broken is not None
    only.service.queues.drop(broken)
    only.service.queues.on_policy_failed(broken)
    await eventually(lambda: only.service.queues.by_name.get(queue) not in (None, broken))
    assert await cluster.owner(queue.model) == "a"


@pytest.mark.parametrize("is_kept", [True, False])
async def test_models_that_others_remember_are_removed_unless_one_of_those_runs(
    cluster: Cluster, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "PRESENCE_WAIT_S", 0.6)
    await cluster.serve(MODELS[:1])
    remembering = await cluster.scheduler("remembering", scale_to_zero=True)
    known = KnownModels(cluster.bus)
    await known.start(is_maker=False)
    await eventually(lambda: known.names() == {MODELS[0]})
    if not is_kept:
        await remembering.leave()
    await cluster.scheduler("other")
    if is_kept:
        await asyncio.sleep(1.2)
        assert known.names() == {MODELS[0]}
    else:
        await eventually(lambda: not known.names())

"""A queue whose policy raises is served again by the same scheduler, over a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from weir.bus.kv.registry import RegistryWriter
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.scheduler.ownership.controller import OwnershipController
from weir.scheduler.service.service import SchedulerService
from weir.schemas.wire.batches import BatchEnded, Batches, Completions
from weir.schemas.wire.calls import Frame, RequestEnvelope, unpack_responses
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord, WorkerRecord

MODEL = {"name": "model", "max_batch_size": 1, "dynamic_batching": {}}


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path)
    server.start()
    yield server
    server.stop()


class Worker:
    """Takes batches, and ends them when it is told to; an instance holds one, and another waits behind it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.batches: dict[int, int] = {}  # keys by batch

    async def start(self) -> None:
        await self._bus.subscribe(subjects.work("worker"), self._on_batch)
        registry = RegistryWriter(self._bus, "worker")
        await registry.write_worker(WorkerRecord("worker", 1, settled=True))
        await registry.write_model(ModelRecord("model", {1: VersionRecord(ModelState.READY, instances=1)}, MODEL))

    def _on_batch(self, message: Message) -> None:
        for batch in Batches.unpack(message.data).batches:
            (entry,) = batch.entries
            self.batches[batch.batch_id] = entry.key

    def end(self) -> list[int]:
        """Ends all batches; returns their keys."""
        ended, self.batches = self.batches, {}
        dones = [BatchEnded(batch_id, 1) for batch_id in ended]
        self._bus.publish(subjects.done("scheduler"), Completions("worker", dones).pack())
        return list(ended.values())


async def test_a_queue_whose_policy_raises_is_served_again(nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        service = SchedulerService(bus, "scheduler", background)
        await service.start()
        worker = Worker(bus)
        await worker.start()
        keeper = OwnershipController(bus, "scheduler", service, background)
        await keeper.start()
        queue = LiveQueue("model")
        await eventually(lambda: service.queues.by_name.get(queue) is not None)
        broken = service.queues.by_name.get(queue)
        assert broken is not None
        failed: list[int] = []
        await bus.subscribe(
            subjects.reply("gateway"),
            lambda message: failed.extend(answer.key for answer in unpack_responses(message.data)[1] if answer.error),
        )

        def send(*keys: int) -> None:
            parts = [RequestEnvelope(key, -1, 1, "", 0, 0, 0, 0, 0, "", b"") for key in keys]
            bus.publish(bus.live_layout.subject(queue), Frame("gateway", parts).pack())

        send(1, 2, 3)  # one runs, one is behind it at its instance, and one waits
        await eventually(lambda: sorted(worker.batches.values()) == [1, 2])
        worker.batches.clear()  # as if the worker went on with them for long

        def raise_error(*_: object) -> None:
            raise RecursionError("injected")

        monkeypatch.setattr(broken.scheduler, "dispatch", raise_error)
        send(4)
        await eventually(lambda: sorted(failed) == [3, 4])
        await eventually(lambda: service.queues.by_name.get(queue) not in (None, broken))
        # What was with the worker is delivered again, and the frame's other request with it.
        send(5)
        ended: list[int] = []
        while len(ended) < 4:
            await eventually(lambda: bool(worker.batches))
            ended += worker.end()
        assert sorted(ended) == [1, 2, 3, 5]
        await eventually(lambda: len(service.queues.by_name[queue].scheduler) == 0)
        assert sorted(failed) == [3, 4]
        await keeper.hand_over_all(1.0)
        await service.stop(1.0)
        await keeper.withdraw()
        await bus.close()

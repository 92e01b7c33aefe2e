"""What a scheduler costs: `python -m benchmarks.scheduler_core` prints one line per case.

First the sans-IO core alone (enqueue, dispatch, complete), in requests/s on one core; then the service around it, from
the bytes of a frame to those of the batch and the end of the batch, in CPU microseconds a request. The broker and its
client are excluded. Each figure is the best of many short rounds: what else the machine does only makes rounds slower.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count

from bus.connection import Message
from scheduler.model_scheduler import ModelScheduler
from scheduler.queued_request import requests_of
from scheduler.service import SchedulerService
from schemas.messages import Done, Part, pack_done, pack_frame
from schemas.model_config import ModelConfig

ROUNDS = 200
MAX_BATCH_SIZE = 32
BODY = bytes(150)
CONFIG = ModelConfig.model_validate({"name": "model", "max_batch_size": MAX_BATCH_SIZE, "dynamic_batching": {}})


def best_s(call: Callable[[], object], calls: int) -> float:
    """The fastest round's time for one `call`."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - begin)
    return best / calls


def part(key: int) -> Part:
    """A request of batch size 1 for the latest version."""
    return Part(key, -1, 1, "", 0, 0, 0, 0, 0, "", BODY)


class _NoFrame:
    """Stands for the message that requests came in, where no bus is measured."""

    def delegate(self, batch_id: int, requests: int) -> str | None:
        return None

    def requests_ended(self, requests: int, batch_id: int) -> None:
        pass


def core_requests_per_s(instances: int) -> float:
    """The core with every instance kept busy by full batches: one more comes in, all run ones end."""
    model = ModelScheduler("model")
    model.configure(1, CONFIG)
    model.set_instances("worker", {1: instances})
    keys, times, frame = count(), count(1), _NoFrame()
    running: list[int] = []

    def cycle() -> None:
        now_us = next(times)
        for _ in range(instances):
            model.enqueue(requests_of("gateway", [part(next(keys)) for _ in range(MAX_BATCH_SIZE)], now_us, frame))
        batches, _ = model.dispatch(now_us)
        for batch_id in running:
            model.complete(now_us, batch_id, 0, 300)
        running[:] = [batch.id for batch in batches]

    cycle()
    return instances * MAX_BATCH_SIZE / best_s(cycle, calls=20)


class _CollectingBus:
    """The service's bus, without a broker: what is published is forgotten."""

    is_connected = True

    def __init__(self) -> None:
        self.callbacks: dict[str, Callable[[Message], None]] = {}
        self._deferred: list[Callable[[], None]] = []

    async def subscribe(self, subject: str, callback: Callable[[Message], None]) -> None:
        self.callbacks[subject] = callback

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        pass

    def defer(self, callback: Callable[[], None]) -> None:
        self._deferred.append(callback)

    def deliver(self, message: Message) -> None:
        """One turn of the event loop with one message."""
        self.callbacks[message.subject](message)
        while self._deferred:
            self._deferred.pop()()


async def service_us_per_request(batch_size: int) -> float:
    """The service with frames of `batch_size` requests, each of which is a batch that ends before the next comes."""
    bus = _CollectingBus()
    service = SchedulerService(bus, "scheduler-0", None)  # type: ignore[arg-type]
    await service.listen()
    owned = await service.own("model", "live-model")
    owned.scheduler.configure(1, CONFIG)
    owned.scheduler.set_instances("worker-0", {1: 1})
    calls = 2000 // batch_size // 10
    messages: list[tuple[Message, Message]] = []
    for number in range(ROUNDS * calls):
        frame = pack_frame("gateway-0", [part(number * batch_size + i) for i in range(batch_size)])
        done = pack_done("worker-0", [Done(number + 1, 0, 300)])
        ack = f"$JS.ACK.LIVE.live-model.1.{number}.{number}.1700000000000000000.0"
        messages.append((Message("inbox.scheduler-0.model", ack, frame, ""), Message("done.scheduler-0", "", done, "")))
    coming = iter(messages)

    def cycle() -> None:
        frame, done = next(coming)
        bus.deliver(frame)
        bus.deliver(done)

    best = best_s(cycle, calls)
    if service.unanswered:
        raise RuntimeError(f"{service.unanswered} requests have no answer: the figures would mean nothing")
    return best / batch_size * 1e6


def main() -> None:
    """Print the figures."""
    for instances in (1, 4):
        rate = core_requests_per_s(instances)
        print(f"core, {instances} instance(s), batches of {MAX_BATCH_SIZE}: {rate:10,.0f} requests/s")
    for batch_size in (1, 8, 32):
        print(
            f"service, batches of {batch_size:2}: {asyncio.run(service_us_per_request(batch_size)):6.2f} us a request"
        )


if __name__ == "__main__":
    main()

"""CPU of the scheduler: `python -m benchmarks.scheduler_core` prints a table of policies, then one line per case.

The table has the sans-IO core alone (enqueue, dispatch, complete) on one core: decisions per second, where a decision
says when, where and with which others a request runs. The lines have the service around it, from the bytes of a frame
to those of the batch and the completion of the batch, in CPU microseconds per request, without the broker and its
client. Each figure is the best of many short rounds, because other work on the machine can only make a round slower.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count, islice
from math import inf
from typing import Any, NamedTuple

from tests.support.collecting_bus import CollectingBus
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Message
from weir.scheduler.batching.request import NO_FRAME, requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.service.service import SchedulerService
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.requests import SEQUENCE_START
from weir.schemas.wire.batches import BatchEnded, Completions
from weir.schemas.wire.calls import Frame, RequestEnvelope

ROUNDS = 200
MAX_BATCH_SIZE = 32
BODY = bytes(150)
CONFIG = ModelConfig.model_validate({"name": "model", "max_batch_size": MAX_BATCH_SIZE, "dynamic_batching": {}})


def best_s(call: Callable[[], object], calls: int, rounds: int = ROUNDS, at_most_s: float = inf) -> float:
    """The fastest round's time for one `call`; no further rounds after so long."""
    best, over = inf, time.perf_counter() + at_most_s
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - begin)
        if begin > over:
            break
    return best / calls


def part(
    key: int, priority: int = 0, timeout_us: int = 0, sequence: int = 0, flags: int = 0, lane: int = 0
) -> RequestEnvelope:
    """A request of batch size 1 for the latest version."""
    return RequestEnvelope(key, -1, 1, "", priority, timeout_us, 0, sequence, flags, "", BODY, lane)


class Case(NamedTuple):
    """A policy at work: `frames` of `size` requests each come before every dispatch, for `live` sequences in turn.

    Without `sequence_batching` and `dynamic_batching` it is the default scheduler. Requests may have `priorities`, from 1
    to so many, and timeouts; they are of `lane`.
    """

    name: str
    config: dict[str, Any]
    instances: int = 4
    frames: int = 4
    size: int = MAX_BATCH_SIZE
    live: int = 0
    priorities: int = 0
    timeout_us: int = 0
    lane: int = 0


def _sequences(**strategy: Any) -> dict[str, Any]:
    return {"sequence_batching": {**strategy, "max_sequence_idle_microseconds": 1 << 40}}


_LEVELS = {"allow_timeout_override": True, "default_timeout_microseconds": 1 << 40}
_DYNAMIC: dict[str, Any] = {"dynamic_batching": {}}
_DELAYED = {"dynamic_batching": {"preferred_batch_size": [8, 16], "max_queue_delay_microseconds": 500}}
_PRIORITIES = {
    "dynamic_batching": {"priority_levels": 10, "default_priority_level": 10, "default_queue_policy": _LEVELS}
}
_MANY_SLOTS = _sequences(oldest={"max_candidate_sequences": 1250})

CASES = (
    Case("default", {}, frames=1, size=4),
    Case("dynamic, 1 instance", _DYNAMIC, instances=1, frames=1),
    Case("dynamic", _DYNAMIC),
    Case("dynamic, preferred sizes, delay", _DELAYED),
    Case("dynamic, 10 priorities, timeouts", _PRIORITIES, priorities=10, timeout_us=1 << 39),
    Case("dynamic, one at a time", _DYNAMIC, frames=1, size=1),
    Case("dynamic, 10 000 instances, one at a time", _DYNAMIC, instances=10_000, frames=1, size=1),
    Case("dynamic, events", _DYNAMIC, lane=1),
    Case("dynamic, events, one at a time", _DYNAMIC, frames=1, size=1, lane=1),
    Case("dynamic, offline jobs", _DYNAMIC, lane=2),
    Case("direct, 128 sequences", _sequences(direct={}), live=128),
    Case("direct, 5 000 sequences, 160 instances", _sequences(direct={}), instances=160, frames=160, live=5000),
    Case("direct, the same, one at a time", _sequences(direct={}), instances=160, frames=1, size=1, live=5000),
    Case("oldest, 128 sequences", _sequences(oldest={"max_candidate_sequences": 32}), live=128),
    Case("oldest, 5 000 sequences", _MANY_SLOTS, live=5000),
    Case("oldest, 5 000 sequences, one at a time", _MANY_SLOTS, frames=1, size=1, live=5000),
)


def decisions(case: Case) -> tuple[float, float]:
    """(requests a second, requests a batch) of the core: what ran before ends, more comes in, batches are sent."""
    model = ModelScheduler("model")
    model.configure(1, ModelConfig.model_validate({"name": "model", "max_batch_size": MAX_BATCH_SIZE, **case.config}))
    for worker in range(-(-case.instances // 8)):
        model.set_instances(f"worker-{worker}", {1: min(8, case.instances - 8 * worker)})
    keys, times, frame = count(1), count(1), NO_FRAME
    running: list[int] = []
    batches_sent = answered = 0

    def enqueue(now_us: int, size: int, flags: int = 0) -> None:
        rows = [
            part(
                key,
                key % case.priorities + 1 if case.priorities else 0,
                case.timeout_us,
                key % case.live + 1 if case.live else 0,
                flags,
                case.lane,
            )
            if case.live or case.priorities or case.lane
            else part(key)
            for key in islice(keys, size)
        ]
        if model.enqueue(requests_of("gateway", rows, now_us, frame)):
            raise RuntimeError(f"{case.name}: a request was refused")

    def cycle(size: int = case.size, frames: int = case.frames, flags: int = 0) -> None:
        nonlocal batches_sent, answered
        now_us = next(times)
        for batch_id in running:
            answered += len(model.complete(now_us, BatchEnded(batch_id, 300))[0])
        for _ in range(frames):
            enqueue(now_us, size, flags)
        batches, _ = model.dispatch(now_us)
        batches_sent += len(batches)
        running[:] = [batch.id for batch in batches]

    if case.live:
        cycle(size=case.live, frames=1, flags=SEQUENCE_START)
        while len(model):
            cycle(frames=0)
    batches_sent = answered = 0
    calls = max(1, 500 // (case.size * case.frames))
    per_call_s = best_s(cycle, calls, at_most_s=2.0)
    while len(model):
        cycle(frames=0)
    return case.size * case.frames / per_call_s, answered / batches_sent


class _ForgettingBus(CollectingBus):
    """The service's bus, without a broker: what is published is forgotten."""

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        pass

    def deliver_message(self, message: Message) -> None:
        """One turn of the event loop with one message."""
        self._callbacks[message.subject](message)
        self.turn()


async def service_us_per_request(batch_size: int) -> float:
    """The service with frames of `batch_size` requests, each of which is a batch that ends before the next comes."""
    bus = _ForgettingBus()
    service = SchedulerService(bus, "scheduler-0", None)  # type: ignore[arg-type]
    await service.listen()
    owned = await service.serve(LiveQueue("model"), "live-model")
    owned.scheduler.configure(1, CONFIG)
    owned.scheduler.set_instances("worker-0", {1: 1})
    calls = 2000 // batch_size // 10
    messages: list[tuple[Message, Message]] = []
    for number in range(ROUNDS * calls):
        frame = Frame("gateway-0", [part(number * batch_size + i) for i in range(batch_size)]).pack()
        done = Completions("worker-0", [BatchEnded(number + 1, 300)]).pack()
        ack = f"$JS.ACK.LIVE.live-model.1.{number}.{number}.1700000000000000000.0"
        messages.append((Message("inbox.scheduler-0.model", ack, frame, ""), Message("done.scheduler-0", "", done, "")))
    coming = iter(messages)

    def cycle() -> None:
        frame, done = next(coming)
        bus.deliver_message(frame)
        bus.deliver_message(done)

    best = best_s(cycle, calls)
    if len(owned.scheduler):
        raise RuntimeError(f"{len(owned.scheduler)} requests have no answer: the figures would mean nothing")
    return best / batch_size * 1e6


def main() -> None:
    """Print the figures."""
    print(f"{'policy':42}{'decisions/s':>12}{'us each':>9}{'a batch':>9}")
    for case in CASES:
        rate, batch = decisions(case)
        print(f"{case.name:42}{rate:12,.0f}{1e6 / rate:9.2f}{batch:9.1f}")
    for batch_size in (1, 8, 32):
        print(
            f"service, batches of {batch_size:2}: {asyncio.run(service_us_per_request(batch_size)):6.2f} us a request"
        )


if __name__ == "__main__":
    main()

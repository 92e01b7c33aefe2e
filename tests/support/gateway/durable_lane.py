"""One durable lane of one model with its whole pipeline, and a broker and a model that tests control."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import orjson

from tests.support.waiting import eventually
from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import Message
from weir.bus.nats.headers import pack_headers, parse_headers
from weir.bus.nats.jetstream import WRONG_LAST_SEQUENCE, StoredMessage
from weir.bus.streams.acked_publisher import StoreAck
from weir.calls.catalog import ServedModel
from weir.calls.inference.documents import digest_of
from weir.calls.tracing import Tracing
from weir.durable.api.metrics import DurableCounters
from weir.durable.consumer.context import ConsumerContext
from weir.durable.consumer.lane_consumer import LaneConsumer
from weir.durable.records.object_bodies import FetchedBody, ObjectBodies
from weir.durable.records.recorder import Recorder
from weir.durable.records.reply_outbox import ReplyOutbox
from weir.durable.requests.retry_policy import DurableRetryPolicy
from weir.runtime.memory_ledger import MemoryLedger
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import QueueBounds
from weir.schemas.core.errors import WeirError, not_found
from weir.schemas.core.request_limits import DEFAULT_LIMITS
from weir.schemas.core.requests import InferRequest, InferResponse, Lane
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.regions import no_regions

CONFIG = ModelConfig.model_validate(
    {
        "name": "m",
        "backend": "python",
        "input": [{"name": "IN", "data_type": "TYPE_INT64", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT64", "dims": [-1]}],
    }
)
SERVED = ServedModel("m", CONFIG, [1], {})

OnAnswer = Callable[[InferResponse | WeirError | None, bool], None]


class Broker:
    """The gateway's bus, its publisher and JetStream's API in one. Streams are dictionaries by subject."""

    max_payload_bytes = 1 << 20
    is_connected = True
    is_clustered = False

    def __init__(self) -> None:
        self.losses = 0
        self.results: dict[str, StoredMessage] = {}
        self.dead: list[tuple[str, bytes]] = []
        self.answers: list[tuple[str, dict[str, str], bytes]] = []
        self.acked: set[int] = set()
        self.pulls = 0
        self.held_objects = 0
        self.objects: dict[str, bytes | WeirError] = {}
        self.callbacks: dict[str, Callable[[Message], None]] = {}
        self.loss_listeners: list[Callable[[], None]] = []
        self.reconnect_listeners: list[Callable[[], Awaitable[None]]] = []
        self.held_acks: list[Callable[[], None]] | None = None
        """Where it is a list, acknowledgements of what is stored wait in it."""

    # Bus

    async def subscribe(self, subject: str, callback: Callable[[Message], None]) -> Callable[[], None]:
        self.callbacks[subject] = callback
        return lambda: None

    async def flush(self) -> None:
        if not self.is_connected:
            raise ConnectionError

    def on_loss(self, listener: Callable[[], None]) -> None:
        self.loss_listeners.append(listener)

    def on_reconnect(self, listener: Callable[[], Awaitable[None]]) -> None:
        self.reconnect_listeners.append(listener)

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        if data == b"+ACK":
            self.acked.add(int(subject.split(".")[5]))
        elif subject.startswith("result."):  # one of a batch, but for the last
            self._store(subject, data, header_block)
        elif ".MSG.NEXT." in subject:
            self.pulls += 1
        elif not subject.startswith("$JS."):
            self.answers.append((subject, parse_headers(header_block), data))

    def defer(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    # AckedPublisher

    def __len__(self) -> int:
        return 0

    def store_later(self, subject: str, data: bytes, block: bytes, on_stored: Callable[[StoreAck], None]) -> None:
        ack = self._store(subject, data, block)
        if self.held_acks is None:
            asyncio.get_running_loop().call_soon(on_stored, ack)
        else:
            self.held_acks.append(lambda: on_stored(ack))

    def _store(self, subject: str, data: bytes, block: bytes) -> StoreAck:
        headers = parse_headers(block)
        if subject.startswith("dead."):
            self.dead.append((headers.get("weir-dead-id", ""), data))
        elif subject in self.results:
            return StoreAck(error_code=WRONG_LAST_SEQUENCE[0])
        else:
            self.results[subject] = StoredMessage(subject, len(self.results) + 1, 0, headers, block, data)
        return StoreAck(len(self.results) + 1)

    # JetStream

    async def ask(self, _subject: str, _question: dict[str, str]) -> dict[str, Any]:
        return {"streams": None}

    async def last(self, _stream: str, subject: str) -> StoredMessage | None:
        return self.results.get(subject)

    async def purge(self, _stream: str, _filter: str, below: int) -> None:
        self.acked.update(range(below))

    # ObjectBodies

    def fetch(self, name: str, on_body: Callable[[FetchedBody | WeirError], None]) -> None:
        found = self.objects.get(name, not_found(name))
        if isinstance(found, bytes):
            self.held_objects += 1
            found = FetchedBody(found, digest_of(found))
        asyncio.get_running_loop().call_soon(on_body, found)

    def release(self, _body: bytes) -> None:
        self.held_objects -= 1

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)


class Model:
    """Stands for `weir.calls.dispatch.RequestDispatcher`: answers each request with its input, or with what `answer`
    returns."""

    def __init__(self) -> None:
        self.tracing = Tracing()
        self.answer: Callable[[InferRequest], InferResponse | WeirError | None] = answer_with_input
        self.open: dict[int, OnAnswer] = {}
        self.is_holding = False
        """Whether it gives no answers for now."""
        self._keys = 0

    def caches(self, _served: ServedModel) -> bool:
        return False

    def submit(
        self,
        request: InferRequest,
        on_response: OnAnswer,
        traffic_key: str = "",
        served: ServedModel | None = None,
    ) -> Any:
        SERVED.normalizer.normalize(request)
        self._keys += 1
        key = self._keys
        self.open[key] = on_response
        if not self.is_holding:
            asyncio.get_running_loop().call_soon(lambda: self.end(key, self.answer(request)))
        return SimpleNamespace(key=key)

    def submit_packed(
        self,
        _served: ServedModel,
        shared: InferRequest,
        _body: bytes,
        on_response: OnAnswer,
        _deadline_ms: int,
        traffic_key: str = "",
    ) -> Any:
        return self.submit(shared, on_response)

    def end(self, key: int, outcome: InferResponse | WeirError | None) -> None:
        on_response = self.open.pop(key, None)
        if on_response is not None:
            on_response(outcome, True)

    def cancel(self, pending: Any) -> None:
        self.open.pop(pending.key, None)


def answer_with_input(request: InferRequest) -> InferResponse:
    """What the model answers unless a test says otherwise."""
    tensor = request.inputs[0]
    return InferResponse("m", "1", request.id, [Tensor("OUT", tensor.datatype, tensor.shape, tensor.data)])


def body_of(value: int, size: int = 1) -> bytes:
    """A request's body of `size` values."""
    tensor = {"name": "IN", "datatype": "INT64", "shape": [size], "data": [value] * size}
    return orjson.dumps({"inputs": [tensor]})


class OneLane:
    """One durable lane with its pipeline. Messages are numbered from 1 in order of arrival."""

    def __init__(self, background: asyncio.TaskGroup) -> None:
        self.broker, self.model = Broker(), Model()
        self.ledger = MemoryLedger(64 << 20)
        broker: Any = self.broker
        publisher: Any = SimpleNamespace(publish=self.broker.store_later)
        counters = DurableCounters()
        objects = cast(ObjectBodies, broker)
        self.outbox = ReplyOutbox(broker, broker, "answered")
        recorder = Recorder(broker, publisher, broker, objects, counters, self.outbox)
        recorder.start(background)
        self.context = ConsumerContext(
            bus=broker,
            api=broker,
            consumer_id="g",
            catalog=cast(Any, SimpleNamespace(
                resolve=lambda name, version: SERVED, knows=lambda name: True,
                served_model=lambda name: SERVED, ready_replicas=lambda name, version: [],
            )),
            inference=cast(Any, self.model),
            limits=DEFAULT_LIMITS,
            find_region=no_regions,
            recorder=recorder,
            objects=objects,
            counters=counters,
            account=self.ledger.account("durable"),
            policy=DurableRetryPolicy(3),
            bounds=QueueBounds(10_000, 1 << 30, 86_400),
            weights={},
            tenant_limits={},
        )  # fmt: skip
        self.intake = LaneConsumer(self.context, "m", Lane.EVENT, background)
        self.recorder = recorder
        self._sequence = 0
        self.begin()

    def begin(self, started_sequence: int = 0, is_continued: bool = False) -> None:
        """The lane's owner is this gateway, from now on or again."""
        self._deliveries = 0
        self.intake.acquire(started_sequence, is_continued, "inbox", "group")

    def deliver(self, body: bytes, subject: str = "event.m", sequence: int = 0, **headers: str) -> int:
        """A message is delivered; returns its sequence. `headers` have `_` for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.deliver_raw(body, subject, pack_headers(named) if named else b"", sequence)

    def deliver_raw(self, body: bytes, subject: str, header_block: bytes, sequence: int = 0) -> int:
        """The same with headers as they lie in the message."""
        if not sequence:
            self._sequence += 1
            sequence = self._sequence
        self._deliveries += 1
        reply = f"$JS.ACK.QUEUE.c.1.{sequence}.{self._deliveries}.{time.time_ns()}.0"
        self.intake.receive(Message(subject, reply, body, "", header_block))
        return sequence

    def redeliver(self) -> None:
        """The consumer is about to deliver everything unacknowledged again."""
        self._deliveries = 0
        self.intake.expect_redelivery()

    def lose_delivery(self) -> None:
        """The next message is delivered and does not arrive."""
        self._deliveries += 1

    def outcome(self, id: str) -> str:
        """What is recorded of a request, "" for nothing."""
        found = self.broker.results.get(subjects.result("m", id))
        return "" if found is None else found.headers.get("weir-outcome", "")

    async def settled(self, *ids: str) -> dict[str, str]:
        """The outcomes of these requests, once all have one and nothing is held or unacknowledged any more."""
        await eventually(lambda: all(map(self.outcome, ids)) and not len(self.intake))
        self.intake.acks.flush()
        await eventually(lambda: self.broker.acked >= set(range(1, self._sequence + 1)))
        return {id: self.outcome(id) for id in ids}


@asynccontextmanager
async def one_lane() -> AsyncIterator[OneLane]:
    """A lane, for as long as the context lasts."""
    async with asyncio.TaskGroup() as background:
        lane = OneLane(background)
        await lane.outbox.start(background)
        yield lane
        lane.outbox.stop()
        lane.intake.drop()
        lane.intake.acks.stop()
        lane.recorder.stop()

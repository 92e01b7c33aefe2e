"""`DurableConsumer`: consumes the durable requests of the models whose leases this process holds.

Producers publish to any model at any time. Each process that consumes looks up which queues have messages, and requests
the lease of each model that has some or had some before; the holder of the lease runs the requests (`LeasedModel`).

`MisaddressedMessages`: durable requests on subjects that spell a model's name otherwise than
`weir.bus.naming.subjects.token`.

`event.my=2emodel` and `event.größe` are subjects that stream QUEUE stores, but no model's. Their messages are moved to
the model's own subject. If the process dies in between, a request is there twice; its id shows that, and it has one
record.

A subject whose bytes are not UTF-8 is reported with U+FFFD in their place, and can't be requested. Its message is
searched among those on similar subjects, and moved as if the model's name contained U+FFFD: no model has such a name,
so the request ends as a dead letter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

import orjson
from nats.js.errors import NotFoundError

from weir.bus.naming import durable_subjects as subjects
from weir.bus.naming.subjects import token
from weir.bus.nats.connection import BROKER_ERRORS, Message
from weir.bus.nats.headers import pack_headers
from weir.bus.nats.jetstream import JetStream, StoredMessage, StreamState
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.bus.streams.consumers import ConsumerRecord, QueueConsumers
from weir.durable.api.store import DurableStore
from weir.durable.consumer.context import ConsumerContext, ConsumerServices
from weir.durable.consumer.lane_consumer import PRINCIPAL
from weir.durable.consumer.leased_model import LANES, LeasedModel
from weir.durable.records.object_bodies import ObjectBodies
from weir.durable.records.recorder import Recorder, original_lines
from weir.durable.records.reply_outbox import ReplyOutbox
from weir.durable.requests.fair_queue import tenant_limits, tenant_weights
from weir.durable.requests.headers import ID, REPLAYED_ID
from weir.durable.requests.retry_policy import UNKNOWN_MODEL_TIMEOUT_MS, DurableRetryPolicy
from weir.durable.settings import QueueSettings
from weir.runtime.containment import contained
from weir.runtime.ticks import next_tick

logger = logging.getLogger("weir.gateway")


SWEEP_INTERVAL_S = 0.5
"""How often stream QUEUE is asked whether it has changed."""

LIST_INTERVAL_S = 2.0
"""How often the stream's consumers are listed while their number stays the same: one may have replaced another."""

_TICK_S = 0.1
_STOP_POLL_S = 0.02
_UNKNOWN_IDLE_S = 2.0
_SUBJECTS = ("event.*", "event.*.*", "batch.*", "batch.*.*")

Queue = tuple[str, str]
"""A lane's name and a model."""


class DurableConsumer:
    """Finds queues, leases their models, and runs their requests. Everything runs in one event loop."""

    def __init__(
        self,
        store: DurableStore,
        services: ConsumerServices,
        consumer_id: str,
        settings: QueueSettings,
    ) -> None:
        self._store = store
        self._has_workers = services.has_workers
        self._catalog = services.catalog
        self._api = store.bus.jetstream
        self._consumers = QueueConsumers(store.bus)
        self._objects = ObjectBodies(store.bus, store.messages, services.limits.input_size, services.ledger)
        self._outbox = ReplyOutbox(store.bus, self._api, f"{subjects.durable_inbox(consumer_id)}.answered")
        durability = store.durability
        self._recorder = Recorder(
            store.bus,
            store.publisher,
            self._api,
            self._objects,
            store.counters,
            self._outbox,
            lambda: durability.result.ack_is_fsync is not False,
        )
        self._context = ConsumerContext(
            bus=store.bus,
            api=self._api,
            consumer_id=consumer_id,
            catalog=services.catalog,
            inference=services.inference,
            limits=services.limits,
            find_region=services.find_region,
            recorder=self._recorder,
            objects=self._objects,
            counters=store.counters,
            account=services.ledger.account(PRINCIPAL),
            policy=DurableRetryPolicy(settings.durable_attempts),
            bounds=settings.queue_bounds,
            weights=tenant_weights(settings.tenant_weight),
            tenant_limits=tenant_limits(settings.tenant_limit),
            offload=services.offload,
            gate=services.gate,
        )
        self._models: dict[str, LeasedModel] = {}
        self._known: dict[str, ConsumerRecord] = {}
        self._unknown_since_s: dict[Queue, float] = {}
        self._last_state: StreamState | None = None
        self._listed_consumers = -1  # how many were listed last and are tracked, -1 if they have to be listed again
        self._listed_s = 0.0
        self._found: dict[Queue, int] = {}
        self._misaddressed: set[str] = set()
        self._misaddressed_messages = MisaddressedMessages(self._api, store.publisher)
        self._background: asyncio.TaskGroup | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_stopping = False

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Consumes from now on. The streams must exist."""
        self._background = background
        self._store.streams.on_gone(self._on_stream_lost)
        self._store.streams.on_recreated(self._on_recreated)
        self._objects.start(background)
        self._recorder.start(background)
        await self._outbox.start(background)
        await self._store.bus.subscribe(subjects.CANCEL_DURABLE, self._on_cancelled)
        self._store.bus.on_reconnect(self._on_reconnect)
        self._task = background.create_task(self._run())

    async def stop(self, timeout_s: float) -> None:
        """Starts nothing more; returns when all running requests are recorded, or after `timeout_s`."""
        self.is_stopping = True
        self._outbox.stop_waiting()
        for leased in self._models.values():
            leased.stop()
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and self._store.bus.is_connected and self._is_busy():
            await asyncio.sleep(_STOP_POLL_S)
        if self._task is not None:
            self._task.cancel()
        for lane in [lane for leased in self._models.values() for lane in leased.lanes.values()]:
            lane.acks.stop()
        self._recorder.stop()
        self._objects.stop()
        self._outbox.stop()

    async def ensure(self, model: str, lane: str = "event") -> None:
        """Makes sure that a lane ("event" or "batch") of a model has a consumer, so that its messages are found.

        Raises NatsError, OSError or TimeoutError while the broker is unavailable.
        """
        leased = self._models.get(model)
        if leased is None or lane not in leased.lanes or leased.is_unknown:
            await self._consumers.ensure(lane, model)
            await self._track(lane, model)

    def lost(self, keys: list[int], reason: str) -> None:
        """Notes that a worker or process died with the requests that have these keys; the scheduler runs them again."""
        now_ms = time.time_ns() // 1_000_000
        lanes = [lane for leased in self._models.values() for lane in leased.lanes.values()]
        for key in keys:
            for lane in lanes:
                request = lane.runner.find(key)
                if request is not None:
                    request.lost(now_ms, reason)

    def _is_busy(self) -> bool:
        if len(self._recorder) or any(leased.running for leased in self._models.values()):
            return True
        lanes = [lane for leased in self._models.values() for lane in leased.lanes.values()]
        for lane in lanes:
            lane.acks.flush()
        return any(len(lane.acks) for lane in lanes)

    async def _run(self) -> None:
        swept_s = 0.0
        while True:
            now_s = time.monotonic()
            for leased in list(self._models.values()):
                leased.tick(now_s)
            # Ticks keep their interval on average only.
            if (
                now_s - swept_s >= SWEEP_INTERVAL_S - _TICK_S / 2
                and self._store.bus.is_connected
                and not self.is_stopping
            ):
                swept_s = now_s
                await self._sweep_once(now_s)
            await next_tick(_TICK_S if self._models else SWEEP_INTERVAL_S)

    @contained()
    async def _sweep_once(self, now_s: float) -> None:
        try:
            await self._sweep(now_s)
        except NotFoundError:
            self._store.streams.recreate(subjects.QUEUE_STREAM)
        except BROKER_ERRORS as error:
            logger.debug("the durable queues can't be listed: %s: %s", type(error).__name__, error)

    async def _sweep(self, now_s: float) -> None:
        state = await self._api.stream_state(subjects.QUEUE_STREAM)
        if state.consumers != self._listed_consumers or now_s - self._listed_s >= LIST_INTERVAL_S:
            await self._find_consumers()
            self._listed_s = now_s
        if state != self._last_state:
            self._found = await self._find_messages() if state.messages else {}
            self._last_state = state
        for subject in sorted(self._misaddressed):
            await self._for_queue(self._move, subject)
        for queue in self._found:
            await self._for_queue(self._check_queue, queue, now_s)
        for key in self._unknown_since_s.keys() - self._found.keys():
            del self._unknown_since_s[key]
        for leased in [leased for leased in self._models.values() if leased.is_unknown]:
            await self._for_queue(self._check_unknown, leased, now_s)

    @contained(passes=BROKER_ERRORS)
    async def _for_queue(self, step: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Calls a step of a sweep for one queue: an unexpected exception affects none of the others."""
        await step(*arguments)

    async def _check_queue(self, queue: Queue, now_s: float) -> None:
        """Handles a queue in which messages were found."""
        lane, model = queue
        leased = self._models.get(model)
        if leased is not None and lane in leased.lanes:
            return
        if leased is not None or self._catalog.knows(model):
            await self._track(lane, model)
        elif self._is_unknown(queue, now_s):
            await self._track(lane, model, is_unknown=True)

    async def _find_consumers(self) -> None:
        names = await self._api.list_all(f"CONSUMER.NAMES.{subjects.QUEUE_STREAM}", "consumers")
        for gone in self._known.keys() - set(names):
            del self._known[gone]
        for name in names:
            if name not in self._known:
                await self._for_queue(self._look_up, name)
        # Those that could not be tracked yet are looked up again by the next sweep.
        self._listed_consumers = len(names) if self._known.keys() >= set(names) else -1

    async def _look_up(self, name: str) -> None:
        found = await self._consumers.look_up(name)
        if found is not None and not found.is_unknown:
            self._known[name] = found
            await self._track(found.lane, found.model)

    async def _find_messages(self) -> dict[Queue, int]:
        found: dict[Queue, int] = {}
        for filter in _SUBJECTS:
            for subject, messages in (await self._api.subject_counts(subjects.QUEUE_STREAM, filter)).items():
                if subjects.canonical(subject) != subject:
                    self._misaddressed.add(subject)
                    continue
                lane, model, _ = subjects.durable_target(subject)
                found[lane, model] = found.get((lane, model), 0) + messages
        # Each asynchronous request has a subject of its own, so they are not all listed. Those of a model without a
        # consumer, left by a process that died while it acquired the lane, become the oldest ones in time.
        oldest = await self._api.next(subjects.QUEUE_STREAM, subjects.ANY_JOB)
        job = "" if oldest is None else oldest.subject
        if job and subjects.canonical(job) != job:
            self._misaddressed.add(job)
        elif job:
            lane, model, _ = subjects.durable_target(job)
            found.setdefault((lane, model), 1)
        return found

    async def _move(self, subject: str) -> None:
        if await self._misaddressed_messages.move(subject):
            self._misaddressed.discard(subject)

    def _is_unknown(self, queue: Queue, now_s: float) -> bool:
        """Whether the model has had no worker for longer than a worker takes to load it."""
        if not self._has_workers():
            self._unknown_since_s.pop(queue, None)
            return False
        since_s = self._unknown_since_s.setdefault(queue, now_s)
        return now_s - since_s >= UNKNOWN_MODEL_TIMEOUT_MS / 1000

    async def _check_unknown(self, leased: LeasedModel, now_s: float) -> None:
        """Releases an unknown model once its queues are empty; keeps it if a worker has it now."""
        if self._catalog.knows(leased.model):
            leased.is_unknown = False
            leased.reacquire()
            return
        is_idle = not any(map(len, leased.lanes.values())) and not any(
            (lane, leased.model) in self._found for lane in leased.lanes
        )
        if not is_idle:
            leased.idle_since_s = now_s
        elif now_s - leased.idle_since_s > _UNKNOWN_IDLE_S:
            if leased.has_lease:
                for lane in leased.lanes:
                    await self._consumers.drop(lane, leased.model)
            self._store.leases.release(_lease(leased.model))
            leased.close()
            del self._models[leased.model]

    async def _track(self, lane: str, model: str, is_unknown: bool = False) -> None:
        if self.is_stopping or lane not in LANES:
            return
        leased = self._models.get(model)
        if leased is None:
            assert self._background is not None  # noqa: S101 - it was started
            leased = LeasedModel(self._context, self._consumers, model, self._background)
            leased.is_unknown = is_unknown
            leased.idle_since_s = time.monotonic()
            self._models[model] = leased
            leased.add_lane(lane)
            self._store.leases.acquire(_lease(model), leased.on_acquired, leased.on_lost)
            return
        if leased.is_unknown and not is_unknown:
            leased.is_unknown = False
            leased.reacquire()
        leased.add_lane(lane)

    async def _on_reconnect(self) -> None:
        self._reacquire_all()

    def _on_stream_lost(self, stream: str) -> None:
        if stream == subjects.QUEUE_STREAM:
            for leased in self._models.values():
                leased.on_stream_lost()

    def _on_recreated(self, stream: str) -> None:
        if stream == subjects.QUEUE_STREAM:
            self._reacquire_all()

    def _reacquire_all(self) -> None:
        self._last_state = None
        self._listed_consumers = -1
        for leased in self._models.values():
            leased.reacquire()

    def _on_cancelled(self, message: Message) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            cancelled = orjson.loads(message.data)
            id, model = cancelled["id"], cancelled["model"]
            if isinstance(id, str) and isinstance(model, str) and (leased := self._models.get(model)) is not None:
                for lane in leased.lanes.values():
                    lane.cancel(id)


def _lease(model: str) -> str:
    return f"intake.{token(model)}"


NOT_UTF8 = "\ufffd"

_MAX_LOOKS = 1000
"""Messages that one call of `move` examines for a subject that is not UTF-8; the next call continues there."""


class MisaddressedMessages:
    """Moves messages on misspelled subjects to the subjects of their models."""

    def __init__(self, api: JetStream, publisher: AckedPublisher) -> None:
        self._api = api
        self._publisher = publisher
        self._searched: dict[str, int] = {}  # by subject: the sequence at which the search goes on

    async def move(self, subject: str) -> bool:
        """Moves the messages on a subject; False if some are left, for want of room or because the search goes on.

        Raises NatsError, OSError or TimeoutError while the broker is unavailable.
        """
        while (found := await self._find(subject)) is not None:
            ack = await self._publisher.store(subjects.canonical(subject), found.data, _moved_headers(found))
            if not ack.is_stored and not ack.is_duplicate:
                return False
            await self._api.delete(subjects.QUEUE_STREAM, found.sequence)
        return subject not in self._searched

    async def _find(self, subject: str) -> StoredMessage | None:
        """The oldest message on `subject`, or on a subject that is not UTF-8 and is reported as `subject`."""
        found = await self._api.next(subjects.QUEUE_STREAM, subject)
        if found is not None or NOT_UTF8 not in subject:
            return found
        similar = ".".join("*" if NOT_UTF8 in token else token for token in subject.split("."))
        sequence = self._searched.get(subject, 1)
        for _ in range(_MAX_LOOKS):
            found = await self._api.next(subjects.QUEUE_STREAM, similar, sequence)
            if found is None:
                self._searched.pop(subject, None)
                return None
            self._searched[subject] = sequence = found.sequence
            if found.subject == subject:
                return found
            sequence += 1
        self._searched[subject] = sequence
        return None


def _moved_headers(found: StoredMessage) -> bytes:
    headers = [("Nats-Msg-Id", f"stray-{found.sequence}")]
    id = found.headers.get(ID, "")
    if id and REPLAYED_ID not in found.headers:
        headers.append(("Weir-Id", id))
    return pack_headers(headers)[:-2] + original_lines(found.header_block)

"""`DurableIntake`: a gateway's share of the durable requests: which models have some, and which of those it owns.

Producers publish to any model at any time. Every gateway looks what lies in stream QUEUE, and wants the lease of each model
that has something there or ever had; who has the lease takes the requests in (`gateway.durable.lane_intake`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import orjson
from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from bus import durable_subjects as subjects
from bus.connection import Message
from bus.jetstream_api import JetStreamApi, StreamState
from bus.queue_consumers import KnownConsumer, QueueConsumers
from bus.subjects import token
from gateway.doors import Doors
from gateway.durable.fair_queue import tenant_limits, tenant_weights
from gateway.durable.intake_parts import IntakeParts
from gateway.durable.lane_intake import PRINCIPAL, LaneIntake
from gateway.durable.objects import ObjectBodies
from gateway.durable.owned_model import LANES, OwnedModel
from gateway.durable.recorder import Recorder
from gateway.durable.reply_outbox import ReplyOutbox
from gateway.durable.retry_policy import UNKNOWN_PATIENCE_MS, RetryPolicy
from gateway.durable.store import DurableStore
from gateway.durable.stray_messages import StrayMessages
from gateway.settings import GatewaySettings
from runtime.containment import contained
from schemas.queue_bounds import QueueBounds

logger = logging.getLogger("weir.gateway")

SWEEP_INTERVAL_S = 0.5
_TICK_S = 0.1
_STOP_POLL_S = 0.02
_UNKNOWN_IDLE_S = 2.0
_SUBJECTS = ("event.*", "event.*.*", "batch.*", "batch.*.*")

Queue = tuple[str, str]
"""A lane's name and a model."""


class DurableIntake:
    """See the module. Everything runs in one event loop. `has_workers` tells whether any worker is registered."""

    def __init__(
        self,
        store: DurableStore,
        doors: Doors,
        gateway_id: str,
        settings: GatewaySettings,
        has_workers: Callable[[], bool],
    ) -> None:
        self._store = store
        self._has_workers = has_workers
        self._catalog = doors.catalog
        self._api = JetStreamApi(store.bus, f"{subjects.durable_inbox(gateway_id)}.api")
        self._consumers = QueueConsumers(store.bus)
        self._objects = ObjectBodies(store.bus, store.messages, doors.limits.input_size, doors.ledger)
        self._outbox = ReplyOutbox(store.bus, self._api, f"{subjects.durable_inbox(gateway_id)}.answered")
        self._recorder = Recorder(store.bus, store.publisher, self._api, self._objects, store.counters, self._outbox)
        self._parts = IntakeParts(
            bus=store.bus,
            api=self._api,
            gateway_id=gateway_id,
            catalog=doors.catalog,
            inference=doors.inference,
            limits=doors.limits,
            find_region=doors.regions.find,
            recorder=self._recorder,
            objects=self._objects,
            counters=store.counters,
            account=doors.ledger.account(PRINCIPAL),
            policy=RetryPolicy(settings.durable_attempts),
            bounds=QueueBounds(settings.queue_max_messages, settings.queue_max_bytes, settings.queue_max_age_secs),
            weights=tenant_weights(settings.tenant_weight),
            tenant_limits=tenant_limits(settings.tenant_limit),
            offload=doors.offload,
        )
        self._models: dict[str, OwnedModel] = {}
        self._known: dict[str, KnownConsumer] = {}
        self._unknown_since_s: dict[Queue, float] = {}
        self._last_state: StreamState | None = None
        self._found: dict[Queue, int] = {}
        self._strays: set[str] = set()
        self._stray_messages = StrayMessages(self._api, store.publisher)
        self._background: asyncio.TaskGroup | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_stopping = False

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Takes requests in from now on. The streams must be there."""
        self._background = background
        self._store.streams.on_gone(self._on_gone)
        self._store.streams.on_made_anew(self._on_made_anew)
        self._objects.start(background)
        self._recorder.start(background)
        await self._api.start()
        await self._outbox.start(background)
        await self._store.bus.subscribe(subjects.CANCEL_DURABLE, self._on_cancelled)
        self._store.bus.on_reconnect(self._on_reconnect)
        self._task = background.create_task(self._run())

    async def stop(self, timeout_s: float) -> None:
        """Begins nothing more; returns when what is under way has its record, or after `timeout_s`."""
        self.is_stopping = True
        self._outbox.hurry()
        for owned in self._models.values():
            owned.stop()
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and self._store.bus.is_connected and self._is_busy():
            await asyncio.sleep(_STOP_POLL_S)
        if self._task is not None:
            self._task.cancel()
        for lane in [lane for owned in self._models.values() for lane in owned.lanes.values()]:
            lane.acks.stop()
        self._recorder.stop()
        self._objects.stop()
        self._outbox.stop()

    async def ensure(self, model: str, lane: str = "event") -> None:
        """Has a consumer for a lane ("event" or "batch") of a model, so that what is published there is found.

        Raises NatsError, OSError or TimeoutError while the broker is away.
        """
        owned = self._models.get(model)
        if owned is None or lane not in owned.lanes or owned.is_unknown:
            await self._consumers.ensure(lane, model)
            await self._track(lane, model)

    def lost(self, keys: list[int], reason: str) -> None:
        """The requests that were submitted under these keys were lost with a worker or a process, and are done again."""
        now_ms = time.time_ns() // 1_000_000
        lanes = [lane for owned in self._models.values() for lane in owned.lanes.values()]
        for key in keys:
            for lane in lanes:
                self._note_loss(lane, key, now_ms, reason)

    @contained()
    def _note_loss(self, lane: LaneIntake, key: int, now_ms: int, reason: str) -> None:
        request = lane.runner.find(key)
        if request is not None:
            request.lost(now_ms, reason)

    def _is_busy(self) -> bool:
        if len(self._recorder) or any(owned.running for owned in self._models.values()):
            return True
        lanes = [lane for owned in self._models.values() for lane in owned.lanes.values()]
        for lane in lanes:
            lane.acks.flush()
        return any(len(lane.acks) for lane in lanes)

    async def _run(self) -> None:
        swept_s = 0.0
        while True:
            now_s = time.monotonic()
            for owned in list(self._models.values()):
                owned.tick(now_s)
            if now_s - swept_s >= SWEEP_INTERVAL_S and self._store.bus.is_connected and not self.is_stopping:
                swept_s = now_s
                await self._look_around(now_s)
            await asyncio.sleep(_TICK_S)

    async def _look_around(self, now_s: float) -> None:
        try:
            await self._sweep(now_s)
        except NotFoundError:
            self._store.streams.gone(subjects.QUEUE_STREAM)
        except (NatsError, OSError, TimeoutError) as error:
            logger.debug("the durable queues are not seen: %s: %s", type(error).__name__, error)

    @contained(passes=(NatsError, OSError, TimeoutError))
    async def _sweep(self, now_s: float) -> None:
        await self._find_consumers()
        state = await self._api.stream_state(subjects.QUEUE_STREAM)
        if state != self._last_state:
            self._found = await self._find_messages() if state.messages else {}
            self._last_state = state
        if self._strays and await self._stray_messages.move(sorted(self._strays)):
            self._strays.clear()
        for lane, model in self._found:
            await self._look_at((lane, model), now_s)
        for key in self._unknown_since_s.keys() - self._found.keys():
            del self._unknown_since_s[key]
        for owned in [owned for owned in self._models.values() if owned.is_unknown]:
            await self._mind_unknown(owned, now_s)

    @contained(passes=(NatsError, OSError, TimeoutError))
    async def _look_at(self, queue: Queue, now_s: float) -> None:
        """Takes care of a queue in which messages were found."""
        lane, model = queue
        owned = self._models.get(model)
        if owned is not None and lane in owned.lanes:
            return
        if owned is not None or self._catalog.knows(model):
            await self._track(lane, model)
        elif self._is_unknown(queue, now_s):
            await self._track(lane, model, is_unknown=True)

    async def _find_consumers(self) -> None:
        names = await self._api.consumer_names(subjects.QUEUE_STREAM)
        for gone in self._known.keys() - set(names):
            del self._known[gone]
        for name in names:
            if name not in self._known:
                await self._look_up(name)

    @contained(passes=(NatsError, OSError, TimeoutError))
    async def _look_up(self, name: str) -> None:
        found = await self._consumers.look_up(name)
        if found is not None and not found.is_unknown:
            self._known[name] = found
            await self._track(found.lane, found.model)

    async def _find_messages(self) -> dict[Queue, int]:
        found: dict[Queue, int] = {}
        for filter in _SUBJECTS:
            for subject, messages in (await self._api.subjects(subjects.QUEUE_STREAM, filter)).items():
                self._count_messages(found, subject, messages)
        # Each job has a subject of its own, so they are not all listed. Those of a model without a consumer, which only a
        # gateway that died while it took it may leave, come to be the oldest in time.
        job = await self._api.first_subject(subjects.QUEUE_STREAM, subjects.ANY_JOB)
        if job and subjects.canonical(job) != job:
            self._strays.add(job)
        elif job:
            lane, model, _ = subjects.durable_target(job)
            found.setdefault((lane, model), 1)
        return found

    @contained()
    def _count_messages(self, found: dict[Queue, int], subject: str, messages: int) -> None:
        if subjects.canonical(subject) != subject:
            self._strays.add(subject)
            return
        lane, model, _ = subjects.durable_target(subject)
        found[lane, model] = found.get((lane, model), 0) + messages

    def _is_unknown(self, queue: Queue, now_s: float) -> bool:
        """Whether no worker has had the model for so long that it can't be one that is about to have it."""
        if not self._has_workers():
            self._unknown_since_s.pop(queue, None)
            return False
        since_s = self._unknown_since_s.setdefault(queue, now_s)
        return now_s - since_s >= UNKNOWN_PATIENCE_MS / 1000

    @contained(passes=(NatsError, OSError, TimeoutError))
    async def _mind_unknown(self, owned: OwnedModel, now_s: float) -> None:
        """Lets go of a model that there isn't, once nothing is left of it; one that there is now is one as any other."""
        if self._catalog.knows(owned.model):
            owned.is_unknown = False
            owned.take_again()
            return
        is_idle = not any(map(len, owned.lanes.values())) and not any(
            (lane, owned.model) in self._found for lane in owned.lanes
        )
        if not is_idle:
            owned.idle_since_s = now_s
        elif now_s - owned.idle_since_s > _UNKNOWN_IDLE_S:
            if owned.has_lease:
                for lane in owned.lanes:
                    await self._consumers.drop(lane, owned.model)
            self._store.leases.give_up(_lease(owned.model))
            owned.close()
            del self._models[owned.model]

    async def _track(self, lane: str, model: str, is_unknown: bool = False) -> None:
        if self.is_stopping or lane not in LANES:
            return
        owned = self._models.get(model)
        if owned is None:
            assert self._background is not None  # noqa: S101 - it was started
            owned = OwnedModel(self._parts, self._consumers, model, self._background)
            owned.is_unknown = is_unknown
            owned.idle_since_s = time.monotonic()
            self._models[model] = owned
            owned.add_lane(lane)
            self._store.leases.want(_lease(model), owned.on_taken, owned.on_lost)
            return
        if owned.is_unknown and not is_unknown:
            owned.is_unknown = False
            owned.take_again()
        owned.add_lane(lane)

    async def _on_reconnect(self) -> None:
        self._take_all_again()

    def _on_gone(self, stream: str) -> None:
        if stream == subjects.QUEUE_STREAM:
            for owned in self._models.values():
                owned.forget_stream()

    def _on_made_anew(self, stream: str) -> None:
        if stream == subjects.QUEUE_STREAM:
            self._take_all_again()

    def _take_all_again(self) -> None:
        self._last_state = None
        for owned in self._models.values():
            owned.take_again()

    @contained()
    def _on_cancelled(self, message: Message) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = orjson.loads(message.data)
            id, model = told["id"], told["model"]
            if isinstance(id, str) and isinstance(model, str) and (owned := self._models.get(model)) is not None:
                for lane in owned.lanes.values():
                    lane.cancel(id)


def _lease(model: str) -> str:
    return f"intake.{token(model)}"

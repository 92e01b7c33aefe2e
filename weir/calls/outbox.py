"""`Outbox`: what one caller publishes to schedulers and workers: frames of requests, cancellations, releases of slots.

Requests for one model that are submitted in the same turn of the event loop share a frame; a single request is
published at once. While several frames of the model are unacknowledged, later requests wait for the next
acknowledgement and then share a frame (as TCP's segments do, RFC 896).

A request for a model with several queues is assigned to one when it is published, and keeps it.

After a loss, of the broker, of its streams or of a link, pending requests are sent again.

`FrameCounters` counts the frames. `LiveStreamWatch` detects that the stream of live requests was deleted and created
again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count

from nats.errors import Error as NatsError

from weir.bus.links.link import LinkEnd
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Bus, Message
from weir.bus.streams.declarations import ensure_live_streams, ensure_streams
from weir.calls.in_flight import InFlight
from weir.calls.payload_store import FRAME_INLINE_BYTES, PayloadStore
from weir.calls.queues import BackpressureCache, Destination, PartitionedQueue, PartitionReservation, PartitionSelector
from weir.runtime.containment import contained
from weir.runtime.log_limiter import LogLimiter
from weir.runtime.ticks import next_tick
from weir.schemas.core.errors import Reason, WeirError, internal, overloaded
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START
from weir.schemas.wire.calls import MAX_REJECTED, Cancellation, RequestEnvelope, SlotRelease, pack_frame
from weir.schemas.wire.request_body import is_body_ref
from weir.telemetry.instruments import SizeHistogram
from weir.telemetry.logs import log_request, logs_requests
from weir.telemetry.tracing.trace import FRAME_SENT

logger = logging.getLogger("weir.calls")

_limited = LogLimiter(logger)

_NOT_SENT = "an unexpected error occurred while the request was sent; the server's log has the details"

MAX_FRAME_BYTES = 512 * 1024
"""Bodies of requests that share a frame; a larger body has a frame of its own."""

SMALL_BODY_BYTES = 512
"""A body up to this size travels inside its frame: a reference to a payload slot would cost more than its bytes.

So a frame ends before a small body with which its bodies would go into a payload slot.
"""

MAX_UNACKNOWLEDGED_FRAMES = 8
"""Unacknowledged frames of one model; later requests wait for an acknowledgement."""

BROKER_TIMEOUT_S = 30.0
"""How long pending requests wait for a broker that is not connected before they fail."""

_ACK_TIMEOUT_S = 2.0
_CHECK_INTERVAL_S = 1.0

SlotRow = tuple[str, int, int]
"""Segment, slot and generation of a payload slot, as in `SlotRelease`."""


class FrameCounters:
    """Sizes of frames, and how long requests are in flight.

    The time in flight is not measured for each request: the number in flight, integrated over time, is the same sum
    (Little's law). It begins when a request's frame is published and ends with its last response.
    """

    __slots__ = ("_clock_ns", "_in_flight", "_in_flight_ns", "_since_ns", "frame_bytes", "frame_requests", "last_key")

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._in_flight = 0
        self._in_flight_ns = 0
        self._since_ns = clock_ns()
        self.last_key = 0
        self.frame_bytes = SizeHistogram()
        self.frame_requests = SizeHistogram()

    def changed(self, in_flight: int) -> None:
        """Sets the number of requests in flight from now on."""
        now_ns = self._clock_ns()
        self._in_flight_ns += self._in_flight * (now_ns - self._since_ns)
        self._since_ns = now_ns
        self._in_flight = in_flight

    @property
    def in_flight_us(self) -> int:
        """The time in flight of all requests together until now."""
        return (self._in_flight_ns + self._in_flight * (self._clock_ns() - self._since_ns)) // 1000


class Outbox:
    """Publishes the requests of one caller in frames, and again after a loss.

    `on_rejected(keys, error)` is called with requests that the stream rejected (`rejected` counts them), that could not be
    sent, or that have waited too long for the broker.
    """

    def __init__(
        self,
        bus: Bus,
        caller_id: str,
        payloads: PayloadStore,
        in_flight: InFlight,
        on_rejected: Callable[[Iterable[int], WeirError], None],
    ) -> None:
        self._bus = bus
        self._id = caller_id
        self._acks = subjects.publish_ack(caller_id)
        self._payloads = payloads
        self._in_flight = in_flight
        self._on_rejected = on_rejected
        self.counters = FrameCounters()
        self.backpressure = BackpressureCache()
        self.streams = LiveStreamWatch(bus, in_flight)
        self._watch: asyncio.Task[None] | None = None
        self._disconnected_s: float | None = None
        self._layout = bus.live_layout
        self._waiting: dict[Destination, list[RequestEnvelope]] = {}
        self._unacked_frames: dict[Destination, int] = defaultdict(int)
        self._selectors: dict[str, PartitionSelector] = {}  # of models with several queues
        self._cancelled: dict[str | LiveQueue, list[int]] = {}
        self._released: dict[str, list[SlotRow]] = {}
        self._flush_is_due = False
        self.has_traced = False  # traced requests may be among those that wait
        self._losses = bus.losses  # all pending requests were sent again after the last of them
        self._frame_numbers = count(1)
        # By number: the destination, the keys and the time of each frame, in the order in which they were published.
        self._unacked: dict[int, tuple[Destination, list[int], float]] = {}
        self.rejected = 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Subscribes to acknowledgements, and watches the broker in a task of `background`."""
        await self._bus.subscribe(f"{self._acks}.*", self._on_publish_ack)
        self._bus.links.on_lost(self._on_link_lost)
        self._bus.on_reconnect(self._on_reconnected)
        self._watch = background.create_task(self._watch_broker())

    def stop(self) -> None:
        """Watches the broker no longer."""
        if self._watch is not None:
            self._watch.cancel()

    def add(self, to: Destination, envelope: RequestEnvelope) -> None:
        """Publishes a request with others of this turn of the event loop, or after the next acknowledgement."""
        waiting = self._waiting.get(to)
        if waiting is not None:
            waiting.append(envelope)
            return
        self._waiting[to] = [envelope]
        if not self._flush_is_due and self._unacked_frames[to] < MAX_UNACKNOWLEDGED_FRAMES:
            self._flush_is_due = True
            self._bus.at_turn_end(self.flush)

    def cancel(self, queue: Destination, key: int) -> None:
        """Publishes that a request is cancelled."""
        if isinstance(queue, PartitionedQueue):
            return  # it was not published, and will not be
        self._cancelled.setdefault(queue, []).append(key)
        self._schedule_flush()

    def _report_rejections(self) -> None:
        """Publishes how many requests for each queue were rejected here, because its scheduler would reject them."""
        for queue, requests in self.backpressure.take_rejections().items():
            self._bus.publish(_cancel_subject(queue), Cancellation(self._id, (), min(requests, MAX_REJECTED)).pack())

    def release_slot(self, owner: str, slot: SlotRow) -> None:
        """Publishes that a payload slot was read, so that its owner may use it again."""
        self._released.setdefault(owner, []).append(slot)
        self._schedule_flush()

    def resend(self, keys: Iterable[int]) -> None:
        """Sends those of these requests again that are pending."""
        for key in keys:
            pending = self._in_flight.get(key)
            if pending is not None and pending.is_queued:
                self.add(pending.queue, pending.envelope)

    def resend_all(self) -> None:
        """Sends all pending requests again, since the stream may be empty. Schedulers detect duplicates by their keys."""
        if self._bus.is_connected:
            self._losses = self._bus.losses
        self._unacked.clear()
        self._unacked_frames.clear()
        self._waiting.clear()
        self.resend(list(self._in_flight))

    async def _on_reconnected(self) -> None:
        await self.streams.ensure()
        self.resend_all()

    def _on_link_lost(self, _worker: str, end: LinkEnd) -> None:
        """Sends all pending requests again where responses were not read: their schedulers recognise those that run."""
        if end is LinkEnd.BROKEN_OFF:
            self.resend(list(self._in_flight))

    async def _watch_broker(self) -> None:
        while True:
            await next_tick(_CHECK_INTERVAL_S)
            await self._check_broker(time.monotonic())

    @contained()
    async def _check_broker(self, now_s: float) -> None:
        if self._bus.is_connected:
            self._disconnected_s = None
            self._check_acks(now_s)
            self._report_rejections()
            await self.streams.check()
        elif self._disconnected_s is None:
            self._disconnected_s = now_s
        elif now_s - self._disconnected_s > BROKER_TIMEOUT_S:
            error = overloaded("the message broker is not available", reason=Reason.BROKER_AWAY)
            self._on_rejected(list(self._in_flight), error)

    def _check_acks(self, now_s: float) -> None:
        """Reports a suspected loss where a server of a cluster may have died with frames that it had received."""
        if not self._bus.is_clustered or self._losses != self._bus.losses or not self._unacked:
            return
        _, _, oldest_s = next(iter(self._unacked.values()))
        if now_s - oldest_s > _ACK_TIMEOUT_S:
            self._bus.suspect_loss(f"{len(self._unacked)} frames were not acknowledged")

    def flush(self) -> None:
        """Publishes everything that need not wait."""
        self._flush_is_due = False
        # After a loss no request is published before the streams exist again and `resend_all` sends all requests in order:
        # one that found no stream would come after requests that were accepted later.
        if self._losses == self._bus.losses:
            for to in tuple(self._waiting):
                if self._unacked_frames[to] < MAX_UNACKNOWLEDGED_FRAMES:
                    self._send(to, self._waiting.pop(to))
            if self.has_traced and not self._waiting:
                self.has_traced = False
        while self._cancelled:
            queue, keys = self._cancelled.popitem()
            self._bus.publish(_cancel_subject(queue), Cancellation(self._id, keys).pack())
        while self._released:
            owner, slots = self._released.popitem()
            self._bus.publish(subjects.release(owner), SlotRelease(slots).pack())

    def _schedule_flush(self) -> None:
        if not self._flush_is_due:
            self._flush_is_due = True
            # Once everything that arrived in this turn of the loop has been read, by all frontends.
            self._bus.at_turn_end(self.flush)

    @contained(on_error="_sending_failed")
    def _send(self, to: Destination, envelopes: list[RequestEnvelope]) -> None:
        # A request that was cancelled while it waited is not sent: it would come after its cancellation.
        sent = []
        for envelope in envelopes:
            if envelope.key in self._in_flight:
                sent.append(envelope)
        if isinstance(to, PartitionedQueue):
            self._send_partitioned(to, sent)
            return
        subject = self._layout.subject_of(to) if isinstance(to, str) else self._layout.subject(to)
        if logs_requests(logger):
            for pending in [self._in_flight[envelope.key] for envelope in sent]:
                log_request(
                    logger, "sent to its queue", pending.model.name, (self._id, pending.key), pending.request.id
                )
        for frame in (sent,) if len(sent) == 1 else frames_of(sent):
            keys, size = [], 0
            for envelope in frame:
                keys.append(envelope.key)
                size += len(envelope.body)
            if size > FRAME_INLINE_BYTES:
                self._place_bodies(to if isinstance(to, str) else to.model, frame)
            number = next(self._frame_numbers)
            message = pack_frame(self._id, frame)
            self._bus.publish(subject, message, f"{self._acks}.{number}")
            self._unacked[number] = (to, keys, time.monotonic())
            self._unacked_frames[to] += 1
            counters = self.counters
            counters.frame_requests.add(len(frame))
            counters.frame_bytes.add(len(message))
            counters.last_key = max(counters.last_key, keys[-1])
            counters.changed(len(self._in_flight))
            if self.has_traced:
                self._mark_sent(keys)

    def _sending_failed(self, _error: Exception, to: Destination, envelopes: list[RequestEnvelope]) -> None:
        """Sends each request that was not published alone, since one may be the cause; one that fails again ends."""
        published = {key for _, keys, _ in self._unacked.values() for key in keys}
        unsent = [envelope for envelope in envelopes if envelope.key not in published]
        if len(unsent) > 1:
            for envelope in unsent:
                self._send(to, [envelope])
        else:
            self._on_rejected([envelope.key for envelope in unsent], internal(_NOT_SENT))

    def _send_partitioned(self, to: PartitionedQueue, envelopes: list[RequestEnvelope]) -> None:
        """Assigns requests to queues of their model and sends them there."""
        selector = self._selectors.get(to.model)
        if selector is None or selector.queues != to:
            selector = self._selectors[to.model] = PartitionSelector(to, self._id)
        size = selector.group_size(len(envelopes))
        for first in range(0, len(envelopes), size):
            group = envelopes[first : first + size]
            queue = LiveQueue(to.model, selector.acquire(len(group)))
            for pending in filter(None, (self._in_flight.get(envelope.key) for envelope in group)):
                pending.queue = queue
                pending.slots = (*pending.slots, PartitionReservation(selector, queue.partition))
            self._send(queue, group)

    def _mark_sent(self, keys: list[int]) -> None:
        for pending in filter(None, map(self._in_flight.get, keys)):
            if pending.trace is not None:
                pending.trace.mark(FRAME_SENT)

    def _place_bodies(self, model: str, frame: list[RequestEnvelope]) -> None:
        # The body of a request that is sent again may be a reference already, and is not placed a second time.
        own = [position for position, envelope in enumerate(frame) if not is_body_ref(envelope.body)]
        placed = self._payloads.place_bodies(model, [frame[position].body for position in own])
        if placed is None:
            return
        refs, slot = placed
        for position, ref in zip(own, refs, strict=True):
            envelope = frame[position] = frame[position]._replace(body=ref)
            pending = self._in_flight.get(envelope.key)
            if pending is not None:
                self._in_flight.replace_envelope(pending, envelope)
                pending.slots = (*pending.slots, slot)

    def _on_publish_ack(self, message: Message) -> None:
        frame = self._unacked.pop(int(message.subject.rsplit(".", 1)[1]), None)
        if frame is None:
            return
        to, keys, _ = frame
        self._unacked_frames[to] -= 1
        if to in self._waiting:
            self._schedule_flush()
        if message.status:
            # The stream does not exist: it was deleted, with the requests in it, or the cluster has elected no leader
            # for it yet. Once it exists again, all pending requests are sent again in order.
            if self._losses == self._bus.losses:
                self._bus.suspect_loss("no stream accepted a frame of requests")
        elif b'"error"' in message.data:
            _limited.warning(
                "rejected", "model %s: the stream rejected %d requests: %s", to, len(keys), message.data[:500]
            )
            self.rejected += len(keys)
            self._on_rejected(keys, overloaded())


def _cancel_subject(queue: str | LiveQueue) -> str:
    return subjects.cancel(queue) if isinstance(queue, str) else queue.cancel_subject


def frames_of(envelopes: list[RequestEnvelope]) -> Iterable[list[RequestEnvelope]]:
    """The requests in order, divided into frames."""
    frame: list[RequestEnvelope] = []
    size = 0
    for envelope in envelopes:
        # The first request of a sequence has a frame of its own. In a shared frame it would be delivered again, if the
        # scheduler dies, until all of the frame's requests have ended: the sequence would start again without its later
        # requests.
        starts = envelope.sequence_flags & (SEQUENCE_START | SEQUENCE_END) == SEQUENCE_START
        limit_bytes = FRAME_INLINE_BYTES if len(envelope.body) <= SMALL_BODY_BYTES else MAX_FRAME_BYTES
        if frame and (starts or size + len(envelope.body) > limit_bytes):
            yield frame
            frame, size = [], 0
        frame.append(envelope)
        size += len(envelope.body)
        if starts:
            yield frame
            frame, size = [], 0
    if frame:
        yield frame


class LiveStreamWatch:
    """Detects that a stream of live requests was deleted and created again, and then suspects a loss (`Bus.suspect_loss`).

    A stream may be deleted by hand. The scheduler that consumes it creates it again at once, so a caller that publishes
    nothing at that moment notices nothing, and the requests in the stream are gone. While a request waits, the creation
    times of the streams are compared now and then.
    """

    def __init__(self, bus: Bus, in_flight: InFlight) -> None:
        self._bus = bus
        self._in_flight = in_flight
        self._created: list[object] = []
        self._oldest = -1

    async def start(self) -> None:
        """Creates all streams and buckets of a cluster. Raises as `ensure`."""
        await ensure_streams(self._bus)
        await self.ensure()

    async def ensure(self) -> None:
        """Creates missing streams of live requests. Raises NatsError, OSError or TimeoutError."""
        await ensure_live_streams(self._bus)
        self._created = await self._creation_times()

    async def check(self) -> None:
        """Compares the streams if the oldest request is the same as at the last call. Called about every second."""
        oldest = next(iter(self._in_flight), -1)
        waits, self._oldest = oldest >= 0 and oldest == self._oldest, oldest
        if not waits or not self._created:
            return
        losses, known = self._bus.losses, self._created
        try:
            found = await self._creation_times()
        except (NatsError, OSError, TimeoutError) as error:
            logger.debug("streams of live requests could not be checked: %s", error)
            return
        if found != known and known is self._created and losses == self._bus.losses:
            self._bus.suspect_loss("a stream of live requests was deleted, and what it held is gone")

    async def _creation_times(self) -> list[object]:
        """When each stream was created; None for a missing one."""
        names = [subjects.live_stream(number) for number in range(self._bus.live_layout.streams)]
        infos = [await self._bus.jetstream.find_stream(name) for name in names]
        return [None if info is None else info["created"] for info in infos]

"""`Outbox`: what leaves a caller: frames of requests, cancellations, and slots that are given back.

Requests for one model that are submitted in the same turn of the event loop leave as one frame; a lone request leaves
alone, at once. Only while several frames of the model are on their way to the stream do later ones wait, for the next
acknowledgement, and then leave together (as TCP's segments do, RFC 896).

A model may have several queues. What may go to any of them is given one when it leaves, and keeps it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import count

from bus import subjects
from bus.connection import Bus, Message
from bus.live_queues import LiveQueue
from calls.frame_counters import FrameCounters
from calls.in_flight import InFlight
from calls.partition_choice import AnyQueue, Destination, PartitionChoice, PlaceInPartition
from calls.payload_store import FRAME_INLINE_BYTES, PayloadStore
from runtime.containment import contained
from runtime.log_limiter import LogLimiter
from schemas.bodies import is_body_ref
from schemas.errors import WeirError, internal, overloaded
from schemas.messages import MAX_TURNED_AWAY, Part, pack_cancel, pack_frame, pack_release
from schemas.requests import SEQUENCE_END, SEQUENCE_START
from telemetry.request_log import log_request, logs_requests

logger = logging.getLogger("weir.calls")

_limited = LogLimiter(logger)

_NOT_SENT = "an unexpected error occurred while the request was sent; the server's log has the details"

MAX_FRAME_BYTES = 512 * 1024
"""Bodies of several requests that share a frame; a larger one travels alone."""

MAX_FRAMES_ON_THE_WAY = 8
"""Frames of one model that may be unacknowledged before later requests wait for one of them."""

_ACK_PATIENCE_S = 2.0

SlotRow = tuple[str, int, int]
"""Segment, slot and generation, as a release message has them."""


class Outbox:
    """Publishes requests in frames.

    `on_refused(keys, error)` is called with requests that the stream refused, or that can't be sent.

    `refused` counts those that the stream refused.
    """

    def __init__(
        self,
        bus: Bus,
        caller_id: str,
        payloads: PayloadStore,
        in_flight: InFlight,
        counters: FrameCounters,
        on_refused: Callable[[Iterable[int], WeirError], None],
    ) -> None:
        self._bus = bus
        self._id = caller_id
        self._payloads = payloads
        self._in_flight = in_flight
        self._counters = counters
        self._on_refused = on_refused
        self._layout = bus.live_layout
        self._waiting: dict[Destination, list[Part]] = {}
        self._on_the_way: dict[Destination, int] = defaultdict(int)  # frames that are not acknowledged yet
        self._choices: dict[str, PartitionChoice] = {}  # of models with several queues
        self._cancelled: dict[str | LiveQueue, list[int]] = {}
        self._released: dict[str, list[SlotRow]] = {}
        self._flush_due = False
        self._losses = bus.losses  # of those connections nothing is left to be sent again
        self._frame_numbers = count(1)
        # By number: to where, what, and when they were sent, in that order.
        self._unacked: dict[int, tuple[Destination, list[int], float]] = {}
        self.refused = 0

    async def start(self) -> None:
        """Listens for acknowledgements."""
        await self._bus.subscribe(f"{subjects.publish_ack(self._id)}.*", self._on_publish_ack)

    def add(self, to: Destination, part: Part) -> None:
        """A request is to leave."""
        waiting = self._waiting.get(to)
        if waiting is not None:
            waiting.append(part)
            return
        self._waiting[to] = [part]
        if self._on_the_way[to] < MAX_FRAMES_ON_THE_WAY:
            self._schedule_flush()

    def cancel(self, queue: Destination, key: int) -> None:
        """A request is to leave its queue."""
        if isinstance(queue, AnyQueue):
            return  # it never came to any, and won't be sent any more
        self._cancelled.setdefault(queue, []).append(key)
        self._schedule_flush()

    def tell_turned_away(self, turned_away: Mapping[str | LiveQueue, int]) -> None:
        """So many requests for these queues were not sent, for their owners would have refused them."""
        for queue, requests in turned_away.items():
            subject = subjects.cancel(queue) if isinstance(queue, str) else queue.cancel_subject
            self._bus.publish(subject, pack_cancel(self._id, (), min(requests, MAX_TURNED_AWAY)))

    def give_back(self, owner: str, slot: SlotRow) -> None:
        """A payload slot has been read: its owner may use it again."""
        self._released.setdefault(owner, []).append(slot)
        self._schedule_flush()

    def resend(self, keys: Iterable[int]) -> None:
        """Sends those of these requests again that have no answer yet."""
        for key in keys:
            pending = self._in_flight.find(key)
            if pending is not None and pending.is_queued:
                self.add(pending.queue, pending.part)

    def resend_all(self) -> None:
        """The stream may have lost everything: a request that it still has is recognised by its key."""
        if self._bus.is_connected:
            self._losses = self._bus.losses
        self._unacked.clear()
        self._on_the_way.clear()
        self._waiting.clear()
        self.resend(self._in_flight.keys())

    def check(self) -> None:
        """Has all sent again where a cluster's server may have gone with what was sent to it. Called now and then."""
        if not self._bus.is_clustered or self._losses != self._bus.losses or not self._unacked:
            return
        _, _, oldest_s = next(iter(self._unacked.values()))
        if time.monotonic() - oldest_s > _ACK_PATIENCE_S:
            self._bus.doubt(f"{len(self._unacked)} frames were not acknowledged")

    def flush(self) -> None:
        """Sends what is waiting and may leave."""
        self._flush_due = False
        # After a loss nothing leaves before the streams are there again and `resend_all` sends everything, in order: what
        # found no stream would come after what was accepted later.
        if self._losses == self._bus.losses:
            for to in [to for to in self._waiting if self._on_the_way[to] < MAX_FRAMES_ON_THE_WAY]:
                self._send(to, self._waiting.pop(to))
        if self._cancelled:
            cancelled, self._cancelled = self._cancelled, {}
            for queue, keys in cancelled.items():
                self._send_cancel(queue, keys)
        if self._released:
            released, self._released = self._released, {}
            for owner, slots in released.items():
                self._send_release(owner, slots)

    @contained()
    def _send_cancel(self, queue: str | LiveQueue, keys: list[int]) -> None:
        subject = subjects.cancel(queue) if isinstance(queue, str) else queue.cancel_subject
        self._bus.publish(subject, pack_cancel(self._id, keys))

    @contained()
    def _send_release(self, owner: str, slots: list[SlotRow]) -> None:
        self._bus.publish(subjects.release(owner), pack_release(slots))

    def _schedule_flush(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            # Once everything that arrived in this turn of the loop has been taken in, from whichever door.
            self._bus.at_turn_end(self.flush)

    @contained(on_error="_sending_failed")
    def _send(self, to: Destination, parts: list[Part]) -> None:
        # What was given up while it waited for an acknowledgement is not sent: its cancellation would be ahead of it.
        parts = [part for part in parts if self._in_flight.find(part.key) is not None]
        if logs_requests(logger):
            for pending in filter(None, (self._in_flight.find(part.key) for part in parts)):
                log_request(logger, "sent to its queue", pending.model.name, self._id, pending.key, pending.request.id)
        if type(to) is str:
            self._publish(to, self._layout.subject_of(to), parts)
        elif isinstance(to, AnyQueue):
            self._spread(to, parts)
        elif isinstance(to, LiveQueue):
            self._publish(to, self._layout.subject(to), parts)

    def _sending_failed(self, _error: Exception, _to: Destination, parts: list[Part]) -> None:
        """Ends the requests that have not left in a frame."""
        sent = {key for _, keys, _ in self._unacked.values() for key in keys}
        self._on_refused([part.key for part in parts if part.key not in sent], internal(_NOT_SENT))

    def _spread(self, to: AnyQueue, parts: list[Part]) -> None:
        """Sends what may go to any queue of a model; each request keeps the one it is given."""
        choice = self._choices.get(to.model)
        if choice is None or choice.queues != to:
            choice = self._choices[to.model] = PartitionChoice(to, self._id)
        size = choice.piece(len(parts))
        for first in range(0, len(parts), size):
            piece = parts[first : first + size]
            queue = LiveQueue(to.model, choice.take(len(piece)))
            for pending in filter(None, (self._in_flight.find(part.key) for part in piece)):
                pending.queue = queue
                pending.slots = (*pending.slots, PlaceInPartition(choice, queue.partition))
            self._publish(to, self._layout.subject(queue), piece)

    def _publish(self, to: Destination, subject: str, parts: list[Part]) -> None:
        for frame in frames_of(parts):
            self._publish_frame(to, subject, frame)

    @contained(on_error="_frame_failed")
    def _publish_frame(self, to: Destination, subject: str, frame: list[Part]) -> None:
        self._place_bodies(to if isinstance(to, str) else to.model, frame)
        number = next(self._frame_numbers)
        ack = f"{subjects.publish_ack(self._id)}.{number}"
        message = pack_frame(self._id, frame)
        self._bus.publish(subject, message, ack)
        self._unacked[number] = (to, [part.key for part in frame], time.monotonic())
        self._on_the_way[to] += 1
        self._counters.sent(len(frame), frame[-1].key, len(message), len(self._in_flight))

    def _frame_failed(self, _error: Exception, to: Destination, subject: str, frame: list[Part]) -> None:
        """One request can't be packed, perhaps: the requests of the frame are sent alone, and those that can't be end."""
        if len(frame) > 1:
            for part in frame:
                self._publish_frame(to, subject, [part])
        else:
            self._on_refused([part.key for part in frame], internal(_NOT_SENT))

    def _place_bodies(self, model: str, frame: list[Part]) -> None:
        if sum([len(part.body) for part in frame]) <= FRAME_INLINE_BYTES:
            return
        # What is sent again may lie in a slot already: a reference to a reference would be followed once.
        own = [position for position, part in enumerate(frame) if not is_body_ref(part.body)]
        placed = self._payloads.place_bodies(model, [frame[position].body for position in own])
        if placed is None:
            return
        refs, slot = placed
        for position, ref in zip(own, refs, strict=True):
            part = frame[position]
            frame[position] = part._replace(body=ref)
            pending = self._in_flight.find(part.key)
            if pending is not None:
                self._in_flight.replace_part(pending, frame[position])
                pending.slots = (*pending.slots, slot)

    @contained()
    def _on_publish_ack(self, message: Message) -> None:
        frame = self._unacked.pop(int(message.subject.rsplit(".", 1)[1]), None)
        if frame is None:
            return
        to, keys, _ = frame
        self._on_the_way[to] -= 1
        if to in self._waiting:
            self._schedule_flush()
        if message.status:
            # Nobody answers for the stream: somebody has deleted it, with what was accepted before; or in a cluster it is
            # without a leader, for seconds. When it is there again all is sent again, in order.
            if self._losses == self._bus.losses:
                self._bus.doubt("nobody answers for the queues")
        elif b'"error"' in message.data:
            _limited.warning(
                "refused", "model %s: the queue refused %d requests: %s", to, len(keys), message.data[:500]
            )
            self.refused += len(keys)
            self._on_refused(keys, overloaded())


def frames_of(parts: list[Part]) -> Iterable[list[Part]]:
    """The parts, in order, as they leave together."""
    frame: list[Part] = []
    size = 0
    for part in parts:
        # What starts a sequence travels alone. With others it would be delivered again, if the scheduler dies, for as
        # long as one of them has no answer: the sequence would be started anew and go on without what came since.
        starts = part.sequence_flags & (SEQUENCE_START | SEQUENCE_END) == SEQUENCE_START
        if frame and (starts or size + len(part.body) > MAX_FRAME_BYTES):
            yield frame
            frame, size = [], 0
        frame.append(part)
        size += len(part.body)
        if starts:
            yield frame
            frame, size = [], 0
    if frame:
        yield frame

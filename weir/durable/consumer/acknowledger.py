"""`Acknowledger`: acknowledges the messages of one lane of a model, in the batches that `AckBatcher` forms.

Nothing is acknowledged between a loss of the broker and the next `begin`: if the broker comes back without its stream,
or the stream is recreated, the sequence numbers of finished messages are those of other messages.

`AckBatcher`: chooses how finished messages of a subject are acknowledged at the least cost.

With a disk that syncs before it acknowledges, nats-server writes and syncs for each acknowledged message of a work
queue: 200 us, at most some hundreds a second (2.15, measured). One purge of a subject below a sequence removes many
messages for little more: 28 us a message, 6 000 a second. Requests end nearly in order, so all that have ended before
the first open one are purged; those that ended behind a long one are acknowledged singly, after a while. Sans-IO: the
caller executes what `due` returns. Messages are delivered in the order of their sequence numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import NamedTuple

from nats.js.errors import APIError

from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.nats.jetstream import JetStream
from weir.runtime.containment import contained

_BLOCKED_FLUSH_S = 0.1


class Acknowledger:
    """Acknowledges the messages of a lane. `plain` is its subject for the model; others are below it."""

    def __init__(self, bus: Bus, api: JetStream, plain: str, background: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._background = background
        self._api = api
        self._plain = plain
        self._below = f"{plain}.>"
        self._lines = {plain: AckBatcher(), self._below: AckBatcher()}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._purges: dict[str, asyncio.Task[None]] = {}
        self._losses = -1  # of the connection, at `begin`
        self._is_stopped = False

    def __len__(self) -> int:
        """Finished messages that could be acknowledged now and are not yet, and running purges."""
        return (sum(map(len, self._lines.values())) if self._may_acknowledge else 0) + len(self._purges)

    def begin(self) -> None:
        """The stream's messages are those of this owner from now on."""
        self._losses = self._bus.losses

    def opened(self, subject: str, sequence: int) -> None:
        """A message was delivered for the first time."""
        self._lines[self._filter(subject)].opened(sequence)

    def ended(self, subject: str, sequence: int, ack_subject: str) -> None:
        """A message is finished."""
        filter = self._filter(subject)
        self._lines[filter].ended(sequence, ack_subject, time.monotonic())
        self._schedule(filter, FLUSH_S)

    def delivered_again(self, subject: str, sequence: int, ack_subject: str) -> bool:
        """Whether a delivered message was finished before; then it is acknowledged again."""
        filter = self._filter(subject)
        if not self._lines[filter].delivered_again(sequence, ack_subject):
            return False
        self._schedule(filter, FLUSH_S)
        return True

    def flush(self) -> None:
        """Acknowledges everything now."""
        for filter in self._lines:
            self._flush(filter, everything=True)

    def clear(self) -> None:
        """Forgets all messages: they belong to another owner."""
        self._losses = -1
        for line in self._lines.values():
            line.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def stop(self) -> None:
        """Cancels all purges: the broker delivers messages without an acknowledgement to the next owner."""
        self._is_stopped = True
        for task in self._purges.values():
            task.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    @property
    def _may_acknowledge(self) -> bool:
        return self._losses == self._bus.losses

    def _filter(self, subject: str) -> str:
        return subject if subject == self._plain else self._below

    def _schedule(self, filter: str, delay_s: float) -> None:
        if filter not in self._timers and not self._is_stopped:
            self._timers[filter] = asyncio.get_running_loop().call_later(delay_s, self._flush, filter)

    def _flush(self, filter: str, everything: bool = False) -> None:
        timer = self._timers.pop(filter, None)
        if timer is not None:
            timer.cancel()
        if filter in self._purges and not everything:
            return  # its end schedules the next flush
        if not self._may_acknowledge:
            if len(self._lines[filter]):
                self._schedule(filter, _BLOCKED_FLUSH_S)
            return
        due = self._lines[filter].due(time.monotonic(), everything)
        for ack_subject in due.singles:
            self._bus.publish(ack_subject, b"+ACK")
        if due.purge_below:
            task = self._purges[filter] = self._background.create_task(self._purge(filter, due))
            task.add_done_callback(partial(self._purged, filter))
        elif len(self._lines[filter]):
            self._schedule(filter, _BLOCKED_FLUSH_S)

    @contained(on_error="_purge_failed")
    async def _purge(self, filter: str, due: DueAcks) -> None:
        try:
            await self._api.purge(subjects.QUEUE_STREAM, filter, due.purge_below)
        except APIError:  # the purge was rejected
            for _, ack_subject in due.purged:
                self._bus.publish(ack_subject, b"+ACK")
        except BROKER_ERRORS as error:
            self._purge_failed(error, filter, due)

    def _purge_failed(self, _error: Exception, filter: str, due: DueAcks) -> None:
        for sequence, ack_subject in due.purged:
            self._lines[filter].delivered_again(sequence, ack_subject)  # does nothing after `clear`

    def _purged(self, filter: str, task: asyncio.Task[None]) -> None:
        if self._purges.get(filter) is task:
            del self._purges[filter]
        if len(self._lines[filter]):
            self._schedule(filter, FLUSH_S)


FLUSH_S = 0.1
"""Messages that end within this time are acknowledged together."""

BLOCKED_TIMEOUT_S = 1.0
"""How long a finished message waits for earlier ones."""

MAX_SINGLES = 64
"""Messages that are acknowledged singly in one flush, while earlier ones take long."""

_MIN_PURGE = 3
_MAX_REMEMBERED = 8192


class DueAcks(NamedTuple):
    """Purge the subject below this sequence (0: no purge), and acknowledge the singles on their ack subjects."""

    purge_below: int
    purged: list[tuple[int, str]]
    singles: list[str]


class AckBatcher:
    """Tracks the open and finished messages of one subject."""

    def __init__(self) -> None:
        self._open: dict[int, None] = {}  # in order
        self._ended: dict[int, tuple[str, float]] = {}  # ack subjects, and when they ended
        # Sent, but the broker may not have received it. Two sets take turns, since a dictionary whose oldest key is deleted
        # with each new one takes ever longer to find the next.
        self._acknowledged: set[int] = set()
        self._acknowledged_before: set[int] = set()

    def __len__(self) -> int:
        """Finished messages that are not acknowledged yet."""
        return len(self._ended)

    def opened(self, sequence: int) -> None:
        """A message was delivered for the first time."""
        self._open[sequence] = None

    def ended(self, sequence: int, ack_subject: str, now_s: float) -> None:
        """A message is finished."""
        if self._open.pop(sequence, sequence) is None:
            self._ended[sequence] = ack_subject, now_s

    def delivered_again(self, sequence: int, ack_subject: str) -> bool:
        """Whether a delivered message is finished already; then its new `ack_subject` is used."""
        if sequence in self._ended:
            self._ended[sequence] = ack_subject, self._ended[sequence][1]
            return True
        if sequence in self._acknowledged or sequence in self._acknowledged_before:
            self._acknowledged.discard(sequence)
            self._acknowledged_before.discard(sequence)
            self._ended[sequence] = ack_subject, 0.0
            return True
        return False

    def due(self, now_s: float, everything: bool = False) -> DueAcks:
        """What to acknowledge now; with `everything` nothing is left."""
        first_open = next(iter(self._open), None)
        before = sorted(sequence for sequence in self._ended if first_open is None or sequence < first_open)
        prefix = [(sequence, self._ended.pop(sequence)[0]) for sequence in before]
        self._remember(before)
        singles: list[str] = []
        oldest = islice(self._ended.items(), None if everything else MAX_SINGLES)
        for sequence, (ack_subject, ended_s) in list(oldest):
            if not everything and now_s - ended_s < BLOCKED_TIMEOUT_S:
                break
            del self._ended[sequence]
            self._remember((sequence,))
            singles.append(ack_subject)
        if len(prefix) < _MIN_PURGE:
            return DueAcks(0, [], [ack_subject for _, ack_subject in prefix] + singles)
        return DueAcks(prefix[-1][0] + 1, prefix, singles)

    def clear(self) -> None:
        """Forgets all messages: they belong to another owner."""
        self._open.clear()
        self._ended.clear()
        self._acknowledged.clear()
        self._acknowledged_before.clear()

    def _remember(self, sequences: Iterable[int]) -> None:
        if len(self._acknowledged) >= _MAX_REMEMBERED:
            self._acknowledged, self._acknowledged_before = set(), self._acknowledged
        self._acknowledged.update(sequences)

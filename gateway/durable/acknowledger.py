"""`Acknowledger`: tells the broker which messages of one lane of a model are done with, by `AckLine`.

Nothing is told between a loss of the broker and the next `begin`: if it comes back without its stream, or the stream is
made anew, the sequences of what is done with are those of other messages.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from nats.errors import Error as NatsError
from nats.js.errors import APIError

from bus import durable_subjects as subjects
from bus.connection import Bus
from bus.jetstream_api import JetStreamApi
from gateway.durable.ack_line import FLUSH_S, AckLine, DueAcks
from runtime.containment import contained

_BLOCKED_FLUSH_S = 0.1


class Acknowledger:
    """See the module. `plain` is the lane's subject for the model; others are below it."""

    def __init__(self, bus: Bus, api: JetStreamApi, plain: str, background: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._background = background
        self._api = api
        self._plain = plain
        self._lines = {plain: AckLine(), f"{plain}.>": AckLine()}
        self._deeper = self._lines[f"{plain}.>"]
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._purges: dict[str, asyncio.Task[None]] = {}
        self._losses = -1  # of the connection, when it began
        self._is_stopped = False

    def __len__(self) -> int:
        """Messages that are done with and not told yet though they can be, and purges under way."""
        return (sum(map(len, self._lines.values())) if self._may_tell else 0) + len(self._purges)

    def begin(self) -> None:
        """The messages of the stream that is there now are ours."""
        self._losses = self._bus.losses

    def opened(self, subject: str, sequence: int) -> None:
        """A message was delivered for the first time."""
        self._line(subject).opened(sequence)

    def ended(self, subject: str, sequence: int, ack_subject: str) -> None:
        """It is done with."""
        self._line(subject).ended(sequence, ack_subject, time.monotonic())
        self._schedule(self._filter(subject), FLUSH_S)

    def delivered_again(self, subject: str, sequence: int, ack_subject: str) -> bool:
        """Whether a message that is delivered was done with before; the broker is told again then."""
        if not self._line(subject).delivered_again(sequence, ack_subject):
            return False
        self._schedule(self._filter(subject), FLUSH_S)
        return True

    def flush(self) -> None:
        """Tells everything at once."""
        for filter in self._lines:
            self._flush(filter, everything=True)

    def clear(self) -> None:
        """None of the messages is ours any more."""
        self._losses = -1
        for line in self._lines.values():
            line.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def stop(self) -> None:
        """Waits for no purge any more: what the broker has not heard it delivers to the next owner."""
        self._is_stopped = True
        for task in self._purges.values():
            task.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    @property
    def _may_tell(self) -> bool:
        return self._losses == self._bus.losses

    def _line(self, subject: str) -> AckLine:
        return self._lines.get(subject, self._deeper)

    def _filter(self, subject: str) -> str:
        return subject if subject == self._plain else f"{self._plain}.>"

    def _schedule(self, filter: str, delay_s: float) -> None:
        if filter not in self._timers and not self._is_stopped:
            self._timers[filter] = asyncio.get_running_loop().call_later(delay_s, self._flush, filter)

    def _flush(self, filter: str, everything: bool = False) -> None:
        timer = self._timers.pop(filter, None)
        if timer is not None:
            timer.cancel()
        if filter in self._purges and not everything:
            return  # its end has it done again
        if not self._may_tell:
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
        except APIError:  # it refuses
            for _, ack_subject in due.purged:
                self._bus.publish(ack_subject, b"+ACK")
        except (NatsError, OSError, TimeoutError) as error:
            self._purge_failed(error, filter, due)

    def _purge_failed(self, _error: Exception, filter: str, due: DueAcks) -> None:
        for sequence, ack_subject in due.purged:
            self._lines[filter].delivered_again(sequence, ack_subject)  # unless none is ours any more

    def _purged(self, filter: str, task: asyncio.Task[None]) -> None:
        if self._purges.get(filter) is task:
            del self._purges[filter]
        if len(self._lines[filter]):
            self._schedule(filter, FLUSH_S)

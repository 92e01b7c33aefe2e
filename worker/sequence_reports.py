"""`SequenceRoll`: the sequences that the models of a worker have started. `SequenceReporter`: reports them to schedulers.

The scheduler that owns a queue knows its sequences, and when it dies, its successor has to learn of them. So each worker
keeps the correlation ids of the sequences that it has run and that have not ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.runtime.containment import contained
from weir.schemas.core.requests import SEQUENCE_END
from weir.schemas.wire.batches import NO_REPLY, BatchMessage, SequenceQuery, SequenceReport, StartedSequence
from weir.schemas.wire.codec import MalformedMessage

logger = logging.getLogger("weir.worker")

CorrelationId = int | str

MAX_SEQUENCES = 10_000
"""Sequences of a version that are remembered; the ones that ran longest ago are forgotten first."""

RUNNING_WAIT_S = 0.5
"""How long a report waits for batches of sequences that run: after it, they count as unknown."""

_POLL_S = 0.01


class HeldBatch(Protocol):
    """A batch that has not ended. `sequence_ids` are the correlation ids of its sequences, by position of the entry."""

    message: BatchMessage
    sequence_ids: Mapping[int, CorrelationId]


class SequenceRoll:
    """The sequences of all versions on a worker. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # When their last requests ended, how many they were, and gateway and key of the last one.
        self._open: dict[tuple[str, int], dict[CorrelationId, tuple[int, int, str, int]]] = {}

    def ended(self, batch: HeldBatch) -> None:
        """Notes the sequences of a batch that has run, and forgets those that ended with it."""
        message, now_ns = batch.message, time.monotonic_ns()
        with self._lock:
            sequences = self._open.setdefault((message.model, message.version), {})
            for position, id in batch.sequence_ids.items():
                entry = message.entries[position]
                place, last = entry.position, (entry.gateway, entry.key)
                before = sequences.pop(id, None)
                if entry.gateway == NO_REPLY and before is not None:
                    last = before[2:]  # it ran again for the state alone
                if place is not None and not place.flags & SEQUENCE_END:
                    sequences[id] = now_ns, place.number + 1, *last
            while len(sequences) > MAX_SEQUENCES:
                del sequences[next(iter(sequences))]

    def of(self, model: str) -> list[StartedSequence]:
        """The sequences of a model."""
        now_ns = time.monotonic_ns()
        with self._lock:
            return [
                StartedSequence(version, id, (now_ns - ended_ns) // 1000, number, gateway, key)
                for (name, version), ids in self._open.items()
                if name == model
                for id, (ended_ns, number, gateway, key) in ids.items()
            ]

    def forget(self, model: str) -> None:
        """The model is unloaded."""
        with self._lock:
            for key in [key for key in self._open if key[0] == model]:
                del self._open[key]


class SequenceReporter:
    """Replies to queries of schedulers. `held` returns the batches that have not ended. Runs in the event loop."""

    def __init__(self, bus: Bus, worker_id: str, roll: SequenceRoll, held: Callable[[], Iterable[Any]]) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._roll = roll
        self._held = held
        self._background: asyncio.TaskGroup | None = None
        self.malformed_messages = 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Subscribes to queries; replies in tasks of `background`."""
        self._background = background
        await self._bus.subscribe(subjects.sequence_query(self._worker_id), self._on_query)

    def _on_query(self, message: Message) -> None:
        assert self._background is not None  # noqa: S101 - set before the subscription
        try:
            query = SequenceQuery.unpack(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("subject %s: %s", message.subject, error)
            return
        if may_reply_to(message, subjects.sequence_reports("")):
            self._background.create_task(self._reply(query.model, message.reply))

    @contained()
    async def _reply(self, model: str, reply: str) -> None:
        """Replies once no batch of a sequence of the model runs any more.

        The new owner has announced itself before, so that no further batch of the former one begins.
        """
        deadline_s = time.monotonic() + RUNNING_WAIT_S
        while self._runs_sequences(model) and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        report = SequenceReport(self._worker_id, self._roll.of(model), not self._runs_sequences(model))
        self._bus.publish(reply, report.pack())

    def _runs_sequences(self, model: str) -> bool:
        messages = [batch.message for batch in list(self._held())]
        return any(m.model == model and any(e.position is not None for e in m.entries) for m in messages)

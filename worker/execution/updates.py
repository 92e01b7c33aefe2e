"""`BatchUpdate`: what an instance publishes of its batches; `HeldUpdates`: those that leave together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from weir.bus.links.framing import Outgoing
from weir.bus.payloads.reach import process_reach
from weir.runtime.containment import contained
from weir.schemas.wire.batches import BatchCompletion
from weir.schemas.wire.calls import join_responses

MAX_HELD_S = 0.005
"""How long the responses of a batch wait for those of the next ones."""


class BatchUpdate(NamedTuple):
    """Responses and completions of batches of one scheduler.

    `responses` are (gateway, responses message) each. `first` are messages that are sent before the responses.
    """

    scheduler: str
    completions: Sequence[BatchCompletion] = ()
    responses: Sequence[tuple[str, bytes]] = ()
    first: Sequence[Outgoing] = ()


class HeldUpdates:
    """The updates of the batches that an instance has run in one turn, published together. Thread-safe.

    `version` is that of the model; `publish` is called in the thread that calls `flush`.
    """

    def __init__(self, version: int, publish: Callable[[BatchUpdate], None]) -> None:
        self._version = version
        self._publish = publish
        self._lock = threading.Lock()
        self._updates: list[BatchUpdate] = []
        self._since_s = 0.0

    def __len__(self) -> int:
        return len(self._updates)

    def add(self, update: BatchUpdate) -> None:
        """Adds an update, which leaves with the next `flush`."""
        with self._lock:
            if not self._updates:
                self._since_s = time.monotonic()
            self._updates.append(update)

    @property
    def are_due(self) -> bool:
        """Whether an update has waited for as long as it may."""
        return bool(self._updates) and time.monotonic() - self._since_s >= MAX_HELD_S

    def flush(self) -> None:
        """Publishes what is held."""
        with self._lock:
            updates, self._updates = self._updates, []
        if len(updates) == 1:
            self._publish(updates[0])
            return
        for _, of_scheduler in groupby(updates, _scheduler):
            self._publish_joined(list(of_scheduler))

    @contained(on_error="_joining_failed")
    def _publish_joined(self, updates: list[BatchUpdate]) -> None:
        self._publish(self._joined(updates))

    def _joining_failed(self, _error: Exception, updates: list[BatchUpdate]) -> None:
        for update in updates:
            self._publish(update)

    def _joined(self, updates: list[BatchUpdate]) -> BatchUpdate:
        messages: dict[str, list[bytes]] = {}
        for update in updates:
            for gateway, data in update.responses:
                messages.setdefault(gateway, []).append(data)
        responses: list[tuple[str, bytes]] = []
        for gateway, of_gateway in messages.items():
            if len(of_gateway) > 1 and sum(map(len, of_gateway)) <= process_reach().message_bytes:
                of_gateway = [join_responses(self._version, of_gateway)]
            responses += [(gateway, data) for data in of_gateway]
        return BatchUpdate(
            updates[0].scheduler,
            [completion for update in updates for completion in update.completions],
            responses,
            [message for update in updates for message in update.first],
        )


def _scheduler(update: BatchUpdate) -> str:
    return update.scheduler

"""The desired state: which models the repository API has asked for (bucket `models`).

Gateways write it, workers follow it (`bus.kv_view`). The bucket lies in memory: when it is gone, a role that knows an entry
writes it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from nats.js.errors import KeyWrongLastSequenceError

from bus import subjects
from bus.connection import Bus
from bus.kv_view import KvView
from runtime.containment import call_each
from schemas.desired import DesiredModel, pack_desired, unpack_desired
from schemas.errors import invalid
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.bus")


class DesiredModels:
    """All entries, by model. Listeners are called in the event loop after an entry has come; not for removals."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._view = KvView(bus, subjects.MODELS_BUCKET, self._apply, self._remove)
        self._entries: dict[str, DesiredModel] = {}
        self._listeners: list[Callable[[DesiredModel], None]] = []

    def get(self, name: str) -> DesiredModel | None:
        """The entry of a model, None for one that nobody has asked for."""
        return self._entries.get(name)

    def is_unwanted(self, name: str) -> bool:
        """Whether the last thing that was asked for is that the model be unloaded."""
        entry = self._entries.get(name)
        return entry is not None and not entry.wanted.load

    def all(self) -> list[DesiredModel]:
        """Every entry."""
        return list(self._entries.values())

    def on_change(self, listener: Callable[[DesiredModel], None]) -> None:
        """`listener(entry)` after an entry that is newer than the one known has come."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Listens, then reads what was written before."""
        await self._view.listen()
        await self._bus.flush()
        await self._view.read()
        self._bus.on_reconnect(self._recover)

    async def write(self, entry: DesiredModel) -> None:
        """Writes an entry in place of the model's last one. Raises INVALID_ARG for one that is too large."""
        data = pack_desired(entry)
        if len(data) > self._bus.max_payload_bytes - 4096:
            raise invalid(f"the configuration of model '{entry.name}' is larger than can be sent to a worker")
        bucket = await self._bus.jetstream.key_value(subjects.MODELS_BUCKET)
        await bucket.put(subjects.token(entry.name), data)

    async def remove(self, name: str) -> None:
        """Takes a model's entry away: nothing is wanted of it any more."""
        bucket = await self._bus.jetstream.key_value(subjects.MODELS_BUCKET)
        await bucket.delete(subjects.token(name))

    async def _recover(self) -> None:
        """The broker came back, perhaps without the bucket, which the roles make anew."""
        present = await self._view.read()
        bucket = await self._bus.jetstream.key_value(subjects.MODELS_BUCKET)
        for entry in self.all():
            key = subjects.token(entry.name)
            if key not in present:
                try:
                    await bucket.create(key, pack_desired(entry))
                except KeyWrongLastSequenceError:
                    pass  # another role was faster

    def _remove(self, key: str) -> None:
        self._entries.pop(subjects.untoken(key), None)

    def _apply(self, key: str, data: bytes) -> None:
        try:
            entry = unpack_desired(data)
        except MalformedMessage as error:
            logger.warning("models key %r: %s", key, error)
            return
        known = self._entries.get(entry.name)
        if subjects.token(entry.name) != key or (known is not None and entry.revision < known.revision):
            return
        self._entries[entry.name] = entry
        call_each("bus.desired_models: a listener", self._listeners, entry)


def next_revision(known: DesiredModel | None, now_ns: int) -> int:
    """The revision of a new operation: later than what is known, whatever the clocks of other gateways say."""
    return max(now_ns, 1 + (0 if known is None else known.revision))

"""`DesiredModels`: the desired state, the models that clients have loaded or unloaded (bucket `models`).

Gateways write it, and workers reconcile with it. The bucket is in memory: after the broker has lost it, the roles that know
the entries write them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from weir.bus.kv.view import KvView
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.runtime.containment import call_each
from weir.schemas.core.errors import invalid
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.model_control import DesiredModel

logger = logging.getLogger("weir.bus")


class DesiredModels:
    """All entries by model. Listeners run in the event loop after an entry was written, not after a removal."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._view = KvView(bus, subjects.MODELS_BUCKET, self._apply, self._remove)
        self._entries: dict[str, DesiredModel] = {}
        self._listeners: list[Callable[[DesiredModel], None]] = []

    def get(self, name: str) -> DesiredModel | None:
        """The entry of a model, None for one that was neither loaded nor unloaded by a client."""
        return self._entries.get(name)

    def is_unwanted(self, name: str) -> bool:
        """Whether the last operation on the model was to unload it."""
        entry = self._entries.get(name)
        return entry is not None and not entry.wanted.load

    def all(self) -> list[DesiredModel]:
        """Every entry."""
        return list(self._entries.values())

    def on_change(self, listener: Callable[[DesiredModel], None]) -> None:
        """`listener(entry)` after a newer entry of a model has arrived."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Reads all entries, and follows changes from now on."""
        await self._view.start()
        self._bus.on_reconnect(self._recover)

    async def write(self, entry: DesiredModel) -> None:
        """Replaces the entry of a model. Raises INVALID_ARG for one that is too large."""
        data = entry.pack()
        if len(data) > self._bus.max_payload_bytes - 4096:
            raise invalid(f"the configuration of model '{entry.name}' is larger than can be sent to a worker")
        await self._view.bucket.put(subjects.token(entry.name), data)

    async def remove(self, name: str) -> None:
        """Removes the entry of a model: its state is no longer decided by clients."""
        await self._view.bucket.delete(subjects.token(name))

    async def _recover(self) -> None:
        await self._view.read(lambda: {subjects.token(entry.name): entry.pack() for entry in self.all()})

    def _remove(self, key: str) -> None:
        self._entries.pop(subjects.untoken(key), None)

    def _apply(self, key: str, data: bytes) -> None:
        try:
            entry = DesiredModel.unpack(data)
        except MalformedMessage as error:
            logger.warning("models key %r: %s", key, error)
            return
        known = self._entries.get(entry.name)
        if subjects.token(entry.name) != key or (known is not None and entry.revision < known.revision):
            return
        self._entries[entry.name] = entry
        call_each("weir.bus.kv.desired_models: a listener", self._listeners, entry)


def next_revision(known: DesiredModel | None, now_ns: int) -> int:
    """The revision of a new operation: higher than the known one, whatever the clocks of other gateways say."""
    return max(now_ns, 1 + (0 if known is None else known.revision))

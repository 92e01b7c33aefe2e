"""`DesiredModels`: the desired state, the models that clients have loaded or unloaded (bucket `models`).

Gateways and workers write it, and workers reconcile with it.
"""

from __future__ import annotations

from weir.bus.kv.typed_bucket import TypedBucket
from weir.bus.nats.connection import Bus
from weir.bus.streams.declarations import MODELS_BUCKET
from weir.schemas.core.errors import invalid
from weir.schemas.wire.model_control import DesiredModel


class DesiredModels(TypedBucket[DesiredModel]):
    """The entries of models that were loaded or unloaded by a client. `update` raises INVALID_ARG for one too large."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, MODELS_BUCKET, self._pack_entry, DesiredModel.unpack, lambda entry: entry.name)

    def is_unwanted(self, name: str) -> bool:
        """Whether the last operation on the model was to unload it."""
        entry = self.get(name)
        return entry is not None and not entry.wanted.load

    def _pack_entry(self, entry: DesiredModel) -> bytes:
        data = entry.pack()
        if len(data) > self._bus.max_payload_bytes - 4096:
            raise invalid(f"the configuration of model '{entry.name}' is larger than can be sent to a worker")
        return data


def next_revision(known: DesiredModel | None, now_ns: int) -> int:
    """The revision of a new operation: higher than the known one, whatever the clocks of other gateways say."""
    return max(now_ns, 1 + (0 if known is None else known.revision))

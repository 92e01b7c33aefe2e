"""`RegionDirectory`: the shared-memory regions of this host's clients, for a process that registers none itself.

Gateways register and unregister regions (`weir.gateway.admin.shared_memory`); `weir durable` looks up those that
requests name.
"""

from __future__ import annotations

from collections.abc import Sequence

from weir.bus.kv.registry import RegistryView
from weir.bus.kv.view import KvView
from weir.bus.naming import subjects
from weir.bus.naming.identity import host
from weir.bus.nats.connection import Bus
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.tensors import ClientRef
from weir.schemas.kserve.regions import Region, unknown_region


class _Use:
    """A request's use of regions. Nothing depends on its end: a gateway removes a region without asking this process."""

    def free(self) -> None:
        """Does nothing."""


class RegionDirectory:
    """Follows the registrations of this host. Unless `allowed`, no region is ever found."""

    def __init__(self, bus: Bus, registry: RegistryView, allowed: bool) -> None:
        self._bus = bus
        self._registry = registry
        self._allowed = allowed
        self._regions: dict[str, Region] = {}  # by key in the bucket
        self._view = KvView(bus, subjects.REGIONS_BUCKET, self._add, self._remove, f"{host()}.*")

    async def start(self) -> None:
        """Reads the registrations, and follows them. Raises NatsError, OSError or TimeoutError without a broker."""
        if self._allowed:
            await self._view.start()
            self._bus.on_reconnect(self._view.read)

    def find(self, name: str, offset: int, byte_size: int) -> ClientRef:
        """The place in the region that a request names. Raises WeirError, as a `weir.schemas.kserve.regions.FindRegion`."""
        region = self._regions.get(subjects.region_key(host(), name))
        if region is None or region.owner:  # a stored request has no principal when it runs
            raise unknown_region(name)
        return region.place(offset, byte_size)

    def hold(self, model: str, _names: Sequence[str]) -> _Use:
        """Starts a use of regions by a request to `model`. Raises WeirError (UNSUPPORTED) if its workers lack them."""
        if not self._registry.model_shares_memory(model):
            raise WeirError(
                ErrorCode.UNSUPPORTED,
                f"shared memory regions can't be used with model '{model}': it is not served on this host alone",
            )
        return _Use()

    def _add(self, key: str, data: bytes) -> None:
        self._regions[key] = Region.unpack(data)

    def _remove(self, key: str) -> None:
        self._regions.pop(key, None)

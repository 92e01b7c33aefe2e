"""`AccessKeys`: the keys of principals (bucket `access_keys`, on disk), by the name of the principal.

`weir key` writes the records, and every process with an access policy follows them. All keys of a name are one record, so
that of two changes of a name at the same time neither is lost, and a rotation happens as a whole. Only commands create the
bucket: no gateway may write it (`weir.bus.naming.permissions`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from nats.js.errors import NotFoundError

from weir.access.keys.ring import KeyRecord, KeyRing
from weir.bus.kv.typed_bucket import TypedBucket
from weir.bus.nats.connection import Bus
from weir.bus.streams.declarations import ACCESS_KEYS_BUCKET


class NamedKeys(msgspec.Struct, frozen=True):
    """The keys of one principal."""

    name: str
    keys: tuple[KeyRecord, ...]


class AccessKeys(TypedBucket[NamedKeys]):
    """The keys of all principals."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, ACCESS_KEYS_BUCKET, msgspec.json.encode, _unpack, lambda record: record.name)

    def ring(self) -> KeyRing:
        """All keys."""
        return KeyRing(key for record in self.all() for key in record.keys)

    async def change(self, name: str, change: Callable[[KeyRing], KeyRing]) -> None:
        """Replaces the keys of this name by those of `change(ring)`, which is called again if another process is faster.

        Raises what `change` raises.
        """

        def changed(known: NamedKeys | None) -> NamedKeys | None:
            keys = tuple(change(KeyRing(() if known is None else known.keys)).records)
            return NamedKeys(name, keys) if keys else None

        await self.update(name, changed)

    async def read_again(self) -> None:
        """Reads all records again, and drops those that the bucket no longer has, even if it was created anew."""
        await self._view.read()
        stored = set(await self._view.bucket.keys())
        for key in sorted({self._key(name) for name in self.names()} - stored):
            try:
                await self._view.refresh(key)
            except NotFoundError:  # there is no bucket
                self._remove(key)

    async def _recover(self) -> None:
        await super()._recover()
        await self.read_again()


def _unpack(data: bytes) -> NamedKeys:
    record = msgspec.json.decode(data, type=NamedKeys)
    if any(key.name != record.name for key in record.keys):
        raise ValueError("it has a key of another name")
    return record

"""`ClusterSecret`: random bytes that all gateways of a cluster share and no other user may read.

The first gateway generates them and stores them on disk; all others read them, so that the secret is the same everywhere
and survives restarts. Only the gateways' user may read the bucket (`weir.bus.naming.permissions`).
"""

from __future__ import annotations

import secrets

from nats.js.api import StorageType

from weir.bus.kv.view import KvBucket
from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import Bus
from weir.bus.streams.declarations import Bucket, ensure_bucket

SECRET_BYTES = 32


class ClusterSecret:
    """The secret of a cluster's gateways. `value` is set by `start`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = KvBucket(bus, subjects.SECRETS_BUCKET)
        self.value = b""

    async def start(self) -> None:
        """Reads the secret, or generates it. Raises NatsError, OSError or TimeoutError if the broker is lost meanwhile."""
        await self._agree()
        self._bus.on_reconnect(self._agree)

    async def _agree(self) -> None:
        """Stores this process's value unless one is stored, which is used then. A lost bucket gets the same value again."""
        await ensure_bucket(self._bus, Bucket(subjects.SECRETS_BUCKET, StorageType.FILE, is_followed=False))
        found, own = b"", self.value or secrets.token_bytes(SECRET_BYTES)
        while not found:  # read first: a broker without room rejects a write even of what it has
            found, last = await self._bucket.entry(subjects.JOB_IDS_KEY)
            if not found and await self._bucket.swap(subjects.JOB_IDS_KEY, own, last):
                found = own
        self.value = found

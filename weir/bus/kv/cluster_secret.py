"""`ClusterSecret`: random bytes that all gateways of a cluster share and no other user may read.

The first gateway generates them and stores them on disk; all others read them, so that the secret is the same everywhere
and survives restarts. Only the gateways' user may read the bucket (`weir.bus.naming.permissions`).
"""

from __future__ import annotations

import asyncio
import secrets

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.headers import pack_headers
from weir.bus.nats.jetstream import EXPECTED_SEQUENCE
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.bus.streams.declarations import ensure_stream

SECRET_BYTES = 32
_TIMEOUT_S = 10.0


class ClusterSecret:
    """The secret of a cluster's gateways. `value` is set by `start`."""

    def __init__(self, bus: Bus, publisher: AckedPublisher) -> None:
        self._bus = bus
        self._publisher = publisher
        self.value = b""

    async def start(self) -> None:
        """Reads the secret, or generates it. Raises NatsError, OSError or TimeoutError if the broker is lost meanwhile."""
        await self._agree()
        self._bus.on_reconnect(self._agree)

    async def _agree(self) -> None:
        """Stores this process's value unless one is stored, which is used then. A lost bucket gets the same value again."""
        await ensure_stream(
            self._bus,
            StreamConfig(
                name=subjects.SECRETS_STREAM,
                subjects=[subjects.secret("*")],
                storage=StorageType.FILE,
                retention=RetentionPolicy.LIMITS,
                discard=DiscardPolicy.NEW,
                max_msgs_per_subject=1,
                allow_direct=True,
                num_replicas=self._bus.replicas,
            ),
        )
        subject = subjects.secret(subjects.JOB_IDS_KEY)
        found = await self._stored(subject)
        if not found:
            block = pack_headers({EXPECTED_SEQUENCE: "0"})
            own = self.value or secrets.token_bytes(SECRET_BYTES)
            async with asyncio.timeout(_TIMEOUT_S):
                ack = await self._publisher.store(subject, own, block)
            if ack.is_stored:
                self.value = own
                return
            found = await self._stored(subject)
        if len(found) < SECRET_BYTES:
            raise ConnectionError("the cluster's secret could neither be read nor be stored")
        self.value = found

    async def _stored(self, subject: str) -> bytes:
        """The stored secret, b"" for none. Read from the stream's leader: replicas may be behind."""
        message = await self._bus.jetstream.stored(subjects.SECRETS_STREAM, subject=subject)
        return b"" if message is None else message.data

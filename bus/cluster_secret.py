"""`ClusterSecret`: random bytes that all gateways of a cluster share and no other user may read.

The first gateway draws them and stores them on disk, once; all others read what is stored, so that the secret is the same
everywhere and survives restarts. Only the gateways' user may read the bucket (`bus.permissions`).
"""

from __future__ import annotations

import asyncio
import base64
import secrets

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from bus import durable_subjects as subjects
from bus.acked_publisher import AckedPublisher
from bus.connection import Bus
from bus.headers import pack_headers
from bus.streams import ensure_stream

SECRET_BYTES = 32
_PATIENCE_S = 10.0


class ClusterSecret:
    """The secret of a cluster's gateways; the first one draws and stores it. `value` is set by `start`."""

    def __init__(self, bus: Bus, publisher: AckedPublisher) -> None:
        self._bus = bus
        self._publisher = publisher
        self.value = b""

    async def start(self) -> None:
        """Reads the secret, or makes it. Raises NatsError, OSError or TimeoutError where the broker goes away."""
        await self._agree()
        self._bus.on_reconnect(self._agree)

    async def _agree(self) -> None:
        """Stores our value unless one is stored; takes the stored one. A bucket that was lost gets the same value again."""
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
            block = pack_headers({"Nats-Expected-Last-Subject-Sequence": "0"})
            mine = self.value or secrets.token_bytes(SECRET_BYTES)
            async with asyncio.timeout(_PATIENCE_S):
                ack = await self._publisher.store(subject, mine, block)
            if ack.is_stored:
                self.value = mine
                return
            found = await self._stored(subject)
        if len(found) < SECRET_BYTES:
            raise ConnectionError("the cluster's secret could neither be read nor be stored")
        self.value = found

    async def _stored(self, subject: str) -> bytes:
        """What is stored, b"" for nothing. The stream's leader is asked: others may lag behind it."""
        answer = await self._bus.ask(f"$JS.API.STREAM.MSG.GET.{subjects.SECRETS_STREAM}", {"last_by_subj": subject})
        message = answer.get("message")
        return base64.b64decode(message.get("data") or b"") if isinstance(message, dict) else b""

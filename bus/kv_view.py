"""`KvView`: follows a key-value bucket, so that what a role knows of it is what lies in it.

A write of a NATS key-value bucket is a publish on `$KV.<bucket>.<key>`; a removal is one without content. The view listens
to those subjects, and reads the bucket when it starts and whenever the broker has come back: then it may have missed
some. A removed key leaves a marker in the bucket, by which a missed removal is found. A key without a value and without a
marker says nothing: the bucket lay in memory and was lost with the broker, and the owner of the key writes it again.
Source: NATS ADR-8 (key-value buckets: `KV-Operation: DEL`, `PURGE`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nats.js.errors import NotFoundError
from nats.js.kv import KV_DEL, KV_PURGE

from bus.connection import Bus, Message
from runtime.containment import contained

READ_PATIENCE_S = 10.0
"""How long reading a bucket may take before it fails with TimeoutError, and the caller tries again."""


class KvView:
    """Follows one key-value bucket. `on_value(key, data)` and `on_removal(key)` are called in the event loop.

    They may be called again for what is known already. One that raises costs the other keys nothing.
    """

    def __init__(
        self, bus: Bus, bucket: str, on_value: Callable[[str, bytes], None], on_removal: Callable[[str], None]
    ) -> None:
        self._bus = bus
        self._bucket = bucket
        self._start = f"$KV.{bucket}."
        self._on_value = on_value
        self._on_removal = on_removal
        self._reads: list[set[str]] = []  # the keys that were written since each of the running reads began

    async def listen(self) -> None:
        """Hears of writes from now on."""
        await self._bus.subscribe(f"{self._start}>", self._on_write)

    async def read(self) -> set[str]:
        """Reads the bucket; returns the keys that have a value or a marker of their removal. Empty without a bucket.

        Raises NatsError, OSError or TimeoutError while the broker is away.
        """
        written: set[str] = set()
        self._reads.append(written)
        try:
            async with asyncio.timeout(READ_PATIENCE_S):
                entries = await self._entries()
        finally:
            # By identity: another read may have seen the same keys.
            self._reads = [read for read in self._reads if read is not written]
        for key, data in entries.items():
            if key not in written:  # else the entry may be older than the write
                self._take(key, data)
        return set(entries)

    async def _entries(self) -> dict[str, bytes]:
        """The content by key, b"" for one that was removed."""
        found: dict[str, bytes] = {}
        try:
            bucket = await self._bus.jetstream.key_value(self._bucket)
            watcher = await bucket.watchall()
        except NotFoundError:
            return found
        try:
            async for entry in watcher:
                if entry is None:
                    break
                found[entry.key] = b"" if entry.operation in (KV_DEL, KV_PURGE) else entry.value or b""
        finally:
            await watcher.stop()
        return found

    def _on_write(self, message: Message) -> None:
        key = message.subject.removeprefix(self._start)
        for written in self._reads:
            written.add(key)
        self._take(key, message.data)

    @contained()
    def _take(self, key: str, data: bytes) -> None:
        if data:
            self._on_value(key, data)
        else:
            self._on_removal(key)

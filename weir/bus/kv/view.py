"""`KvBucket`: reads and writes a key-value bucket of NATS. `KvView`: follows one, so that a role knows its content.

A write is a message on `$KV.<bucket>.<key>`; a removal is one without data, which stays as a marker. The bucket may reject
a conditional write (`KvBucket.swap`), and stores concurrent ones in an order of its own. So nats-server publishes what the
bucket has stored, in that order and before it responds to the writer, and a view subscribes to that. It reads the bucket
when it starts and after each reconnection, because it may have missed writes.
Source: NATS ADR-8 (key-value buckets: `KV-Operation: DEL`, `PURGE`; conditional writes by sequence), ADR-28 (`republish`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from nats.js.errors import APIError, BucketNotFoundError, NotFoundError
from nats.js.kv import KV_DEL, KV_OP

from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.headers import last_header
from weir.bus.nats.jetstream import EXPECTED_SEQUENCE, WRONG_LAST_SEQUENCE
from weir.runtime.containment import contained

READ_TIMEOUT_S = 10.0
"""How long reading a bucket may take before it fails with TimeoutError, and the caller tries again."""


class KvBucket:
    """One bucket. All methods raise NatsError, OSError or TimeoutError while the broker is away.

    Writes raise NotFoundError, a NatsError, where there is no such bucket; reads find it empty.
    """

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self.stream = f"KV_{name}"
        self.start = f"$KV.{name}."

    async def put(self, key: str, data: bytes) -> None:
        """Writes a value, whatever the bucket has."""
        await self._publish(key, data)

    async def entry(self, key: str) -> tuple[bytes, int]:
        """The value of a key, b"" for none, and its sequence, 0 for a key that was never written.

        The stream's leader responds: a replica may be behind. Raises NotFoundError where there is no such bucket.
        """
        message = await self._bus.jetstream.stored(self.stream, subject=self.start + key)
        return (b"", 0) if message is None else (message.data, message.sequence)

    async def swap(self, key: str, data: bytes, last: int, timeout_s: float | None = None) -> int:
        """Replaces the entry of sequence `last` by `data` (b"": removes it).

        Returns the sequence of the new entry, 0 if the key has another entry than `last` by now.
        """
        headers = {EXPECTED_SEQUENCE: str(last)} | ({} if data else {KV_OP: KV_DEL})
        try:
            ack = await self._bus.jetstream.publish(self.start + key, data, timeout=timeout_s, headers=headers)
        except APIError as error:
            if error.err_code not in WRONG_LAST_SEQUENCE:
                raise
            return 0
        return ack.seq

    async def create(self, key: str, data: bytes) -> bool:
        """Writes a value unless the key has one; returns whether it did not."""
        last = 0
        while not await self.swap(key, data, last):
            found, last = await self.entry(key)
            if found:
                return False
        return True

    async def delete(self, key: str) -> None:
        """Removes a value, which leaves a marker."""
        await self._publish(key, b"", {KV_OP: KV_DEL})

    async def _publish(self, key: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        # Some views subscribe to the subject, so a bucket that is missing would only show by a response that never comes.
        if await self._bus.jetstream.find_stream(self.stream) is None:
            raise BucketNotFoundError
        await self._bus.jetstream.publish(self.start + key, data, headers=headers)

    async def values(self, keys: str = ">") -> dict[str, bytes]:
        """The values of keys that match, b"" for a removed key."""
        try:
            messages = self._bus.jetstream.scan(self.stream, self.start + keys)
            return {message.subject.removeprefix(self.start): message.data async for message in messages}
        except NotFoundError:
            return {}

    async def keys(self) -> list[str]:
        """The keys that have a value."""
        try:
            messages = self._bus.jetstream.scan(self.stream, f"{self.start}>", headers_only=True)
            return [m.subject.removeprefix(self.start) async for m in messages if KV_OP.lower() not in m.headers]
        except NotFoundError:
            return []


class KvView:
    """Follows the keys of a bucket that match `keys`. `on_value(key, data)` and `on_removal(key)` run in the event loop.

    They may be called again with what was reported before. An exception in one affects no other key.
    """

    def __init__(
        self,
        bus: Bus,
        bucket: str,
        on_value: Callable[[str, bytes], None],
        on_removal: Callable[[str], None],
        keys: str = ">",
    ) -> None:
        self._bus = bus
        self.bucket = KvBucket(bus, bucket)
        self._followed = subjects.stored_entry(bucket, "")
        self._filter = keys
        self._on_value = on_value
        self._on_removal = on_removal
        self._keys: set[str] = set()  # that have a value in the bucket
        self._stream: tuple[object, int] = (
            None,
            0,
        )  # when the bucket was created, and its last sequence at the last read
        self._reads: list[set[str]] = []  # the keys that were written since each of the running reads began
        self._received = 0  # the sequence of the last write that arrived
        self._is_subscribed = False

    async def start(self, as_sent: bool = False) -> None:
        """Subscribes to what is stored, then reads the bucket. May be called again after it failed.

        With `as_sent` the view receives writes as their writers send them, in order with all else that they send: for
        buckets where each key has one writer, whose writes are never conditional.
        """
        if not self._is_subscribed:
            self._followed = self.bucket.start if as_sent else self._followed
            await self._bus.subscribe(self._followed + self._filter, self._on_write)
            self._is_subscribed = True
        await self._bus.flush()
        await self.read()

    async def read(self, values: Callable[[], Mapping[str, bytes]] = dict) -> None:
        """Reads the bucket. Reports keys as removed that it no longer has, unless it is another bucket than before.

        A bucket in memory is lost with the broker and is created again without its content. Then `values()` are written
        to it where it has none, for the roles that owned them may be gone. Raises NatsError, OSError or TimeoutError, also
        where there are values for a bucket that does not exist yet.
        """
        written: set[str] = set()
        self._reads.append(written)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                info = await self._bus.jetstream.find_stream(self.bucket.stream)
                entries = {} if info is None else await self.bucket.values(self._filter)
        finally:
            # By identity: another read may have seen the same keys.
            self._reads = [read for read in self._reads if read is not written]
        for key, data in entries.items():
            if key not in written:  # else the entry may be older than the write
                self._take(key, data)
        if info is None:
            if values():
                raise BucketNotFoundError  # another role is about to create it
            return
        created, last_sequence = self._stream
        found = info["created"], int(info["state"]["last_seq"])
        if found[0] == created and found[1] >= last_sequence:
            for key in self._keys - entries.keys() - written:
                self._take(key, b"")
        else:
            # Keys of the bucket before are not in this one until their owners write them again.
            self._keys &= entries.keys() | written
            for key, data in values().items():
                if key not in entries and key not in written:
                    await self.bucket.create(key, data)
        self._stream = found  # not before: what failed is done again by the next read

    async def refresh(self, key: str) -> None:
        """Reads one key, of which a write may be on its way here."""
        written: set[str] = set()
        self._reads.append(written)
        try:
            data, _ = await self.bucket.entry(key)
        finally:
            self._reads = [read for read in self._reads if read is not written]
        if key not in written:
            self._take(key, data)

    async def swap(self, key: str, data: bytes, last: int) -> bool:
        """As `KvBucket.swap`; once it returns True this view has the new entry, or a later one."""
        sequence = await self.bucket.swap(key, data, last)
        if sequence > self._received:
            self._receive(key, data)
        return sequence > 0

    def _on_write(self, message: Message) -> None:
        self._received = int(last_header(message.header_block, b"Nats-Sequence") or 0)
        self._receive(message.subject.removeprefix(self._followed), message.data)

    def _receive(self, key: str, data: bytes) -> None:
        for written in self._reads:
            written.add(key)
        self._take(key, data)

    @contained()
    def _take(self, key: str, data: bytes) -> None:
        if data:
            self._keys.add(key)
            self._on_value(key, data)
        else:
            self._keys.discard(key)
            self._on_removal(key)

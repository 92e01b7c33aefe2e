"""`TypedBucket`: the records of a bucket by name, which every process sees in the same order and changes one at a time.

A change reads the record, decides, and writes the result if nobody has written the record meanwhile; otherwise it is made
again from the newer record. So of two concurrent changes none is lost, and a decision never rests on an outdated record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from weir.bus.kv.view import KvView
from weir.bus.naming import subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.streams.declarations import Bucket, ensure_bucket
from weir.runtime.containment import call_each
from weir.schemas.core.errors import unavailable

logger = logging.getLogger("weir.bus")

MAX_RECORDS = 10_000
"""Records of one bucket that a process holds; those of more names are dropped."""

T = TypeVar("T")


class TypedBucket(Generic[T]):
    """One role's view of a bucket. Listeners run in the event loop after a change, with the name of the record.

    `pack` and `unpack` convert records. One for which `unpack` raises ValueError, or whose `name_of` is not that of its
    key, is dropped and counted in `malformed`. All methods that wait raise NatsError, OSError or TimeoutError while the
    broker is away.
    """

    def __init__(
        self,
        bus: Bus,
        bucket: Bucket,
        pack: Callable[[T], bytes],
        unpack: Callable[[bytes], T],
        name_of: Callable[[T], str] | None = None,
    ) -> None:
        self._bus = bus
        self._bucket = bucket
        self._pack = pack
        self._unpack = unpack
        self._name_of = name_of
        self._view = KvView(bus, bucket.name, self._take, self._remove)
        self._records: dict[str, T] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._is_maker = False
        self._is_started = False
        self.malformed = 0

    def get(self, name: str) -> T | None:
        """The record of this name, None for none."""
        return self._records.get(name)

    def all(self) -> list[T]:
        """Every record."""
        return list(self._records.values())

    def names(self) -> set[str]:
        """The names of all records."""
        return set(self._records)

    def on_change(self, listener: Callable[[str], None]) -> None:
        """`listener(name)` after the record of this name was written or removed."""
        self._listeners.append(listener)

    async def start(self, is_maker: bool = True) -> None:
        """Reads all records, and follows changes from now on. May be called again after it failed.

        A maker creates the bucket unless it exists. If the broker has lost it, the first maker to reconnect writes the
        records again.
        """
        self._is_maker = is_maker
        await self._ensure()
        await self._view.start()
        if not self._is_started:
            self._is_started = True
            self._bus.on_reconnect(self._recover)

    async def update(self, name: str, change: Callable[[T | None], T | None]) -> T | None:
        """Replaces the record of this name by what `change(record)` returns, None for none; returns that.

        `change` is called again if another process writes the record meanwhile. Nothing is written if it returns the record
        as it is, or raises.
        """
        key = self._key(name)
        while True:
            data, sequence = await self._view.bucket.entry(key)
            known = self._read(key, data)
            record = change(known)
            if record == known or await self._view.swap(key, b"" if record is None else self._pack(record), sequence):
                return record

    async def _recover(self) -> None:
        await self._ensure()
        await self._view.read(self._packed if self._is_maker else dict)

    async def _ensure(self) -> None:
        if self._is_maker:
            await ensure_bucket(self._bus, self._bucket)

    def _packed(self) -> dict[str, bytes]:
        return {self._key(name): self._pack(record) for name, record in self._records.items()}

    def _key(self, name: str) -> str:
        return subjects.token(name)

    def _name(self, key: str) -> str:
        return subjects.untoken(key)

    def _read(self, key: str, data: bytes) -> T | None:
        if not data:
            return None
        try:
            record = self._unpack(data)
            if self._name_of is not None and self._key(self._name_of(record)) != key:
                raise ValueError(f"it names '{self._name_of(record)}'")
            return record
        except ValueError as error:
            self.malformed += 1
            logger.warning("bucket %s: dropped the record of key %r: %s", self._bucket.name, key, error)
            return None

    def _take(self, key: str, data: bytes) -> None:
        record, name = self._read(key, data), self._name(key)
        known = self._records.get(name)
        if record is None or record == known:
            return
        if known is None and len(self._records) >= MAX_RECORDS:
            logger.warning("bucket %s: dropped a record, it holds %d", self._bucket.name, MAX_RECORDS)
            return
        self._records[name] = record
        self._notify(name)

    def _remove(self, key: str) -> None:
        if self._records.pop(self._name(key), None) is not None:
            self._notify(self._name(key))

    def _notify(self, name: str) -> None:
        call_each(f"bucket {self._bucket.name}: a listener", self._listeners, name)


@contextmanager
def without_broker_errors(what: str) -> Iterator[None]:
    """Raises WeirError (UNAVAILABLE) for errors of the broker while `what` is changed."""
    try:
        yield
    except BROKER_ERRORS as error:
        logger.warning("%s could not be changed: %s: %s", what, type(error).__name__, error)
        raise unavailable("the message broker is not available") from error

"""`ItemReader`: the items of a job's input, read ahead in a thread, a chunk at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor
from itertools import islice

from gateway.jobs.files.items import JobInput, JobItem
from schemas.errors import WeirError

CHUNK_ITEMS = 128
CHUNK_BYTES = 4 << 20
"""What is read at once: a chunk ends with the item that goes beyond it."""


class ItemReader:
    """See the module. One chunk is read ahead of the one that was taken."""

    def __init__(
        self, source: JobInput, threads: Executor, numbers: Iterator[int] | None = None, start: int = 0
    ) -> None:
        """Reads all items from `start` on, or those of these `numbers` alone."""
        self._items = source.items(start) if numbers is None else _picked(source, numbers)
        self._threads = threads
        self._ahead: asyncio.Future[list[JobItem]] | None = None

    def begin(self) -> asyncio.Future[list[JobItem]]:
        """The chunk that is read ahead; the same one until it is taken."""
        if self._ahead is None:
            self._ahead = asyncio.get_running_loop().run_in_executor(self._threads, _chunk, self._items)
        return self._ahead

    def take(self) -> list[JobItem]:
        """That chunk, which must have come; empty at the end. Raises WeirError or OSError where reading failed."""
        assert self._ahead is not None  # noqa: S101 - it was begun
        chunk, self._ahead = self._ahead.result(), None
        return chunk


def size_of(item: JobItem) -> int:
    """Bytes of its tensors."""
    return 0 if isinstance(item.inputs, WeirError) else sum(tensor.size_bytes for tensor in item.inputs)


def _chunk(items: Iterator[JobItem]) -> list[JobItem]:
    chunk: list[JobItem] = []
    size_bytes = 0
    for item in items:
        chunk.append(item)
        size_bytes += size_of(item)
        if size_bytes >= CHUNK_BYTES or len(chunk) >= CHUNK_ITEMS:
            break
    return chunk


def _picked(source: JobInput, numbers: Iterator[int]) -> Iterator[JobItem]:
    """The items of these numbers, which ascend; those that follow each other are read at one go."""
    items: Iterator[JobItem] = iter(())
    following = -1
    for number in numbers:
        if number != following:
            items = source.items(number)
        yield from islice(items, 1)
        following = number + 1

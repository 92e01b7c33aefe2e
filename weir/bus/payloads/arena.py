"""`PayloadArena`: large payloads by reference, in slots of POSIX shared memory.

A slot is written once by its owner and read in place. A broker copies a message several times; a 600 KB tensor costs 3 to
4 ms of CPU through it and 0.3 ms through shared memory. So a payload larger than `INLINE_LIMIT_BYTES` is in a slot, and the
message carries a `PayloadRef`.

- A slot belongs to one owner process, which alone writes and allocates it; readers map it read-only.
- Each slot has a generation, raised whenever it is freed. A reference names the generation it was made for, so a reader
  that comes too late gets `StalePayload`, never the bytes of another request.
- Nothing leaks: the owner holds a lock on its segments, which ends with the process however it dies; the next role that
  starts removes segments that are not locked. Memory is reserved before it is touched, so with a full `/dev/shm` an
  allocation fails, and no process gets SIGBUS.
- `PayloadBudget` bounds the shared memory of all arenas of a process, free slots included.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

from weir.bus.naming.identity import SEGMENT_PREFIX, SHARED_MEMORY_DIRECTORY, lies_elsewhere
from weir.runtime.limits.budgets import memory_for_requests_bytes
from weir.schemas.core.tensors import PayloadRef

INLINE_LIMIT_BYTES = 16 * 1024
"""Tensors up to this size are sent in messages; larger ones are read in place, or fetched. Measured at 8 and 64 in flight:
16 KB cost as much in a slot as in a message, 24 KB 0.8 times as much, 64 KB half."""

REMOTE_INLINE_LIMIT_BYTES = 128 * 1024
"""The same between two hosts. Measured: a tensor of 64 KiB costs a quarter less CPU in a message than fetched, one of 200
KB as much, one of 4 MB a third more; and fetching relieves the stream and the scheduler. On connections between
processes one of 64 KiB costs a tenth more fetched than in a message, one of 130 KB a tenth less under load and as much
without: so the limit
is the same for both transports."""

RECLAIM_AFTER_S = 10.0
"""The memory of a slot that has been free for this time may be used for slots of another size. Until then a reader that
checked the generation before may still be reading, and its read would allocate the memory again."""

ALIGNMENT_BYTES = 64
_NAME = re.compile(r"weir-[A-Za-z0-9_-]+\.[0-9]+")
_GENERATION = struct.Struct("<Q")
_HEADER_BYTES = ALIGNMENT_BYTES
_SMALLEST_CLASS_BYTES = 32 * 1024
_PAGE_BYTES = mmap.PAGESIZE


class StalePayload(Exception):
    """The slot of the reference was removed or given to another payload."""


class Slot:
    """One allocated payload: `view` is its writable content, `ref` a reference to part of it."""

    __slots__ = ("_segment", "generation", "index", "leased_until", "offset", "size", "view")

    def __init__(self, segment: _Segment, index: int, size: int) -> None:
        self._segment = segment
        self.index = index
        self.size = size
        self.offset = index * segment.stride
        self.generation = segment.generation(index)
        start = self.offset + _HEADER_BYTES
        self.view = segment.memory[start : start + size]
        self.leased_until = float("inf")

    def ref(self, offset: int = 0, size: int | None = None) -> PayloadRef:
        """A reference to `size` bytes from `offset` of this payload (all of it by default)."""
        return PayloadRef(
            self._segment.name,
            self.offset,
            self.generation,
            self.offset + _HEADER_BYTES + offset,
            self.size - offset if size is None else size,
        )

    def free(self) -> None:
        """Frees the slot; every reference to it is stale from now on."""
        self._segment.free(self)


class _Segment:
    """One sparse file of equal slots; pages exist only from the first use of a slot on."""

    def __init__(self, name: str, slot_bytes: int, slots: int, budget: PayloadBudget) -> None:
        self.name = name
        self._budget = budget
        self._held_bytes = 0
        self.slot_bytes = slot_bytes
        self.stride = _stride(slot_bytes)
        self.slots = slots
        self._free: deque[tuple[int, float]] = deque()  # with the time it was freed, in that order
        self._emptied: list[int] = []  # free slots without memory, except the page of the generation
        self._used = 0  # slots that were ever allocated: the others have no memory yet
        self._path = SHARED_MEMORY_DIRECTORY / name
        # The file gets its name after it is locked: otherwise another process could remove it as that of a dead one.
        unnamed = SHARED_MEMORY_DIRECTORY / f".{name}"
        self._fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.ftruncate(self._fd, self.stride * slots)
        os.rename(unnamed, self._path)
        self._map = mmap.mmap(self._fd, self.stride * slots)
        self.memory = memoryview(self._map)

    def allocate(self, size: int) -> Slot | None:
        if self._free:
            return Slot(self, self._free.pop()[0], size)
        if self.is_full:
            return None
        is_new = not self._emptied
        index = self._used if is_new else self._emptied[-1]
        needed = self.stride if is_new else self.stride - _PAGE_BYTES
        if not self._budget.acquire(needed):
            return None
        try:
            os.posix_fallocate(self._fd, index * self.stride, self.stride)
        except OSError:  # /dev/shm is full
            self._budget.release(needed)
            return None
        self._held_bytes += needed
        if is_new:
            self._used += 1
        else:
            self._emptied.pop()
        return Slot(self, index, size)

    @property
    def is_full(self) -> bool:
        return self._used == self.slots and not self._emptied and not self._free

    @property
    def in_use(self) -> int:
        return self._used - len(self._free) - len(self._emptied)

    def reclaim(self, needed: int, before_s: float) -> int:
        """Releases the memory of slots that are free since `before_s`; returns its size, at most `needed` and one slot."""
        reclaimed, each = 0, self.stride - _PAGE_BYTES
        while reclaimed < needed and self._free and self._free[0][1] <= before_s:
            index, _ = self._free.popleft()
            self._map.madvise(mmap.MADV_REMOVE, index * self.stride + _PAGE_BYTES, each)
            self._emptied.append(index)
            reclaimed += each
        self._held_bytes -= reclaimed
        self._budget.release(reclaimed)
        return reclaimed

    def generation(self, index: int) -> int:
        return int(_GENERATION.unpack_from(self.memory, index * self.stride)[0])

    def free(self, slot: Slot) -> None:
        if self.generation(slot.index) != slot.generation:
            return  # already freed
        _GENERATION.pack_into(self.memory, slot.offset, slot.generation + 1)
        self._free.append((slot.index, time.monotonic()))

    def close(self) -> None:
        self._budget.release(self._held_bytes)
        self._held_bytes = 0
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def _slot_class(size: int) -> int:
    """The size of the slots that hold `size` bytes."""
    return max(_SMALLEST_CLASS_BYTES, 1 << (size - 1).bit_length())


def _stride(slot_bytes: int) -> int:
    """The memory of a slot with its header, in whole pages."""
    return -(-(slot_bytes + _HEADER_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


class PayloadArena:
    """The slots of one owner process. Not thread-safe: each thread that allocates has its own arena.

    `capacity_bytes` bounds the memory of slots of one size, and `budget`, by default that of the process, the memory of all
    arenas together. `name` is unique to the owner, as from `weir.bus.naming.identity.new_id`.
    """

    def __init__(self, name: str, capacity_bytes: int = 1 << 30, budget: PayloadBudget | None = None) -> None:
        self._name = name
        self._budget = process_budget() if budget is None else budget
        self._capacity_bytes = capacity_bytes
        self._segments: dict[int, _Segment] = {}

    @property
    def slots_in_use(self) -> int:
        """The number of allocated slots."""
        return sum(segment.in_use for segment in self._segments.values())

    def allocate(self, size: int) -> Slot | None:
        """A slot of at least `size` bytes, or None when the arena, the budget or `/dev/shm` is full."""
        slot_bytes = _slot_class(size)
        segment = self._segments.get(slot_bytes)
        if segment is None:
            slots = self._capacity_bytes // (slot_bytes + _PAGE_BYTES)
            if slots == 0 or not SHARED_MEMORY_DIRECTORY.is_dir():
                return None
            segment = _Segment(f"{SEGMENT_PREFIX}{self._name}.{slot_bytes}", slot_bytes, slots, self._budget)
            self._segments[slot_bytes] = segment
        slot = segment.allocate(size)
        if slot is None and not segment.is_full and self._reclaim(segment):
            slot = segment.allocate(size)
        return slot

    def could_hold(self, sizes: Collection[int]) -> bool:
        """Whether `allocate` would return slots of all these sizes if no others were in use."""
        strides = [_stride(_slot_class(size)) for size in sizes]
        try:
            status = os.statvfs(SHARED_MEMORY_DIRECTORY)
        except OSError:
            return False
        total_bytes = self._budget.total_bytes
        if status.f_blocks:  # none: a tmpfs without a limit of its own
            total_bytes = min(total_bytes, status.f_blocks * status.f_frsize)
        return sum(strides) <= total_bytes and max(strides, default=0) <= self._capacity_bytes

    def _reclaim(self, wanting: _Segment) -> bool:
        """Releases memory of free slots of other sizes, as much as a slot of this size needs."""
        before_s, needed = time.monotonic() - RECLAIM_AFTER_S, wanting.stride
        for segment in self._segments.values():
            if segment is not wanting and needed > 0:
                needed -= segment.reclaim(needed, before_s)
        return needed <= 0

    def close(self) -> None:
        """Removes the segments; references to them are stale from now on."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


class LeasedSlots:
    """Slots that readers release by a message, or whose lease expires.

    A reader that died releases nothing: `expire` frees slots that were leased for `lease_s` seconds.
    """

    def __init__(self, lease_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._slots: dict[tuple[str, int, int], Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def lend(self, slot: Slot) -> PayloadRef:
        """Leases `slot`; returns a reference to all of it."""
        ref = slot.ref()
        slot.leased_until = self._clock() + self._lease_s
        self._slots[ref.segment, ref.slot, ref.generation] = slot
        return ref

    def give_back(self, segment: str, slot: int, generation: int) -> None:
        """Frees a slot that its reader has released, unless its lease has expired."""
        lent = self._slots.pop((segment, slot, generation), None)
        if lent is not None:
            lent.free()

    def expire(self) -> None:
        """Frees the slots whose lease has expired."""
        now = self._clock()
        # Leases are all equally long, so the dictionary is in order of expiry.
        while self._slots:
            key, slot = next(iter(self._slots.items()))
            if slot.leased_until > now:
                return
            del self._slots[key]
            slot.free()


class PayloadReader:
    """Reads payloads of other processes on this host through cached read-only mappings.

    Those of other hosts can't be read; `weir.bus.payloads.fetcher` fetches them.
    """

    def __init__(self, max_mappings: int = 64) -> None:
        self._max_mappings = max_mappings
        self._mappings: dict[str, memoryview] = {}

    @property
    def segments(self) -> Collection[str]:
        """The names of the mapped segments."""
        return self._mappings.keys()

    def view(self, ref: PayloadRef) -> memoryview:
        """The bytes of `ref`, in place. Raises StalePayload, and ValueError for a malformed reference."""
        view = self.view_unchecked(ref)
        if not self.is_current(ref):
            raise StalePayload("the payload was freed before it was read")
        return view

    def view_unchecked(self, ref: PayloadRef) -> memoryview:
        """As `view`, without a check of the generation: the bytes may be those of another payload."""
        memory = self._mappings.get(ref.segment)
        if memory is None:
            memory = self._map(ref.segment)
        if not (
            0 <= ref.slot <= len(memory) - _HEADER_BYTES
            and ref.slot + _HEADER_BYTES <= ref.offset
            and ref.size >= 0
            and ref.offset + ref.size <= len(memory)
        ):
            raise ValueError("the reference does not lie inside its segment")
        return memory[ref.offset : ref.offset + ref.size]

    def is_current(self, ref: PayloadRef) -> bool:
        """Whether the slot still holds the payload of `ref`. If so after a copy, the copy is complete."""
        memory = self._mappings.get(ref.segment)
        return memory is not None and _GENERATION.unpack_from(memory, ref.slot)[0] == ref.generation

    def _map(self, segment: str) -> memoryview:
        if not isinstance(segment, str) or not _NAME.fullmatch(segment):
            raise ValueError("not the name of a payload segment")
        if lies_elsewhere(segment):
            raise StalePayload("the payload lies on another host")
        try:
            fd = os.open(SHARED_MEMORY_DIRECTORY / segment, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise StalePayload("the owner of the payload is gone") from error
        try:
            memory = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        # Mappings of dead processes would keep their memory and a descriptor each.
        for known in [known for known in self._mappings if not (SHARED_MEMORY_DIRECTORY / known).exists()]:
            del self._mappings[known]
        while len(self._mappings) >= self._max_mappings:
            # The oldest is dropped, not closed: views of it may still be in use, and keep it alive.
            del self._mappings[next(iter(self._mappings))]
        self._mappings[segment] = memory
        return memory


def remove_dead_segments(directory: Path = SHARED_MEMORY_DIRECTORY) -> int:
    """Removes the segments of dead processes; returns their number. Called by every role when it starts."""
    removed = 0
    for pattern in (f"{SEGMENT_PREFIX}*.*", f".{SEGMENT_PREFIX}*.*"):
        for path in directory.glob(pattern):
            try:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A hidden file is not locked by its creator yet, unless it is older.
                if not path.name.startswith(".") or time.time() - os.fstat(fd).st_mtime > 60:
                    path.unlink(missing_ok=True)
                    removed += 1
            except OSError:
                pass  # locked by its owner, which is alive
            finally:
                os.close(fd)
    return removed


DEFAULT_BUDGET_BYTES = 4 << 30
"""The most that a process may hold by default. Less if half of the free space of `/dev/shm`, or a quarter of the memory for
requests in the container or machine, is less: the kernel counts shared memory as the container's too."""

MIN_BUDGET_BYTES = 64 << 20
"""The least default budget, however small `/dev/shm` is."""


class PayloadBudget:
    """The shared memory that the arenas of a process may hold together. Thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """The bytes held now."""
        return self._held_bytes

    def acquire(self, size: int) -> bool:
        """Reserves `size` bytes; returns whether the budget allows it."""
        with self._lock:
            if self._held_bytes + size > self.total_bytes:
                return False
            self._held_bytes += size
            return True

    def release(self, size: int) -> None:
        """Releases `size` bytes."""
        with self._lock:
            self._held_bytes -= size


@cache
def process_budget() -> PayloadBudget:
    """The budget of this process."""
    try:
        status = os.statvfs(SHARED_MEMORY_DIRECTORY)
        free_bytes = status.f_bavail * status.f_frsize
    except OSError:
        free_bytes = 0
    return PayloadBudget(default_budget_bytes(free_bytes, memory_for_requests_bytes()))


def default_budget_bytes(free_bytes: int, memory_bytes: int) -> int:
    """The default budget of a process, with this much free space in `/dev/shm` and this much memory for requests."""
    share_bytes = min(free_bytes // 2, memory_bytes // 4)
    return min(DEFAULT_BUDGET_BYTES, max(share_bytes, MIN_BUDGET_BYTES))


def limit_payloads(total_bytes: int) -> None:
    """Sets the budget of this process by an option; 0 keeps the default."""
    if total_bytes:
        process_budget().total_bytes = total_bytes

"""`SharedMemoryRegions`: the shared-memory regions that clients registered, the same for both doors.

A registration says that a region exists; the bytes are read and written by workers alone. Registrations lie in a bucket
of the bus, by host: they outlive a gateway, whose successor keeps its port, and all gateways of a host know them.

Texts and codes are Triton's. Where its releases differ, a region that is in use may be unregistered, and leaves when the
requests that use it are over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NoKeysError, NotFoundError
from nats.js.kv import KV_DEL, KV_OP

from bus import subjects
from bus.client_regions import file_name, object_facts, reserved_prefix
from bus.connection import Bus, Message
from bus.identity import host, shares_memory
from bus.registry import RegistryView
from bus.streams import ensure_regions_bucket
from gateway.cuda_questions import CudaQuestions
from schemas.errors import ErrorCode, Reason, WeirError, internal, invalid, not_found, overloaded, unavailable
from schemas.regions import (
    CUDA,
    CUDA_HANDLE_BYTES,
    SYSTEM,
    CudaOpening,
    Region,
    pack_region,
    unknown_region,
    unpack_region,
)
from schemas.tensors import ClientRef
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.gateway")

MAX_REGIONS = 4096
"""Regions of one host that may be registered at a time."""

MAX_NAME_BYTES = 1024

_BROKER_ERRORS = (NatsError, OSError, TimeoutError)


class RegionHold:
    """The use of some regions by one request, until that is over."""

    __slots__ = ("_names", "_regions")

    def __init__(self, regions: SharedMemoryRegions, names: Sequence[str]) -> None:
        self._regions = regions
        self._names = names

    def free(self) -> None:
        """The request is over."""
        names, self._names = self._names, ()
        self._regions.release(names)


class SharedMemoryRegions:
    """See the module. Unless `allowed`, there are none and none can be registered."""

    def __init__(self, bus: Bus, gateway_id: str, registry: RegistryView, allowed: bool) -> None:
        self._bus = bus
        self._registry = registry
        self._allowed = allowed
        self._cuda = CudaQuestions(bus, gateway_id)
        self._regions: dict[str, Region] = {}
        self._uses: Counter[str] = Counter()
        self._leaving: set[str] = set()  # unregistered while in use
        self._background: asyncio.TaskGroup | None = None
        self._stream: tuple[object, int] = None, 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Learns what is registered, and follows it."""
        if not self._allowed:
            return
        self._background = background
        await ensure_regions_bucket(self._bus)
        await self._cuda.start()
        await self._bus.subscribe(subjects.region_writes(host()), self._on_write)
        await self._bus.flush()
        self._stream = await self._stream_state()
        await self._read_all()
        self._bus.on_reconnect(self._restore)

    # What clients ask

    def status(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        """One row for each region of a kind, or for the one called `name`. Raises WeirError (NOT_FOUND)."""
        if not name:
            return [_row(region) for region in self._regions.values() if region.kind == kind]
        region = self._regions.get(name)
        if region is None:
            raise not_found(f"Unable to find {kind} shared memory region: '{name}'")
        if region.kind != kind:
            shown = {SYSTEM: "system", CUDA: "CUDA"}
            raise not_found(
                f"The region named '{name}' is registered as {shown[region.kind]} shared memory, "
                f"not {shown[kind]} shared memory"
            )
        return [_row(region)]

    async def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Registers part of a POSIX shared-memory object. Raises WeirError."""
        self.check_allowed()
        prefix = reserved_prefix(key)
        if prefix:
            raise invalid(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved prefix "
                f"'{prefix}'"
            )
        object_name = file_name(key)
        if object_name is None:
            raise invalid(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
        self._check_name(name)
        failed = f"failed to register shared memory region '{name}'"
        try:
            facts = object_facts(object_name)
        except OSError as error:
            raise internal(f"Unable to open shared memory region: '{key}'") from error
        if offset + byte_size > facts.size:
            raise invalid(f"{failed}: invalid args")
        if byte_size == 0:
            # What Triton says of it, having asked the system to map nothing.
            raise invalid(f"{failed}: unable to process address spaceInvalid argument")
        await self._register(Region(SYSTEM, name, byte_size, key, offset, object_name, facts.inode))

    async def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Registers GPU memory, once a worker of this host has opened it. Raises WeirError."""
        self.check_allowed()
        self._check_name(name)
        if len(handle) != CUDA_HANDLE_BYTES:
            raise invalid("failed to register shared memory region: invalid args")
        workers = {
            worker for worker, view in self._registry.workers.items() if view.record.gpus and shares_memory(worker)
        }
        if not workers:
            raise invalid(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")
        await self._cuda.open(CudaOpening(handle, device_id, byte_size), workers)
        await self._register(Region(CUDA, name, byte_size, device_id=device_id, handle=handle))

    async def unregister(self, kind: str, name: str = "") -> None:
        """Unregisters a region, or all of a kind; what is unknown or of the other kind stays as it is."""
        self.check_allowed()
        for region in [r for r in self._regions.values() if r.kind == kind and name in ("", r.name)]:
            if self._uses[region.name]:
                self._leaving.add(region.name)
                continue
            try:
                await self._remove(region)
            except _BROKER_ERRORS as error:
                raise _broker_away() from error

    def check_allowed(self) -> None:
        """Raises WeirError (UNSUPPORTED) unless clients may share memory."""
        if not self._allowed:
            raise WeirError(
                ErrorCode.UNSUPPORTED,
                "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
            )

    # What requests need

    def find(self, name: str, offset: int, byte_size: int) -> ClientRef:
        """A `schemas.regions.FindRegion`."""
        region = self._regions.get(name)
        if region is None:
            raise unknown_region(name)
        return region.place(offset, byte_size)

    def hold(self, model: str, names: Sequence[str]) -> RegionHold:
        """Keeps regions registered for a request to `model`. Raises WeirError (UNSUPPORTED) if its workers lack them."""
        if not self._registry.model_shares_memory(model):
            raise WeirError(
                ErrorCode.UNSUPPORTED,
                f"shared memory regions can't be used with model '{model}': it is not served on this host alone",
            )
        self._uses.update(names)
        return RegionHold(self, names)

    def release(self, names: Iterable[str]) -> None:
        """A request that held these regions is over; whoever was waiting for that leaves."""
        for name in names:
            self._uses[name] -= 1
            if self._uses[name] > 0:
                continue
            del self._uses[name]
            if name in self._leaving and self._background is not None:
                self._leaving.discard(name)
                region = self._regions.get(name)
                if region is not None:
                    self._background.create_task(self._leave(region))

    # The bucket

    def _check_name(self, name: str) -> None:
        if name in self._regions:
            raise _already_there(name)
        if len(name.encode(errors="replace")) > MAX_NAME_BYTES:
            raise invalid(f"the name of a shared memory region can't be longer than {MAX_NAME_BYTES} bytes")
        if len(self._regions) >= MAX_REGIONS:
            raise unavailable(f"there are {MAX_REGIONS} shared memory regions already")

    async def _register(self, region: Region) -> None:
        try:
            bucket = await self._bus.jetstream.key_value(subjects.REGIONS_BUCKET)
            await bucket.create(subjects.region_key(host(), region.name), pack_region(region))
            # What is written here comes back as everybody's writes do: then it is in order with theirs.
            await self._bus.flush()
        except KeyWrongLastSequenceError as error:
            raise _already_there(region.name) from error
        except _BROKER_ERRORS as error:
            raise _broker_away() from error
        self._regions.setdefault(region.name, region)

    async def _remove(self, region: Region) -> None:
        # A deletion of the bucket's own kind, and then of its mark, which would stay for each name ever used.
        subject = subjects.region_subject(host(), region.name)
        mark = await self._bus.jetstream.publish(subject, b"", headers={KV_OP: KV_DEL})
        await self._bus.jetstream.purge_stream(subjects.REGIONS_STREAM, seq=mark.seq + 1, subject=subject)
        await self._bus.flush()
        self._forget(region.name)
        if region.kind == CUDA:
            self._cuda.close(CudaOpening(region.handle, region.device_id, region.byte_size))

    async def _leave(self, region: Region) -> None:
        try:
            await self._remove(region)
        except _BROKER_ERRORS as error:
            logger.warning("shared memory region '%s' is still registered: %s", region.name, error)

    def _on_write(self, message: Message) -> None:
        token = message.subject.rpartition(".")[2]
        if message.data:
            self._apply(message.data)
        else:
            self._forget(_name_of(token))

    def _apply(self, data: bytes) -> None:
        try:
            region = unpack_region(data)
        except MalformedMessage as error:
            logger.warning("bucket %s: %s", subjects.REGIONS_BUCKET, error)
            return
        self._regions[region.name] = region

    def _forget(self, name: str) -> None:
        self._regions.pop(name, None)
        self._leaving.discard(name)

    async def _stream_state(self) -> tuple[object, int]:
        """When the bucket's stream was created, and the sequence of its last message: both tell a lost one from this."""
        info = await self._bus.jetstream.stream_info(subjects.REGIONS_STREAM)
        return info.created, info.state.last_seq

    async def _read_all(self) -> set[str]:
        """Applies what the bucket holds of this host; returns the names of its regions."""
        bucket = await self._bus.jetstream.key_value(subjects.REGIONS_BUCKET)
        try:
            keys = await bucket.keys()
        except (NoKeysError, NotFoundError):
            keys = []
        for key in keys:
            if key.startswith(f"{host()}."):
                try:
                    entry = await bucket.get(key)
                except KeyNotFoundError:
                    continue
                if entry.value:
                    self._apply(entry.value)
        return {_name_of(key.partition(".")[2]) for key in keys if key.startswith(f"{host()}.")}

    async def _restore(self) -> None:
        """The broker came back: what another gateway has unregistered meanwhile is forgotten.

        If the broker has lost its memory, what is known here is written again where it is missing.
        """
        await ensure_regions_bucket(self._bus)
        (created, last_sequence), known = self._stream, set(self._regions)
        found = await self._stream_state()
        if found[0] == created and found[1] >= last_sequence:
            for name in known - await self._read_all():
                self._forget(name)
            self._stream = found
            return
        bucket = await self._bus.jetstream.key_value(subjects.REGIONS_BUCKET)
        for region in list(self._regions.values()):
            try:
                await bucket.create(subjects.region_key(host(), region.name), pack_region(region))
            except KeyWrongLastSequenceError:
                continue
        await self._read_all()
        self._stream = found  # not before all is written: if that fails, it is tried again


def _name_of(token: str) -> str:
    return "" if token == "=" else subjects.untoken(token)  # noqa: S105 - a subject's token


def _row(region: Region) -> dict[str, Any]:
    if region.kind == CUDA:
        return {"name": region.name, "device_id": region.device_id, "byte_size": region.byte_size}
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}


def _already_there(name: str) -> WeirError:
    return WeirError(ErrorCode.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")


def _broker_away() -> WeirError:
    return overloaded("the message broker is not available", reason=Reason.BROKER_AWAY)

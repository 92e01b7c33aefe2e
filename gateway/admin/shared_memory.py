"""`SharedMemoryRegions`: the shared-memory regions that clients registered over HTTP or gRPC.

A registration states that a region exists; only workers read and write its bytes. Registrations are stored in a bucket of
the bus, by host: they outlive a gateway, whose successor takes over its port, and all gateways of a host share them.

The gateway itself never uses a GPU. `CudaIpcProbe` asks the workers of this host whether they can open GPU memory that a
client shares; they have opened it by the time the client gets its response.

Texts and codes are Triton's. Where Triton's releases differ, a region that is in use may be unregistered, and is removed
when the requests that use it are complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from nats.errors import Error as NatsError
from nats.js.kv import KV_DEL, KV_OP

from weir.access.gate import Gate
from weir.access.principal import Principal
from weir.bus.kv.registry import RegistryView
from weir.bus.kv.view import KvView
from weir.bus.naming import subjects
from weir.bus.naming.identity import host, shares_memory
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.replies import ReplyInbox
from weir.bus.payloads.client_regions import file_name, object_facts, reserved_prefix
from weir.bus.streams.declarations import ensure_regions_bucket
from weir.gateway.admin.peers import Synchronise, no_peers
from weir.schemas.core.errors import ErrorCode, Reason, WeirError, internal, invalid, not_found, overloaded, unavailable
from weir.schemas.core.tensors import ClientRef
from weir.schemas.kserve.regions import (
    CUDA,
    CUDA_HANDLE_BYTES,
    SYSTEM,
    CudaOpened,
    CudaOpening,
    Region,
    region_id,
    unknown_region,
)
from weir.schemas.wire.codec import MalformedMessage

logger = logging.getLogger("weir.gateway")


MAX_REGIONS = 4096
"""Regions of one host that may be registered at the same time."""

MAX_NAME_BYTES = 1024

_BROKER_ERRORS = (NatsError, OSError, TimeoutError)


class RegionHold:
    """Keeps some regions registered while one request uses them."""

    __slots__ = ("_names", "_regions")

    def __init__(self, regions: SharedMemoryRegions, names: Sequence[str]) -> None:
        self._regions = regions
        self._names = names

    def free(self) -> None:
        """Ends the use: the request is complete."""
        names, self._names = self._names, ()
        self._regions.release(names)


class RegionPermission(NamedTuple):
    """Whether clients may register regions (`--allow-client-shm`), and how the names of objects of system shared memory
    must begin for that: in one of these ways, or in any without one (`--client-shm-prefix`).
    """

    is_given: bool = False
    prefixes: tuple[str, ...] = ()

    def describe(self) -> str:
        """Which objects clients may name, for people; "" for none."""
        if not self.is_given:
            return ""
        if not self.prefixes:
            return "any object of shared memory that this user may read and write"
        return f"objects of shared memory that begin with {' or '.join(self.prefixes)}"

    def check_object(self, name: str, key: str, object_name: str) -> None:
        """Raises WeirError (INVALID_ARG) unless region `name` may be of this object, which the client called `key`."""
        if self.prefixes and not object_name.startswith(tuple(prefix.lstrip("/") for prefix in self.prefixes)):
            raise invalid(
                f"cannot register shared memory region '{name}' with key '{key}': this server allows only keys that begin "
                f"with {' or '.join(map(repr, self.prefixes))}"
            )


class RegionOwner(NamedTuple):
    """Whose regions a client registers, how many bytes they may have, and what raises the error for more."""

    owner: str = ""
    limit_bytes: int | None = None
    refuse: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, gate: Gate, principal: Principal) -> RegionOwner:
        """The owner of the requests of `principal`; "" without an access policy."""
        if not gate.is_on:
            return NO_OWNER
        limit_bytes = gate.limits_of(principal).shared_memory_bytes

        def refuse() -> None:
            raise gate.used_up(principal, "shared_memory", f"{limit_bytes} bytes of shared memory")

        return cls(principal.owner, limit_bytes, refuse)


NO_OWNER = RegionOwner()


class SharedMemoryRegions:
    """The registered regions of this host. `synchronise` waits for the other gateways."""

    def __init__(
        self,
        bus: Bus,
        gateway_id: str,
        registry: RegistryView,
        permission: RegionPermission,
        synchronise: Synchronise = no_peers,
    ) -> None:
        self._bus = bus
        self._registry = registry
        self.permission = permission
        self._synchronise = synchronise
        self._cuda = CudaIpcProbe(bus, gateway_id)
        self._regions: dict[str, Region] = {}
        self._uses: Counter[str] = Counter()
        self._unregistered: set[str] = set()  # unregistered while in use
        self._background: asyncio.TaskGroup | None = None
        self._view = KvView(bus, subjects.REGIONS_BUCKET, self._apply, self._on_removal, f"{host()}.*")

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Reads the registrations and watches them from now on."""
        if not self.permission.is_given:
            return
        self._background = background
        await ensure_regions_bucket(self._bus)
        await self._cuda.start()
        await self._view.start()
        self._bus.on_reconnect(self._restore)

    # Requests of clients

    def status(self, kind: str, name: str = "", owner: str = "") -> list[dict[str, Any]]:
        """One row for each region of `kind` and `owner`, or for the one called `name`. Raises WeirError (NOT_FOUND)."""
        if not name:
            return [_row(region) for region in self._regions.values() if region.kind == kind and region.owner == owner]
        region = self._get(owner, name)
        if region is None:
            raise not_found(f"Unable to find {kind} shared memory region: '{name}'")
        if region.kind != kind:
            shown = {SYSTEM: "system", CUDA: "CUDA"}
            raise not_found(
                f"The region named '{name}' is registered as {shown[region.kind]} shared memory, "
                f"not {shown[kind]} shared memory"
            )
        return [_row(region)]

    async def register_system(
        self, name: str, key: str, offset: int, byte_size: int, holder: RegionOwner = NO_OWNER
    ) -> None:
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
        self.permission.check_object(name, key, object_name)
        self._check_name(name, holder.owner)
        failed = f"failed to register shared memory region '{name}'"
        try:
            facts = object_facts(object_name)
        except OSError as error:
            raise internal(f"Unable to open shared memory region: '{key}'") from error
        if offset + byte_size > facts.size:
            raise invalid(f"{failed}: invalid args")
        if byte_size == 0:
            # Triton's text: it asks the system to map zero bytes.
            raise invalid(f"{failed}: unable to process address spaceInvalid argument")
        self._check_size(byte_size, holder)
        await self._register(Region(SYSTEM, name, byte_size, key, offset, object_name, facts.inode, owner=holder.owner))

    async def register_cuda(
        self, name: str, handle: bytes, device_id: int, byte_size: int, holder: RegionOwner = NO_OWNER
    ) -> None:
        """Registers GPU memory after a worker of this host has opened it. Raises WeirError."""
        self.check_allowed()
        self._check_name(name, holder.owner)
        self._check_size(byte_size, holder)
        if len(handle) != CUDA_HANDLE_BYTES:
            raise invalid("failed to register shared memory region: invalid args")
        workers = {
            worker for worker, view in self._registry.workers.items() if view.record.gpus and shares_memory(worker)
        }
        if not workers:
            raise invalid(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")
        await self._cuda.open(CudaOpening(handle, device_id, byte_size), workers)
        await self._register(Region(CUDA, name, byte_size, device_id=device_id, handle=handle, owner=holder.owner))

    async def unregister(self, kind: str, name: str = "", owner: str = "") -> None:
        """Unregisters region `name` of `owner`, or all of `kind`; an unknown one, or one of the other kind, is ignored."""
        self.check_allowed()
        own = [region for region in self._regions.values() if region.kind == kind and region.owner == owner]
        for region in own:
            if name not in ("", region.name):
                continue
            if self._uses[region.id]:
                self._unregistered.add(region.id)
                continue
            try:
                await self._remove(region)
            except _BROKER_ERRORS as error:
                raise _broker_unavailable() from error
        await self._synchronise()

    def check_allowed(self) -> None:
        """Raises WeirError (UNSUPPORTED) unless client shared memory is enabled."""
        if not self.permission.is_given:
            raise WeirError(
                ErrorCode.UNSUPPORTED,
                "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
            )

    # Use by requests

    def find(self, name: str, offset: int, byte_size: int, owner: str = "") -> ClientRef:
        """The place in region `name` of `owner`. Raises WeirError if it is not registered, or the place exceeds it."""
        region = self._get(owner, name)
        if region is None:
            raise unknown_region(name)
        return region.place(offset, byte_size)

    def hold(self, model: str, names: Sequence[str]) -> RegionHold:
        """Keeps regions, given by their ids, registered for a request to `model`.

        Raises WeirError (UNSUPPORTED) if other hosts serve it too.
        """
        if not self._registry.model_shares_memory(model):
            raise WeirError(
                ErrorCode.UNSUPPORTED,
                f"shared memory regions can't be used with model '{model}': it is not served on this host alone",
            )
        self._uses.update(names)
        return RegionHold(self, names)

    def release(self, names: Iterable[str]) -> None:
        """Ends one request's use of these regions. Those that were unregistered meanwhile are removed with the last use."""
        for name in names:
            self._uses[name] -= 1
            if self._uses[name] > 0:
                continue
            del self._uses[name]
            if name in self._unregistered and self._background is not None:
                self._unregistered.discard(name)
                region = self._regions.get(name)
                if region is not None:
                    self._background.create_task(self._remove_unregistered(region))

    # The bucket

    def _get(self, owner: str, name: str) -> Region | None:
        region = self._regions.get(region_id(owner, name))
        return region if region is not None and region.owner == owner else None

    def _check_size(self, byte_size: int, holder: RegionOwner) -> None:
        if holder.limit_bytes is None:
            return
        used = sum(region.byte_size for region in self._regions.values() if region.owner == holder.owner)
        if used + byte_size > holder.limit_bytes:
            holder.refuse()

    def _check_name(self, name: str, owner: str) -> None:
        if region_id(owner, name) in self._regions:
            raise _already_registered(name)
        if len(name.encode(errors="replace")) > MAX_NAME_BYTES:
            raise invalid(f"the name of a shared memory region can't be longer than {MAX_NAME_BYTES} bytes")
        if len(self._regions) >= MAX_REGIONS:
            raise unavailable(f"the limit of {MAX_REGIONS} registered shared memory regions is reached")

    async def _register(self, region: Region) -> None:
        try:
            is_created = await self._view.bucket.create(subjects.region_key(host(), region.id), region.pack())
            # This write is also received as a message, in order with the writes of other gateways.
            await self._bus.flush()
        except _BROKER_ERRORS as error:
            raise _broker_unavailable() from error
        if not is_created:
            raise _already_registered(region.name)
        self._regions.setdefault(region.id, region)
        await self._synchronise()

    async def _remove(self, region: Region) -> None:
        # Deletes the key, then purges the deletion marker, which would stay for each name ever used.
        subject = subjects.region_subject(host(), region.id)
        mark = await self._bus.jetstream.publish(subject, b"", headers={KV_OP: KV_DEL})
        await self._bus.jetstream.purge_stream(subjects.REGIONS_STREAM, seq=mark.seq + 1, subject=subject)
        await self._bus.flush()
        self._forget(region.id)
        if region.kind == CUDA:
            self._cuda.close(CudaOpening(region.handle, region.device_id, region.byte_size))

    async def _remove_unregistered(self, region: Region) -> None:
        try:
            await self._remove(region)
        except _BROKER_ERRORS as error:
            logger.warning("shared memory region '%s' is still registered: %s", region.name, error)

    def _apply(self, _key: str, data: bytes) -> None:
        try:
            region = Region.unpack(data)
        except MalformedMessage as error:
            logger.warning("bucket %s: %s", subjects.REGIONS_BUCKET, error)
            return
        self._regions[region.id] = region

    def _on_removal(self, key: str) -> None:
        token = key.partition(".")[2]
        self._forget("" if token == "=" else subjects.untoken(token))  # noqa: S105 - a subject's token

    def _forget(self, id: str) -> None:
        self._regions.pop(id, None)
        self._unregistered.discard(id)

    async def _restore(self) -> None:
        """Reconciles with the bucket after a reconnect: regions that other gateways unregistered meanwhile are removed.

        If the broker has lost the bucket's content, this gateway writes its registrations again.
        """
        await ensure_regions_bucket(self._bus)
        await self._view.read(
            lambda: {subjects.region_key(host(), id): region.pack() for id, region in self._regions.items()}
        )


def _row(region: Region) -> dict[str, Any]:
    if region.kind == CUDA:
        return {"name": region.name, "device_id": region.device_id, "byte_size": region.byte_size}
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}


def _already_registered(name: str) -> WeirError:
    return WeirError(ErrorCode.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")


def _broker_unavailable() -> WeirError:
    return overloaded("the message broker is not available", reason=Reason.BROKER_AWAY)


CUDA_PROBE_TIMEOUT_S = 10.0
"""How long workers may take; the first reply of a worker takes as long as its GPU needs to start."""


class CudaIpcProbe:
    """Opens and closes clients' GPU memory in the workers of this host. Everything runs in one event loop."""

    def __init__(self, bus: Bus, gateway_id: str) -> None:
        self._bus = bus
        self._replies = ReplyInbox(bus, subjects.cuda_opened(gateway_id))

    async def start(self) -> None:
        """Subscribes to the replies of workers."""
        await self._replies.start()

    async def open(self, opening: CudaOpening, workers: set[str]) -> None:
        """Returns when one of `workers` has opened the memory. Raises WeirError if none can, or none replies in time."""
        waiting, reasons, is_open = set(workers), dict[str, str](), False

        def is_complete(message: Message) -> bool:
            nonlocal is_open
            try:
                opened = CudaOpened.unpack(message.data)
            except MalformedMessage as error:
                logger.warning("subject %s: %s", message.subject, error)
                return False
            waiting.discard(opened.worker)
            reasons[opened.worker] = opened.reason
            is_open = is_open or not opened.reason
            # Only the workers of that GPU open it, and one of them is enough.
            return is_open or not waiting

        subject = subjects.cuda_open(host())
        if not await self._replies.gather([subject], opening.pack(), is_complete, timeout_s=CUDA_PROBE_TIMEOUT_S):
            raise unavailable("no worker replied whether it can open the CUDA shared memory region")
        if not is_open:
            found = "; ".join(f"{worker}: {reason}" for worker, reason in reasons.items())
            logger.warning("no worker could open the CUDA shared memory: %s", found)
            raise invalid("failed to register shared memory region: invalid args")

    def close(self, opening: CudaOpening) -> None:
        """Tells the workers to close the memory."""
        self._bus.publish(subjects.cuda_close(host()), opening.pack())

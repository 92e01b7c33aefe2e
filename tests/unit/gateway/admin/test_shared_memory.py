"""Regions on a real bus: shared by the gateways of a host, restored after the broker lost them, removed completely."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import eventually
from weir.bus.kv.registry import RegistryView, WorkerView
from weir.bus.naming import subjects
from weir.bus.naming.identity import SHARED_MEMORY_DIRECTORY, host, new_id
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.payloads.client_regions import RegionError
from weir.gateway.admin.shared_memory import MAX_REGIONS, RegionPermission, SharedMemoryRegions
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.tensors import CudaRegionRef, RegionRef
from weir.schemas.kserve.regions import CUDA, SYSTEM
from weir.schemas.wire.registry import ModelRecord, WorkerRecord
from weir.worker.devices.cuda_shared_memory import CudaRegions, CudaSharedMemoryService

HANDLE = b"h" * 64


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats") / "data")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def key() -> Iterator[str]:
    """An object of 100 bytes."""
    path = SHARED_MEMORY_DIRECTORY / f"test_{secrets.token_hex(6)}"
    path.write_bytes(bytes(100))
    yield f"/{path.name}"
    path.unlink()


class House:
    """Gateways and workers around one broker."""

    def __init__(self, url: str, stack: AsyncExitStack, background: asyncio.TaskGroup) -> None:
        self._url = url
        self._stack = stack
        self._background = background
        self.workers: list[tuple[str, list[str]]] = []

    async def bus(self, name: str) -> Bus:
        bus = await Bus.connect(self._url, name, self._background)
        self._stack.push_async_callback(bus.close)
        return bus

    async def gateway(self, *prefixes: str) -> SharedMemoryRegions:
        name = new_id("gateway")
        bus = await self.bus(name)
        registry = RegistryView(bus)
        for worker, gpus in self.workers:
            view = registry.workers[worker] = WorkerView(worker, 0)
            view.record = WorkerRecord(worker, 1, gpus=gpus)
            view.models["m"] = ModelRecord("m")
        regions = SharedMemoryRegions(bus, name, registry, RegionPermission(True, prefixes))
        await regions.start(self._background)
        return regions

    async def worker(self, gpu: Gpu | None = None, name: str = "") -> str:
        name = name or new_id("worker")
        self.workers.append((name, [] if gpu is None else ["GPU-1"]))
        if gpu is not None:
            bus = await self.bus(name)
            await CudaSharedMemoryService(bus, name, CudaRegions(gpu)).start(self._background)
            await bus.flush()
        return name


class Gpu:
    """Opens one handle, of an allocation of 64 bytes."""

    size = 64

    def __init__(self, handle: bytes = HANDLE) -> None:
        self._handle = handle
        self.is_open = False

    def __call__(self, handle: bytes, _device: int) -> Any:
        if handle != self._handle:
            raise RegionError("CUDA: cudaErrorInvalidValue")
        self.is_open = True
        return self

    def close(self) -> None:
        self.is_open = False


@asynccontextmanager
async def house(nats: EmbeddedNats) -> AsyncIterator[House]:
    async with asyncio.TaskGroup() as background, AsyncExitStack() as stack:
        made = House(nats.url, stack, background)
        stack.push_async_callback(_leave_nothing, made)
        yield made


async def _leave_nothing(made: House) -> None:
    gateway = await made.gateway()
    for kind in (SYSTEM, CUDA):
        await gateway.unregister(kind)
    bus = await made.bus("looking")
    info = await bus.jetstream.stream_info(subjects.REGIONS_STREAM)
    assert info.state.messages == 0, "not even a mark of a region stays"


def names(gateway: SharedMemoryRegions, kind: str = SYSTEM) -> list[str]:
    return sorted(row["name"] for row in gateway.status(kind))


async def test_all_gateways_of_a_host_know_them(nats: EmbeddedNats, key: str) -> None:
    async with house(nats) as made:
        first, second = await made.gateway(), await made.gateway()
        for name in ("a", "", "ö .*>", "x" * 1000):
            await first.register_system(name, key, 10, 90)
        await eventually(lambda: len(names(second)) == 4)
        third = await made.gateway()
        for gateway in (first, second, third):
            assert names(gateway) == ["", "a", "x" * 1000, "ö .*>"]
            place = gateway.find("ö .*>", 5, 20)
            assert isinstance(place, RegionRef)
            assert (place.name, place.offset, place.size) == (key[1:], 15, 20)
        with pytest.raises(WeirError) as refused:
            await third.register_system("a", key, 0, 1)
        assert refused.value.code is ErrorCode.ALREADY_EXISTS
        await second.unregister(SYSTEM, "a")
        assert "a" not in names(second)
        await eventually(lambda: "a" not in names(first))
        await first.register_system("a", key, 0, 1)
        await third.unregister(SYSTEM)
        await eventually(lambda: not names(first) + names(second) + names(third))


async def test_prefixes_bound_what_clients_may_name(nats: EmbeddedNats, key: str) -> None:
    async with house(nats) as made:
        gateway = await made.gateway("/other-", key[1:8])
        for given in (key, key[1:], f"//{key}"):
            await gateway.register_system("a", given, 0, 1)
            await gateway.unregister(SYSTEM, "a")
        gateway = await made.gateway("/other-", "x" + key[1:])
        with pytest.raises(WeirError, match=f"only keys that begin with '/other-' or 'x{key[1:]}'") as refused:
            await gateway.register_system("a", key, 0, 1)
        assert refused.value.code is ErrorCode.INVALID_ARG
        assert f"with key '{key}'" in refused.value.message


async def test_a_name_is_registered_once_by_concurrent_gateways(nats: EmbeddedNats, key: str) -> None:
    async with house(nats) as made:
        gateways = [await made.gateway() for _ in range(3)]
        results = await asyncio.gather(
            *(gateway.register_system("a", key, 0, 1 + number) for number, gateway in enumerate(gateways)),
            return_exceptions=True,
        )
        assert sum(isinstance(result, WeirError) for result in results) == 2
        await eventually(lambda: all(names(gateway) == ["a"] for gateway in gateways))
        assert len({str(gateway.status(SYSTEM)) for gateway in gateways}) == 1


async def test_a_region_stays_while_any_request_uses_it(nats: EmbeddedNats, key: str) -> None:
    async with house(nats) as made:
        gateway, other = await made.gateway(), await made.gateway()
        for name in ("a", "b"):
            await gateway.register_system(name, key, 0, 100)
        holds = [gateway.hold("m", ("a",)), gateway.hold("m", ("a", "b", "a"))]
        await gateway.unregister(SYSTEM)
        assert names(gateway) == ["a", "b"]
        holds[1].free()
        holds[1].free()
        await eventually(lambda: names(gateway) == ["a"])
        assert gateway.find("a", 0, 1), "it can be used until it has left"
        holds.append(gateway.hold("m", ("a",)))
        holds[0].free()
        assert names(gateway) == ["a"]
        # Another gateway's requests are not counted here: theirs have their references already.
        await eventually(lambda: names(other) == ["a"])
        holds[2].free()
        await eventually(lambda: not names(gateway) + names(other))


async def test_requests_need_their_model_on_this_host(nats: EmbeddedNats) -> None:
    async with house(nats) as made:
        await made.worker(name="worker-00000000-1")
        gateway = await made.gateway()
        with pytest.raises(WeirError, match="'m': it is not served on this host alone") as refused:
            gateway.hold("m", ("a",))
        assert refused.value.code is ErrorCode.UNSUPPORTED
        gateway.hold("other", ("a",)).free()


async def test_what_is_written_by_others_must_be_a_region(nats: EmbeddedNats) -> None:
    async with house(nats) as made:
        gateway = await made.gateway()
        bus = await made.bus("stranger")
        subject = subjects.region_subject(host(), "bad")
        mark = await bus.jetstream.publish(subject, b"garbage")
        await bus.flush()
        assert not names(gateway)
        assert not names(await made.gateway())
        await bus.jetstream.purge_stream(subjects.REGIONS_STREAM, seq=mark.seq + 1, subject=subject)


async def test_names_and_numbers_are_bounded(nats: EmbeddedNats, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_REGIONS >= 1000
    monkeypatch.setattr("weir.gateway.admin.shared_memory.MAX_REGIONS", 2)
    async with house(nats) as made:
        gateway = await made.gateway()
        with pytest.raises(WeirError, match="can't be longer"):
            await gateway.register_system("ö" * 600, key, 0, 1)
        await gateway.register_system("a", key, 0, 1)
        await gateway.register_system("b", key, 0, 1)
        with pytest.raises(WeirError, match="the limit of 2 registered shared memory regions is reached"):
            await gateway.register_system("c", key, 0, 1)


async def test_registrations_are_written_again_to_a_broker_that_lost_them(tmp_path: Path, key: str) -> None:
    nats = EmbeddedNats(tmp_path / "data")
    nats.start()
    try:
        async with house(nats) as made:
            gateway = await made.gateway()
            await gateway.register_system("a", key, 0, 100)
            nats.stop()
            nats.start()
            await eventually(lambda: gateway._bus.is_connected)
            async with asyncio.timeout(20):
                while names(await made.gateway()) != ["a"]:
                    await asyncio.sleep(0.05)
    finally:
        nats.stop()


async def test_what_another_gateway_has_unregistered_meanwhile_does_not_come_back(nats: EmbeddedNats, key: str) -> None:
    async with house(nats) as made:
        first, second = await made.gateway(), await made.gateway()
        for name in ("stays", "goes"):
            await first.register_system(name, key, 0, 90)
        await eventually(lambda: len(names(second)) == 2)
        bus = second._bus
        callbacks = dict(bus._callbacks)
        bus._callbacks.clear()  # as while the broker is away
        await first.unregister(SYSTEM, "goes")
        await first.register_system("comes", key, 0, 90)
        await bus.flush()
        bus._callbacks.update(callbacks)
        bus.suspect_loss("test")
        await asyncio.gather(*bus._recoveries.values())
        assert names(second) == names(first) == ["comes", "stays"]


async def test_gpu_memory_is_opened_by_a_worker_that_can(nats: EmbeddedNats) -> None:
    async with house(nats) as made:
        able, unable = Gpu(), Gpu(b"other" * 13)
        await made.worker(unable)
        await made.worker(able)
        gateway = await made.gateway()
        await gateway.register_cuda("g", HANDLE, 1, 64)
        assert able.is_open
        assert not unable.is_open
        assert gateway.status(CUDA) == [{"name": "g", "device_id": 1, "byte_size": 64}]
        assert gateway.find("g", 8, 4) == CudaRegionRef(HANDLE, 1, 8, 4)
        assert not names(gateway)
        with pytest.raises(WeirError, match="The region named 'g' is registered as CUDA shared memory, not system"):
            gateway.status(SYSTEM, "g")
        await gateway.unregister(SYSTEM, "g")
        assert able.is_open
        await gateway.unregister(CUDA, "g")
        await eventually(lambda: not able.is_open)
        for handle, size in ((b"x" * 64, 64), (HANDLE, 65), (b"short", 1)):
            with pytest.raises(WeirError, match="failed to register shared memory region: invalid args"):
                await gateway.register_cuda("g", handle, 0, size)


async def test_gpu_memory_without_a_worker_on_this_host(nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.gateway.admin.shared_memory.CUDA_PROBE_TIMEOUT_S", 0.1)
    async with house(nats) as made:
        await made.worker()
        made.workers.append(("worker-00000000-1", ["GPU-1"]))
        with pytest.raises(WeirError, match="'g', GPUs not supported"):
            await (await made.gateway()).register_cuda("g", HANDLE, 0, 64)
        made.workers.append((new_id("worker"), ["GPU-1"]))  # which never answers
        with pytest.raises(WeirError, match="no worker replied") as refused:
            await (await made.gateway()).register_cuda("g", HANDLE, 0, 64)
        assert refused.value.code is ErrorCode.UNAVAILABLE

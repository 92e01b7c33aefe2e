"""Clients' GPU memory on a simulated machine of two GPUs: which way the bytes go, and in whose contexts."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.fakes.cuda_device import (
    GPU,
    OUT,
    KernelRunner,
    config,
    doubling,
    doubling_instance,
    execution,
    fake_cuda_runtime,
    numbers,
)
from tests.unit.worker.execution.test_instance import Served
from weir.bus.naming.identity import new_id
from weir.bus.payloads.arena import PayloadReader
from weir.bus.payloads.client_regions import RegionError
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import CudaRegionRef, Tensor
from weir.schemas.wire.batches import BatchEnded, BatchEntry, BatchMessage
from weir.schemas.wire.calls import unpack_responses
from weir.schemas.wire.request_body import pack_body
from weir.worker.backend_api.interface import DeviceLost, Execution, Result
from weir.worker.backends.custom import CheckedInstance
from weir.worker.cuda.device_instance import DeviceInstance
from weir.worker.cuda.ipc_memory import IpcAllocation, pinned_array
from weir.worker.devices.cuda_shared_memory import CudaRegions, MappedRegion
from weir.worker.execution.batch import Batch
from weir.worker.execution.invocation import ModelInvoker
from weir.worker.execution.shared_memory import SharedMemoryAccess, SharedMemoryIO

GATEWAY = new_id("gateway")


@pytest.fixture
def cuda() -> Iterator[Any]:
    gc.collect()
    with fake_cuda_runtime() as runtime:
        runtime.reset(devices=2)
        yield runtime


def regions(own_gpus: tuple[int, ...] = (0,)) -> CudaRegions:
    return CudaRegions(IpcAllocation, own_gpus, pinned_array)


def reading(ref: CudaRegionRef, values: int, output: CudaRegionRef | None = None) -> InferRequest:
    request = InferRequest("m", inputs=[Tensor("IN", "FP32", [1, values], ref)])
    if output is not None:
        request.outputs = [RequestedOutput("OUT", region=output)]
    return request


def floats(cuda: Any, handle: bytes) -> list[float]:
    return list(cuda.DEVICE.shared[handle].content.view(np.float32).tolist())


def ran(cuda: Any) -> list[str]:
    """The copies that the GPU has made since the last call."""
    found = [operation.what for operation in cuda.DEVICE.history if operation.what.startswith("copy")]
    cuda.DEVICE.history.clear()
    return found


class Client:
    """An instance with the memory of its clients, as `BatchRunner` uses both."""

    def __init__(self, instance: Any, opened: CudaRegions | None = None) -> None:
        self.instance = instance
        self.memory = SharedMemoryIO(SharedMemoryAccess(True, opened or regions()))
        self.memory.gpu = instance.region_gpu

    def start(self, *requests: InferRequest, padding: tuple[int, ...] = ()) -> Any:
        self.memory.content = None
        for request in requests:
            self.memory.fetch(request, GATEWAY)
        run = execution()
        is_delivered = [position not in padding for position in range(len(requests))]
        run.output_regions = self.memory.map_outputs(requests, is_delivered)
        return self.instance.execute(requests, run)

    def finish(self, handle: Any, *requests: InferRequest, padding: tuple[int, ...] = ()) -> list[Result]:
        results: list[Result] = handle.results()
        for position, (request, result) in enumerate(zip(requests, results, strict=True)):
            if position not in padding:
                self.memory.deliver(request, result)
        return results

    def run(self, *requests: InferRequest, padding: tuple[int, ...] = ()) -> list[Result]:
        return self.finish(self.start(*requests, padding=padding), *requests, padding=padding)


def test_tensors_in_regions_of_the_instance_s_gpu_stay_on_it(cuda: Any) -> None:
    given = cuda.DEVICE.share(np.arange(4, dtype=np.float32).tobytes())
    taken = cuda.DEVICE.share(bytes(32))
    client = Client(doubling_instance(cuda))
    ran(cuda)
    requests = [
        reading(CudaRegionRef(given, 0, 0, 8), 2, CudaRegionRef(taken, 0, 0, 8)),
        reading(CudaRegionRef(given, 0, 8, 8), 2, CudaRegionRef(taken, 0, 16, 16)),
    ]
    results = client.run(*requests)
    assert [result.error for result in results] == [None, None]
    assert [bytes(result.outputs[0].data) for result in results] == [b"", b""]  # type: ignore[arg-type]
    assert floats(cuda, taken) == [1, 3, 0, 0, 5, 7, 0, 0]
    assert ran(cuda) == ["copy within"] * 4
    assert cuda.DEVICE.contexts == {0}


def test_regions_and_contents_of_requests_mix(cuda: Any) -> None:
    given, taken = cuda.DEVICE.share(np.full(2, 5, np.float32).tobytes()), cuda.DEVICE.share(bytes(8))
    client = Client(doubling_instance(cuda, optimization={"cuda": {"output_copy_stream": True}}))
    ran(cuda)
    requests = [
        numbers([1, 2]),
        reading(CudaRegionRef(given, 0, 0, 8), 2),
        reading(CudaRegionRef(given, 0, 0, 8), 2, CudaRegionRef(taken, 0, 0, 8)),
    ]
    results = client.run(*requests)
    assert [result.outputs[0].to_numpy().tolist() for result in results[:2]] == [[[3, 5]], [[11, 11]]]
    assert floats(cuda, taken) == [11, 11]
    assert sorted(ran(cuda)) == ["copy in", "copy out", "copy within", "copy within", "copy within"]


@pytest.mark.parametrize("seed", range(6))
def test_two_batches_and_random_orders(cuda: Any, seed: int) -> None:
    handles = [cuda.DEVICE.share(np.full(4, number, np.float32).tobytes()) for number in range(8)]
    places = [cuda.DEVICE.share(bytes(16)) for _ in range(8)]
    settings = {"graphs": bool(seed % 2), "output_copy_stream": seed % 3 == 0}
    client = Client(doubling_instance(cuda, optimization={"cuda": settings}))
    cuda.DEVICE.hurry, cuda.DEVICE.reuses_memory = random.Random(seed), True
    under_way: list[Any] = []
    for _ in range(3):
        for given, taken in zip(handles, places, strict=True):
            request = reading(CudaRegionRef(given, 0, 0, 16), 4, CudaRegionRef(taken, 0, 0, 16))
            under_way.append((request, client.start(request)))
            if len(under_way) == 2:
                first, handle = under_way.pop(0)
                client.finish(handle, first)
        while under_way:
            first, handle = under_way.pop(0)
            client.finish(handle, first)
        assert [floats(cuda, taken) for taken in places] == [[2.0 * number + 1] * 4 for number in range(8)]
        for taken in places:
            cuda.DEVICE.shared[taken].content[:] = 0


def test_requests_that_get_no_response_write_nothing(cuda: Any) -> None:
    given, taken = cuda.DEVICE.share(np.arange(2, dtype=np.float32).tobytes()), cuda.DEVICE.share(bytes(4))
    client = Client(doubling_instance(cuda))
    requests = [reading(CudaRegionRef(given, 0, 4 * at, 4), 1, CudaRegionRef(taken, 0, 0, 4)) for at in (0, 1)]
    client.run(*requests, padding=(1,))
    assert floats(cuda, taken) == [1]


def test_a_request_whose_output_does_not_fit_fails_alone_and_writes_nothing(cuda: Any) -> None:
    given, taken = cuda.DEVICE.share(bytes(16)), cuda.DEVICE.share(b"\xee" * 16)
    client = Client(doubling_instance(cuda))
    good = reading(CudaRegionRef(given, 0, 0, 8), 2, CudaRegionRef(taken, 0, 8, 8))
    bad = reading(CudaRegionRef(given, 0, 0, 8), 2, CudaRegionRef(taken, 0, 0, 7))
    results = client.run(bad, good)
    assert results[0].error is not None
    assert "should be at least 8 bytes" in results[0].error.message
    assert results[1].error is None
    assert bytes(cuda.DEVICE.shared[taken].content[:8]) == b"\xee" * 8
    assert floats(cuda, taken)[2:] == [1, 1]


class Repeatable(Execution):
    def may_run_again(self, position: int) -> bool:
        return True


def test_requests_that_run_again_alone_write_their_own_outputs(cuda: Any) -> None:
    given, taken = cuda.DEVICE.share(np.arange(2, dtype=np.float32).tobytes()), cuda.DEVICE.share(bytes(8))
    client = Client(doubling_instance(cuda))
    requests = [reading(CudaRegionRef(given, 0, 4 * at, 4), 1, CudaRegionRef(taken, 0, 4 * at, 4)) for at in (0, 1)]
    client.memory.content = None
    for request in requests:
        client.memory.fetch(request, GATEWAY)
    run = Repeatable(PayloadReader())
    run.output_regions = client.memory.map_outputs(requests, [True, True])
    cuda.DEVICE.fail("cudaMallocAsync", "cudaErrorInvalidValue")
    results = ModelInvoker("m_0_0").start(client.instance, requests, run)
    assert not hasattr(results, "results")
    assert [result.error for result in results if result] == [None, None]  # type: ignore[union-attr]
    assert floats(cuda, taken) == [1, 3]


def test_an_input_that_the_backend_reads_on_the_host_is_copied_there(cuda: Any) -> None:
    given = cuda.DEVICE.share(np.full(2, 4, np.float32).tobytes())

    def opened(stream: Any) -> KernelRunner:
        return KernelRunner(cuda, stream, lambda a: [a["IN"] * 2], lambda i: [("FP32", (1, 2))], host_inputs=["IN"])

    (result,) = Client(DeviceInstance(opened, GPU, config(), OUT)).run(reading(CudaRegionRef(given, 0, 0, 8), 2))
    assert result.outputs[0].to_numpy().tolist() == [[8, 8]]


def test_outputs_of_a_user_s_backend_go_to_regions_as_well(cuda: Any) -> None:
    given, taken = cuda.DEVICE.share(bytes(8)), cuda.DEVICE.share(b"\xee" * 64)
    client = Client(CheckedInstance("mine", doubling_instance(cuda)))
    ran(cuda)
    (result,) = client.run(reading(CudaRegionRef(given, 0, 0, 8), 2, CudaRegionRef(taken, 0, 0, 64)))
    assert result.error is None
    assert floats(cuda, taken)[:2] == [1, 1]
    assert ran(cuda) == ["copy within", "copy within"]


def test_an_instance_on_another_gpu_gets_copies_through_pinned_memory(cuda: Any) -> None:
    given, taken = cuda.DEVICE.share(np.full(2, 3, np.float32).tobytes(), gpu=1), cuda.DEVICE.share(bytes(8), gpu=1)
    client = Client(DeviceInstance(doubling(cuda), GPU, config(), OUT), regions((0, 1)))
    ran(cuda)
    pinned_before = len(cuda.DEVICE.pinned)
    (result,) = client.run(reading(CudaRegionRef(given, 1, 0, 8), 2, CudaRegionRef(taken, 1, 0, 8)))
    assert result.error is None
    assert floats(cuda, taken) == [7, 7]
    assert ran(cuda) == ["copy out", "copy in", "copy out", "copy in"]
    # One for what was read, and those of the instance's own buffers.
    assert len(cuda.DEVICE.pinned) == pinned_before + 3
    assert cuda.DEVICE.current == 0, "the instance's thread has its own GPU again"


def test_registration_opens_memory_on_own_gpus_only(cuda: Any) -> None:
    handle = cuda.DEVICE.share(bytes(8), gpu=1)
    outcomes: list[str] = []

    def register() -> None:
        for own in ((0,), (1,)):
            try:
                regions(own).check(handle, 1, 8)
                outcomes.append("open")
            except RegionError as error:
                outcomes.append(str(error))

    thread = threading.Thread(target=register)
    thread.start()
    thread.join()
    assert outcomes == ["no instance of this worker runs on GPU 1", "open"]
    assert cuda.DEVICE.contexts == {1}, "no context on a GPU that the worker does not use"


def test_memory_stays_open_while_a_batch_uses_it(cuda: Any) -> None:
    given = cuda.DEVICE.share(np.full(2, 3, np.float32).tobytes())
    opened = regions()
    client = Client(doubling_instance(cuda), opened)
    request = reading(CudaRegionRef(given, 0, 0, 8), 2)
    handle = client.start(request)
    opened.close(given, 0)
    assert cuda.DEVICE.mappings, "the batch has not ended"
    (result,) = client.finish(handle, request)
    assert result.outputs[0].to_numpy().tolist() == [[7, 7]]
    assert client.memory.content is not None
    client.memory.release(client.memory.content)
    assert not cuda.DEVICE.mappings, "at once: its client may free it, and the instance keeps its last batch a while"
    assert request.inputs[0].data


def test_copies_do_not_wait_for_each_other(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = [cuda.DEVICE.share(bytes([number]) * 8) for number in (1, 2)]
    opened, met = regions(), threading.Barrier(2)
    copy = IpcAllocation.read

    def read(self: IpcAllocation, offset: int, target: memoryview) -> None:
        met.wait(10)  # both copies run, or this breaks
        copy(self, offset, target)

    monkeypatch.setattr(IpcAllocation, "read", read)
    targets = [bytearray(8), bytearray(8)]
    threads = [
        threading.Thread(target=opened.read, args=(CudaRegionRef(handle, 0, 0, 8), memoryview(target)))
        for handle, target in zip(handles, targets, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert targets == [b"\1" * 8, b"\2" * 8]
    assert not cuda.DEVICE.calls["cudaMemcpy"], "which would wait for what others have on the default stream"


def test_a_region_outside_of_its_allocation_is_rejected(cuda: Any) -> None:
    given = cuda.DEVICE.share(bytes(8))
    client = Client(doubling_instance(cuda))
    with pytest.raises(WeirError, match="failed to read input 'IN': the region is outside of the CUDA allocation"):
        client.start(reading(CudaRegionRef(given, 0, 4, 8), 2))
    with pytest.raises(WeirError, match="CUDA error cudaErrorInvalidResourceHandle while opening a client's memory"):
        client.start(reading(CudaRegionRef(bytes([7]) * 64, 0, 0, 8), 2))


def test_a_lost_device_is_no_fault_of_the_region(cuda: Any) -> None:
    given = cuda.DEVICE.share(bytes(8))
    opened = regions()
    opened.check(given, 0, 8)
    cuda.DEVICE.break_down()
    with pytest.raises(DeviceLost):
        opened.read(CudaRegionRef(given, 0, 0, 8), memoryview(bytearray(8)))


def test_a_mapped_region_is_what_was_asked_for(cuda: Any) -> None:
    given = cuda.DEVICE.share(bytes(range(16)))
    mapped = regions().map(CudaRegionRef(given, 0, 4, 8))
    assert isinstance(mapped, MappedRegion)
    assert (len(mapped), mapped.read()) == (8, bytes(range(4, 12)))


def test_a_whole_batch_of_an_instance_stays_on_the_gpu_and_ends_its_use_of_the_regions(cuda: Any) -> None:
    given, taken = (cuda.DEVICE.share(np.arange(4, dtype=np.float32).tobytes()) for _ in range(2))
    opened = regions()
    served = Served(
        lambda device: DeviceInstance(doubling(cuda), device, config(), OUT),
        shared={"shared_memory": SharedMemoryAccess(True, opened)},
    )
    requests = [reading(CudaRegionRef(given, 0, 4 * at, 4), 1, CudaRegionRef(taken, 0, 8 * at, 8)) for at in range(2)]
    entries = [BatchEntry(GATEWAY, at, 5, pack_body(request), 0) for at, request in enumerate(requests)]
    served.instance.submit(Batch(BatchMessage("scheduler", 1, "m", 1, 0, entries)))
    update = served.published.get(timeout=10)
    (completion,) = update.completions
    assert type(completion) is BatchEnded
    rows = [row for _, message in update.responses for row in unpack_responses(message)[1]]
    assert [row.error for row in rows] == [None, None]
    assert [bytes(row.outputs[0].data) for row in rows if row.outputs] == [b"", b""]  # type: ignore[arg-type]
    assert floats(cuda, taken) == [1, 1, 3, 3]
    assert ran(cuda) == ["copy within"] * 4
    for handle in (given, taken):
        opened.close(handle, 0)
    assert not cuda.DEVICE.mappings, "the instance is idle, and uses no region"
    served.instance.stop()

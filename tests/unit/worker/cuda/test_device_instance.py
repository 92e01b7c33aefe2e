"""`DeviceInstance` on a simulated GPU: every request gets its own rows, for all datatypes and settings."""

from __future__ import annotations

import gc
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
    run,
    values,
)
from tests.support.fakes.cuda_device import request as request_of
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.tensors import DATATYPES, Tensor
from weir.worker.backend_api.interface import DeviceLost, Result
from weir.worker.cuda import pinned
from weir.worker.cuda.device_instance import DeviceInstance
from weir.worker.execution.batch_tensors import NamedDatatype

NUMERIC = [name for name in DATATYPES if name != "BYTES"]


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Freezes the garbage collector's view of imported modules, which each collection would otherwise scan for seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def cuda() -> Iterator[Any]:
    gc.collect()  # what earlier tests left in circles gives its memory back now, and not while this one counts
    with fake_cuda_runtime() as runtime:
        yield runtime


@pytest.mark.parametrize("datatype", NUMERIC)
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("sizes", [[1], [3], [2, 1, 3]], ids=str)
def test_each_request_gets_its_own_rows(cuda: Any, datatype: str, own_stream: bool, sizes: list[int]) -> None:
    numpy_type = DATATYPES[datatype].numpy
    rows = [np.arange(9 * size).reshape(size, 3, 3).astype(numpy_type) for size in sizes]
    instance = DeviceInstance(
        lambda stream: KernelRunner(
            cuda, stream, lambda arrays: [arrays["IN"][:, ::-1]], lambda inputs: [(datatype, inputs["IN"].shape)]
        ),
        GPU,
        config(optimization={"cuda": {"output_copy_stream": own_stream}}),
        [NamedDatatype("OUT", datatype)],
    )
    for _ in range(3):
        results = run(instance, *(request_of(Tensor.from_numpy("IN", array, datatype)) for array in rows))
        for result, array in zip(results, rows, strict=True):
            assert isinstance(result, Result)
            (output,) = result.outputs
            assert (output.name, output.datatype) == ("OUT", datatype)
            np.testing.assert_array_equal(output.to_numpy(), array[:, ::-1])
    instance.close()


def test_a_model_without_batches_and_tensors_without_elements(cuda: Any) -> None:
    instance = DeviceInstance(doubling(cuda), GPU, config(max_batch_size=0), OUT)
    for array in (np.float32(3.5), np.arange(5, dtype=np.float32), np.empty((0, 4), np.float32)):
        (result,) = run(instance, request_of(Tensor.from_numpy("IN", np.asarray(array), "FP32")))
        assert isinstance(result, Result)
        np.testing.assert_array_equal(result.outputs[0].to_numpy(), array * 2 + 1)


def test_strings_and_host_inputs_stay_on_the_host(cuda: Any) -> None:
    class Named:
        host_inputs = ("SHAPE",)
        can_capture = False

        def enqueue(self, inputs: Any) -> Any:
            assert isinstance(inputs["SHAPE"], np.ndarray)
            assert isinstance(inputs["TEXT"], np.ndarray)
            assert not isinstance(inputs["IN"], np.ndarray)
            return [np.char.upper(inputs["TEXT"].astype("S")).astype(object), inputs["SHAPE"] + 1]

        def close(self) -> None:
            pass

    instance = DeviceInstance(
        lambda stream: Named(), GPU, config(), [NamedDatatype("TEXT", "BYTES"), NamedDatatype("SHAPE", "INT64")]
    )
    requests = [
        request_of(
            Tensor.from_numpy("TEXT", np.array([[text]], object), "BYTES"),
            Tensor.from_numpy("IN", np.zeros((1, 2), np.float32), "FP32"),
            Tensor.from_numpy("SHAPE", np.array([[number]], np.int64), "INT64"),
        )
        for number, text in enumerate([b"a", b"", b"longer"])
    ]
    told = [[tensor.to_numpy().tolist() for tensor in result.outputs] for result in run(instance, *requests) if result]
    assert told == [[[[b"A"]], [[1]]], [[[b""]], [[2]]], [[[b"LONGER"]], [[3]]]]


def test_ragged_inputs_batch_inputs_and_outputs_without_rows(cuda: Any) -> None:
    settings = config(
        input=[{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True}],
        batch_input=[
            {
                "kind": "BATCH_ACCUMULATED_ELEMENT_COUNT",
                "target_name": ["ENDS"],
                "data_type": "TYPE_INT32",
                "source_input": ["IN"],
            }
        ],
        batch_output=[
            {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["OUT"], "source_input": ["IN"]},
        ],
    )

    def function(arrays: Any) -> list[np.ndarray]:
        assert arrays["ENDS"].tolist() == [2, 3, 6]
        return [arrays["IN"] + 10]

    instance = DeviceInstance(
        lambda stream: KernelRunner(cuda, stream, function, lambda inputs: [("FP32", inputs["IN"].shape)]),
        GPU,
        settings,
        OUT,
    )
    results = run(instance, numbers([1, 2]), numbers([3]), numbers([4, 5, 6]))
    assert values(results) == [[[11, 12]], [[13]], [[14, 15, 16]]]


def test_states_outlast_the_buffers(cuda: Any) -> None:
    state = {
        "input_name": "S",
        "output_name": "S2",
        "data_type": "TYPE_FP32",
        "dims": [1],
    }
    instance = DeviceInstance(
        lambda stream: KernelRunner(
            cuda,
            stream,
            lambda arrays: [arrays["IN"], arrays["S"] + 1],
            lambda inputs: [("FP32", inputs["IN"].shape), ("FP32", inputs["S"].shape)],
        ),
        GPU,
        config(sequence_batching={"state": [state]}),
        OUT,
        [NamedDatatype("S2", "FP32")],
    )
    kept = []
    for number in range(5):
        array = np.array([[number]], np.float32)
        tensors = [Tensor.from_numpy(name, array, "FP32") for name in ("IN", "S")]
        (result,) = run(instance, request_of(*tensors))
        assert isinstance(result, Result)
        kept.append((result.outputs[0], result.states[0]))
    assert [(out.to_numpy().item(), state.to_numpy().item()) for out, state in kept] == [(n, n + 1) for n in range(5)]


def test_phases_are_those_of_the_gpu(cuda: Any) -> None:
    instance = DeviceInstance(doubling(cuda, us=50_000), GPU, config(), OUT)
    told = execution()
    told.start_ns -= 10**9
    instance.execute([numbers([1, 2])], told).results()  # type: ignore[union-attr]
    assert told.infer_end_ns - told.input_end_ns == 50_000_000
    assert told.start_ns < told.input_end_ns


def test_a_failed_batch_does_not_affect_the_next_one(cuda: Any) -> None:
    instance = doubling_instance(cuda)
    under_way = instance.execute([numbers([1])], execution())
    broken = request_of(Tensor("IN", "FP32", [1, 5], b"1234"))
    with pytest.raises(WeirError, match="the content of input 'IN' does not fill its shape"):
        instance.execute([broken], execution())
    cuda.DEVICE.fail("cudaMallocAsync", "cudaErrorInvalidValue")
    with pytest.raises(
        WeirError, match="CUDA error cudaErrorInvalidValue while allocating 65536 bytes on GPU 0"
    ) as failed:
        instance.execute([numbers([2])], execution())
    assert failed.value.code is ErrorCode.INTERNAL
    following = instance.execute([numbers([3])], execution())
    assert values(under_way.results()) == [[[3]]]
    assert values(following.results()) == [[[7]]]


def test_an_allocation_failure_names_the_sizes(cuda: Any) -> None:
    cuda.reset(memory_bytes=1 << 20)
    instance = DeviceInstance(doubling(cuda), GPU, config(), OUT)
    with pytest.raises(
        WeirError, match=r"^UNAVAILABLE: GPU 0 has no memory for 3145728 bytes more: 1048576 of its 1048576 bytes"
    ) as e:
        run(instance, numbers(np.zeros(500_000)))
    assert e.value.code is ErrorCode.UNAVAILABLE
    assert values(run(instance, numbers([4]))) == [[[9]]]


def test_all_memory_is_freed(cuda: Any) -> None:
    instance = doubling_instance(cuda)
    for count in (1, 10, 100_000, 10, 300_000, 5):
        run(instance, numbers(np.zeros(count)))
        run(instance, numbers(np.zeros(count)))
    assert pinned.PINNED.used_bytes == sum(map(len, [m for at, m in cuda.DEVICE.pinned.items() if at > 0]))
    instance.close()
    del instance
    device = cuda.DEVICE
    for stream in device.streams.values():
        device.finish(stream)
    assert (device.used_bytes, pinned.PINNED.used_bytes, device.events) == (0, 0, {})


def test_streams_are_used_again_by_the_next_instance(cuda: Any) -> None:
    """PyTorch keeps a workspace of cuBLAS for each stream that it has ever seen."""
    for _ in range(5):
        instance = doubling_instance(cuda)
        assert values(run(instance, numbers([1]))) == [[[3]]]
        instance.close()
        del instance
    assert cuda.DEVICE.calls["cudaStreamCreateWithFlags"] == len(cuda.DEVICE.streams) == 2


def test_a_closed_instance_returns_its_memory_to_the_gpu(cuda: Any) -> None:
    instance = doubling_instance(cuda)
    for count in (100_000, 300_000):
        run(instance, numbers(np.zeros(count)))
    assert cuda.cudaMemGetInfo()[1] < cuda.cudaMemGetInfo()[2] - 300_000 * 4
    instance.close()
    assert (cuda.DEVICE.used_bytes, cuda.DEVICE.pooled_bytes) == (0, 0)
    assert cuda.cudaMemGetInfo()[1] == cuda.cudaMemGetInfo()[2]


@pytest.mark.parametrize("place", ["cudaMemcpyAsync", "cudaStreamWaitEvent", "cudaEventSynchronize", "cudaMallocAsync"])
@pytest.mark.parametrize("error", ["cudaErrorECCUncorrectable", "cudaErrorDevicesUnavailable", "cudaErrorUnknown"])
def test_a_sticky_error_loses_the_device(cuda: Any, place: str, error: str) -> None:
    instance = doubling_instance(cuda)
    run(instance, numbers([1]))
    cuda.DEVICE.fail(place, error)
    with pytest.raises(DeviceLost, match=f"CUDA error {error} while"):
        run(instance, numbers([1]))
    with pytest.raises(DeviceLost):
        run(instance, numbers([1]))
    instance.close()


def test_a_faulting_kernel_loses_the_device_for_all_batches(cuda: Any) -> None:
    device = cuda.DEVICE

    def function(arrays: Any) -> list[np.ndarray]:
        if arrays["IN"].any():
            device.bytes_at(12, 4)
        return [arrays["IN"]]

    instance = DeviceInstance(
        lambda stream: KernelRunner(cuda, stream, function, lambda inputs: [("FP32", inputs["IN"].shape)]),
        GPU,
        config(),
        OUT,
    )
    first, second = (instance.execute([numbers([value])], execution()) for value in (1, 0))
    for pending in (first, second):
        with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress while running a batch"):
            pending.results()


def test_a_backend_error_on_a_broken_device_is_a_lost_device(cuda: Any) -> None:
    class Raising(KernelRunner):
        def enqueue(self, inputs: Any) -> Any:
            if self.enqueued:
                cuda.DEVICE.break_down()
            self.enqueued += 1
            raise RuntimeError("CUDA failure 700")

    instance = DeviceInstance(
        lambda stream: Raising(cuda, stream, lambda arrays: [], lambda inputs: []), GPU, config(), OUT
    )
    with pytest.raises(RuntimeError):
        instance.execute([numbers([1])], execution())
    with pytest.raises(DeviceLost) as lost:
        instance.execute([numbers([1])], execution())
    assert isinstance(lost.value.__context__, RuntimeError)


def test_pinned_memory_is_bounded(cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    pinned.PINNED.total_bytes = 128 << 10
    first, second = doubling_instance(cuda), doubling_instance(cuda)
    for _ in range(2):
        assert values(run(first, numbers([1]))) == [[[3]]]
        assert values(run(second, numbers([1]))) == [[[3]]]
    assert pinned.PINNED.used_bytes == 128 << 10
    (told,) = [
        record.message for record in caplog.records if "failed to allocate pinned system memory" in record.message
    ]
    assert "a buffer of 65536 bytes is needed, and 131072 of the 131072 bytes of --pinned-memory-pool-byte-size" in told
    assert len(cuda.DEVICE.pinned) == 2


@pytest.mark.parametrize(("memory_gib", "pool_mib"), [(1, 256), (4, 256), (16, 1024), (2000, 4096)])
def test_the_budget_of_pinned_memory_follows_the_memory_of_the_machine(memory_gib: int, pool_mib: int) -> None:
    assert pinned.default_pool_bytes(memory_gib << 30) == pool_mib << 20


def test_the_configuration_can_disable_pinned_memory(cuda: Any) -> None:
    off = {"enable": False}
    instance = doubling_instance(cuda, optimization={"input_pinned_memory": off, "output_pinned_memory": off})
    assert values(run(instance, numbers([1]))) == [[[3]]]
    assert not cuda.DEVICE.pinned
    instance = doubling_instance(
        cuda, optimization={"input_pinned_memory": off, "output_pinned_memory": {"enable": True}}
    )
    run(instance, numbers([1]))
    assert len(cuda.DEVICE.pinned) == 1


def test_ordinary_memory_is_used_if_the_host_can_not_pin(cuda: Any) -> None:
    cuda.DEVICE.fail("cudaHostAlloc", "cudaErrorMemoryAllocation", times=2)
    instance = doubling_instance(cuda)
    assert values(run(instance, numbers([1]))) == [[[3]]]
    assert pinned.PINNED.used_bytes == 0


@pytest.mark.parametrize(
    "outputs, told",
    [
        ([], "the model has 0 outputs instead of 1"),
        ([("INT32", (1, 1))], "output 'OUT' is INT32, but the configuration specifies FP32"),
        ([("FP32", (2, 1))], "output 'OUT' has 2 rows for a batch of 1"),
    ],
)
def test_unexpected_outputs_are_errors(cuda: Any, outputs: Any, told: str) -> None:
    instance = DeviceInstance(
        lambda stream: KernelRunner(cuda, stream, lambda arrays: [arrays["IN"]] * len(outputs), lambda inputs: outputs),
        GPU,
        config(),
        OUT,
    )
    with pytest.raises(WeirError, match=told):
        run(instance, numbers([1]))


def test_events_spin_only_if_configured(cuda: Any) -> None:
    flags: list[int] = []
    make = cuda.cudaEventCreateWithFlags
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "cudaEventCreateWithFlags", lambda flag: flags.append(flag) or make(flag))
        doubling_instance(cuda)
        assert set(flags) == {cuda.cudaEventBlockingSync}
        flags.clear()
        doubling_instance(cuda, optimization={"cuda": {"busy_wait_events": True}})
        assert set(flags) == {cuda.cudaEventDefault}


def test_a_missing_device_or_package_is_an_error(cuda: Any) -> None:
    from weir.worker.backend_api.interface import InstanceDevice

    with pytest.raises(WeirError, match="CUDA error cudaErrorInvalidDevice while selecting GPU 7"):
        DeviceInstance(doubling(cuda), InstanceDevice("KIND_GPU", 7, "m"), config(), OUT)


def test_a_runner_is_closed_if_its_instance_can_not_be_created(cuda: Any) -> None:
    made: list[KernelRunner] = []

    def opened(stream: Any) -> KernelRunner:
        made.append(doubling(cuda)(stream))
        cuda.DEVICE.break_down()
        return made[0]

    with pytest.raises(DeviceLost):
        DeviceInstance(opened, GPU, config(), OUT)
    assert made[0].is_closed

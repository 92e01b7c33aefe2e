"""ONNX Runtime on a GPU, with fakes of both: streams, addresses and errors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.fakes.onnxruntime_gpu import (
    GARBAGE,
    FakeGpu,
    FakeMemory,
    FakeNetwork,
    FakeOnnxRuntime,
    FakeStream,
    FakeTensorInfo,
)
from tests.support.models.onnx_files import parameters, run_instance, version
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.backend_api.interface import DeviceLost, DeviceTensor, InstanceDevice, ModelVersion
from weir.worker.backends.onnxruntime import backend as backend_module
from weir.worker.backends.onnxruntime.backend import OnnxRuntimeBackend
from weir.worker.backends.onnxruntime.gpu_runner import open_device_runner
from weir.worker.backends.onnxruntime.options import CUDA_OPTIONS, NO_TENSORRT, OnnxOptions
from weir.worker.backends.onnxruntime.session import Installation, run_error
from weir.worker.devices.gpus import WorkerDevices

GROUP = "instance_group [{ kind: KIND_GPU gpus: [0] }]"
GRAPHS = "optimization { cuda { graphs: true } }"
ONES = np.ones((2, 3), np.float32)


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def ort(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeOnnxRuntime:
    fake = FakeOnnxRuntime(gpu)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture
def stream(gpu: FakeGpu) -> FakeStream:
    return FakeStream(gpu)


def opened(ort: FakeOnnxRuntime, model: ModelVersion, stream: FakeStream) -> Any:
    return open_device_runner(ort, model, OnnxOptions.of(model), ["OUT"], stream)


def tensor(stream: FakeStream, array: np.ndarray, datatype: str = "FP32") -> DeviceTensor:
    memory = stream.put(array)
    return DeviceTensor(datatype, array.shape, memory.pointer, memory)


def read(stream: FakeStream, output: DeviceTensor) -> np.ndarray:
    return stream.get(output.pointer, output.shape, np.float32)


def accelerated(name: str, **values: str) -> str:
    reported = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in values.items())
    return f'optimization {{ execution_accelerators {{ gpu_execution_accelerator {{ name: "{name}" {reported} }} }} }}'


def test_a_run_does_not_wait_for_the_stream(ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path) -> None:
    runner = opened(ort, version(tmp_path, GROUP), stream)
    (output,) = runner.enqueue({"IN": tensor(stream, ONES)})
    assert (output.datatype, output.shape) == ("FP32", (2, 3))
    assert (stream.get(output.pointer, (24,), np.uint8) == GARBAGE).all(), "nobody has waited yet"
    stream.synchronize()
    np.testing.assert_array_equal(read(stream, output), -ONES)
    (session,) = ort.sessions
    assert session.cuda == {
        "cudnn_conv_algo_search": "HEURISTIC",
        "device_id": "0",
        "has_user_compute_stream": "1",
        "user_compute_stream": str(stream.handle),
    }
    assert session.get_providers() == ["CUDAExecutionProvider", "CPUExecutionProvider"]


def test_outputs_are_not_overwritten_by_later_batches(ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path) -> None:
    runner = opened(ort, version(tmp_path, GROUP), stream)
    outputs = [runner.enqueue({"IN": tensor(stream, ONES * number)})[0] for number in range(4)]
    stream.synchronize()
    for number, output in enumerate(outputs):
        np.testing.assert_array_equal(read(stream, output), -ONES * number)


def test_memory_is_freed_with_its_outputs(
    ort: FakeOnnxRuntime, gpu: FakeGpu, stream: FakeStream, tmp_path: Path
) -> None:
    runner = opened(ort, version(tmp_path, GROUP), stream)
    for _ in range(5):
        runner.enqueue({"IN": tensor(stream, ONES)})
        stream.synchronize()
    stream.synchronize()
    assert gpu.blocks == {}


def test_tensors_on_the_host_are_bound_there_and_waited_for(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path
) -> None:
    ort.network = FakeNetwork(
        [*FakeNetwork().inputs, FakeTensorInfo("SHAPE", "tensor(int64)", [2], "Cpu")],
        [FakeTensorInfo("OUT", "tensor(float)", [], "Cpu")],
        lambda feeds: {"OUT": -feeds["IN"] * feeds["SHAPE"][0]},
    )
    runner = opened(ort, version(tmp_path, GROUP), stream)
    assert runner.host_inputs == {"SHAPE"}
    (output,) = runner.enqueue({"IN": tensor(stream, ONES), "SHAPE": np.array([5, 6])})
    np.testing.assert_array_equal(output, ONES * -5)


def test_bf16_comes_back_from_the_host_as_bit_patterns(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path
) -> None:
    ort.network = FakeNetwork(
        [FakeTensorInfo("IN", "tensor(bfloat16)", ["b"])],
        [FakeTensorInfo("OUT", "tensor(bfloat16)", ["b"], "Cpu")],
        lambda feeds: {"OUT": feeds["IN"]},
    )
    runner = opened(ort, version(tmp_path, GROUP), stream)
    patterns = np.array([1, 0x3F80], np.uint16)
    (output,) = runner.enqueue({"IN": tensor(stream, patterns, "BF16")})
    np.testing.assert_array_equal(output, patterns)


def test_a_session_that_would_fall_back_to_the_cpu_is_an_error(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path
) -> None:
    ort.falls_back = True
    with pytest.raises(WeirError) as refused:
        opened(ort, version(tmp_path, GROUP), stream)
    assert refused.value.code == ErrorCode.UNAVAILABLE
    assert refused.value.message == (
        "ONNX Runtime could not use CUDAExecutionProvider and would have run model 'net' on CPUExecutionProvider"
    )


def test_a_wrong_address_loses_the_device(
    ort: FakeOnnxRuntime, gpu: FakeGpu, stream: FakeStream, tmp_path: Path
) -> None:
    runner = opened(ort, version(tmp_path, GROUP), stream)
    right = tensor(stream, ONES)
    runner.enqueue({"IN": right._replace(pointer=right.pointer + 8)})
    with pytest.raises(Exception, match="CUDA failure 700"):
        stream.synchronize()
    with pytest.raises(DeviceLost) as lost:
        runner.enqueue({"IN": right})
    assert str(lost.value) == "CUDA failure 700: an illegal memory access was encountered"


@pytest.mark.parametrize(("number", "is_lost"), [(46, True), (999, True), (810, True), (720, False), (2, False)])
def test_errors_after_which_nothing_runs_lose_the_device(number: int, is_lost: bool) -> None:
    error = run_error(RuntimeError(f"CUDA failure {number}: something ; GPU=0"))
    assert isinstance(error, DeviceLost) == is_lost


def test_full_memory_is_an_unavailable_error(
    ort: FakeOnnxRuntime, gpu: FakeGpu, stream: FakeStream, tmp_path: Path
) -> None:
    runner = opened(ort, version(tmp_path, GROUP), stream)
    given = tensor(stream, ONES)
    gpu.limit_bytes = 30
    with pytest.raises(WeirError, match="Failed to allocate memory") as full:
        runner.enqueue({"IN": given})
    assert full.value.code == ErrorCode.UNAVAILABLE


def test_an_exception_fails_its_run_only(ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path) -> None:
    ort.output_shape = lambda shapes: shapes["MISSING"]
    runner = opened(ort, version(tmp_path, GROUP), stream)
    with pytest.raises(WeirError) as failed:
        runner.enqueue({"IN": tensor(stream, ONES)})
    assert failed.value.code == ErrorCode.INTERNAL


def test_the_cuda_provider_gets_the_configured_options(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path
) -> None:
    values = {
        "gpu_mem_limit": "1000",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "do_copy_in_default_stream": "true",
        "use_tf32": "off",
        "device_id": "7",
    }
    opened(ort, version(tmp_path, GROUP + accelerated("cuda", **values)), stream)
    reported = dict(ort.sessions[-1].cuda or {})
    assert reported["user_compute_stream"] == str(stream.handle)
    assert {key: reported[key] for key in values} == {
        **values,
        "do_copy_in_default_stream": "1",
        "use_tf32": "0",
        "device_id": "0",  # as in Triton, the instance's
    }
    assert reported.keys() <= CUDA_OPTIONS


@pytest.mark.parametrize(
    ("text", "search"),
    [
        ("", "HEURISTIC"),
        (accelerated("cuda", cudnn_conv_algo_search="EXHAUSTIVE"), "EXHAUSTIVE"),
        (parameters(cudnn_conv_algo_search="0"), "EXHAUSTIVE"),
    ],
)
def test_convolutions_are_not_measured_unless_the_model_asks_for_it(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path, text: str, search: str
) -> None:
    opened(ort, version(tmp_path, GROUP + text), stream)
    assert (ort.sessions[-1].cuda or {}).get("cudnn_conv_algo_search") == search


def test_the_parameters_from_before_the_accelerator_are_read(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path
) -> None:
    text = parameters(
        cudnn_conv_algo_search="2", arena_extend_strategy="1", gpu_mem_limit="99", do_copy_in_default_stream="0"
    )
    opened(ort, version(tmp_path, GROUP + text), stream)
    reported = dict(ort.sessions[-1].cuda or {})
    assert (reported["cudnn_conv_algo_search"], reported["arena_extend_strategy"]) == ("DEFAULT", "kSameAsRequested")
    assert (reported["gpu_mem_limit"], reported["do_copy_in_default_stream"]) == ("99", "0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (accelerated("tensorrt", precision_mode="FP16"), NO_TENSORRT),
        (accelerated("warp"), "unknown Execution Accelerator 'warp' is requested"),
        (
            accelerated("cuda", fast="1"),
            "unknown parameter 'fast' is provided for CUDA Execution Accelerator",
        ),
        (accelerated("cuda", gpu_mem_limit="much"), "failed to convert 'much' to integral number"),
        (accelerated("cuda", use_tf32="2"), "failed to convert '2' to boolean"),
        (
            accelerated("cuda", cudnn_conv_algo_search="FAST"),
            "unsupported cudnn_conv_algo_search value 'FAST' is requested",
        ),
        (parameters(cudnn_conv_algo_search="3"), "unsupported cudnn_conv_algo_search value '3' is requested"),
        (parameters(arena_extend_strategy="2"), "unsupported arena_extend_strategy value '2' is requested"),
        (
            parameters(memory__enable_memory_arena_shrinkage="gpu:1"),
            "Did not find an arena based allocator registered for device-id combination in the memory arena shrink list: "
            "gpu:1",
        ),
    ],
)
def test_invalid_options_of_a_gpu_fail_the_load(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(WeirError) as refused:
        opened(ort, version(tmp_path, GROUP + text), stream)
    assert refused.value.message == message


def test_arenas_of_the_gpu_shrink(ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path) -> None:
    text = parameters(memory__enable_memory_arena_shrinkage="gpu:0;cpu:0")
    runner = opened(ort, version(tmp_path, GROUP + text), stream)
    runner.enqueue({"IN": tensor(stream, ONES)})
    assert ort.sessions[-1].run_entries == {
        "memory.enable_memory_arena_shrinkage": "gpu:0;cpu:0",
        "disable_synchronize_execution_providers": "1",
    }


@pytest.mark.parametrize("more", [GRAPHS, accelerated("cuda", enable_cuda_graph="1")])
def test_onnx_runtime_captures_no_graphs(ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path, more: str) -> None:
    runner = opened(ort, version(tmp_path, GROUP + more), stream)
    assert not runner.can_capture
    session = ort.sessions[-1]
    assert session.cuda is not None
    assert "enable_cuda_graph" not in session.cuda


def test_an_instance_on_a_gpu_opens_its_session_when_it_has_its_stream(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []
    instances = SimpleNamespace(DeviceInstance=lambda *given: made.append(given))
    monkeypatch.setitem(sys.modules, "weir.worker.cuda", SimpleNamespace(device_instance=instances))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "weir.worker.cuda.device_instance", instances)  # type: ignore[arg-type]
    model = version(tmp_path, GROUP)
    loaded = OnnxRuntimeBackend().load(model)
    sessions = len(ort.sessions)
    device = InstanceDevice("KIND_GPU", 0, "net_0")
    for _ in range(2):
        loaded.create_instance(device)
    assert len(ort.sessions) == sessions
    for open_runner, *rest in made:
        assert rest == [device, model.config, [("OUT", "FP32")], []]
        (output,) = open_runner(stream).enqueue({"IN": tensor(stream, ONES)})
        stream.synchronize()
        np.testing.assert_array_equal(read(stream, output), -ONES)
    assert len(ort.sessions) == sessions + 2


def test_a_shared_session_copies_from_and_to_the_host(ort: FakeOnnxRuntime, tmp_path: Path) -> None:
    text = GROUP + parameters(share_session_between_instances="true")
    loaded = OnnxRuntimeBackend().load(version(tmp_path, text))
    described = len(ort.sessions)
    first, *_ = (loaded.create_instance(InstanceDevice("KIND_GPU", gpu, f"net_{gpu}")) for gpu in (0, 0, 1))
    assert [(session.cuda or {})["device_id"] for session in ort.sessions[described:]] == ["0", "1"]
    assert not any("user_compute_stream" in (session.cuda or {}) for session in ort.sessions[described:])
    np.testing.assert_array_equal(run_instance(first, ONES), -ONES)
    assert ort.preloads > 0


def test_sessions_with_string_inputs_copy_from_and_to_the_host(ort: FakeOnnxRuntime, tmp_path: Path) -> None:
    ort.network.inputs[0].type = "tensor(string)"
    loaded = OnnxRuntimeBackend().load(version(tmp_path, GROUP))
    loaded.create_instance(InstanceDevice("KIND_GPU", 0, "net_0"))
    assert "user_compute_stream" not in (ort.sessions[-1].cuda or {})


def test_a_model_for_gpus_only_has_no_session_on_the_cpu(ort: FakeOnnxRuntime, tmp_path: Path) -> None:
    OnnxRuntimeBackend().load(version(tmp_path, GROUP))
    (describing,) = ort.sessions
    assert describing.options.graph_optimization_level == "none"


def test_operations_that_the_cpu_lacks_are_described_on_the_gpu(ort: FakeOnnxRuntime, tmp_path: Path) -> None:
    ort.cpu_lacks_operations = True
    described = OnnxRuntimeBackend().describe(version(tmp_path, GROUP))
    assert described is not None
    assert described.inputs[0].name == "IN"
    (session,) = ort.sessions
    assert session.get_providers()[0] == "CUDAExecutionProvider"
    with pytest.raises(WeirError, match="NOT_IMPLEMENTED"):
        OnnxRuntimeBackend().load(version(tmp_path / "cpu"))


@pytest.mark.parametrize(
    ("devices", "found", "runs_on", "problem"),
    [
        (WorkerDevices((0,), (0,)), Installation("1.31.1", True), ("KIND_CPU", "KIND_GPU"), ""),
        (WorkerDevices((0,), (0,)), Installation("1.31.1", False), ("KIND_CPU",), "install weir-serve[gpu]"),
        (WorkerDevices(), Installation("1.31.1", True), ("KIND_CPU",), "no GPU"),
        (
            WorkerDevices((0,), (0,)),
            Installation("1.31.1", True, "onnxruntime and onnxruntime-gpu own the same files: ..."),
            ("KIND_CPU", "KIND_GPU"),
            "own the same files",
        ),
        (WorkerDevices(), None, (), "is not installed"),
    ],
)
def test_availability(
    monkeypatch: pytest.MonkeyPatch,
    devices: WorkerDevices,
    found: Installation | None,
    runs_on: tuple[str, ...],
    problem: str,
) -> None:
    monkeypatch.setattr(backend_module, "installation", lambda: found)
    monkeypatch.setattr(backend_module, "cuda_obstacle", lambda: "")
    availability = OnnxRuntimeBackend().availability(devices)
    assert availability.runs_on == runs_on
    assert (problem in "".join(availability.problems)) if problem else not availability.problems
    monkeypatch.setattr(backend_module, "cuda_obstacle", lambda: "no way")
    assert "KIND_GPU" not in OnnxRuntimeBackend().availability(devices).runs_on


def test_the_fake_punishes_what_the_real_thing_would(gpu: FakeGpu, stream: FakeStream) -> None:
    memory: FakeMemory = stream.put(ONES)
    stream.synchronize()
    pointer = memory.pointer
    np.testing.assert_array_equal(stream.get(pointer, (2, 3), np.float32), ONES)
    del memory
    np.testing.assert_array_equal(stream.get(pointer, (2, 3), np.float32), ONES)
    stream.synchronize()
    with pytest.raises(Exception, match="CUDA failure 700"):
        gpu.at(pointer, 1)

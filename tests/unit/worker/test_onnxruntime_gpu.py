"""ONNX Runtime on a GPU, before fakes of both (`fake_onnxruntime_gpu`): streams, addresses, graphs, what goes wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_onnxruntime_gpu import GARBAGE, FakeGpu, FakeMemory, FakeNetwork, FakeOnnxRuntime, FakeStream, FakeTensorInfo
from onnx_models import parameters, version

from schemas.errors import ErrorCode, WeirError
from worker.backend import DeviceLost, InstanceDevice, ModelVersion
from worker.backends import onnxruntime as backend_module
from worker.backends.onnxruntime import OnnxRuntimeBackend
from worker.backends.onnxruntime_gpu import open_device_runner
from worker.backends.onnxruntime_graphs import MAX_GRAPHS, OnnxGraphRunner
from worker.backends.onnxruntime_library import Installation
from worker.backends.onnxruntime_options import OnnxOptions
from worker.backends.onnxruntime_providers import CUDA_OPTIONS, NO_TENSORRT
from worker.device_runner import DeviceTensor
from worker.devices import WorkerDevices

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
    runner = open_device_runner(ort, model, OnnxOptions.of(model), ["OUT"], stream)
    if isinstance(runner, OnnxGraphRunner):
        runner._copy = stream.copy
    return runner


def tensor(stream: FakeStream, array: np.ndarray, datatype: str = "FP32") -> DeviceTensor:
    memory = stream.put(array)
    return DeviceTensor(datatype, array.shape, memory.pointer, memory)


def read(stream: FakeStream, output: DeviceTensor) -> np.ndarray:
    return stream.get(output.pointer, output.shape, np.float32)


def accelerated(name: str, **values: str) -> str:
    told = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in values.items())
    return f'optimization {{ execution_accelerators {{ gpu_execution_accelerator {{ name: "{name}" {told} }} }} }}'


def test_a_run_only_tells_the_stream_what_to_do(ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path) -> None:
    runner = opened(ort, version(tmp_path, GROUP), stream)
    (output,) = runner.enqueue({"IN": tensor(stream, ONES)})
    assert (output.datatype, output.shape) == ("FP32", (2, 3))
    assert (stream.get(output.pointer, (24,), np.uint8) == GARBAGE).all(), "nobody has waited yet"
    stream.synchronize()
    np.testing.assert_array_equal(read(stream, output), -ONES)
    (session,) = ort.sessions
    assert session.cuda == {"device_id": "0", "has_user_compute_stream": "1", "user_compute_stream": str(stream.handle)}
    assert session.get_providers() == ["CUDAExecutionProvider", "CPUExecutionProvider"]


def test_outputs_stay_as_they_are_while_the_next_batches_run(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path
) -> None:
    runner = opened(ort, version(tmp_path, GROUP), stream)
    outputs = [runner.enqueue({"IN": tensor(stream, ONES * number)})[0] for number in range(4)]
    stream.synchronize()
    for number, output in enumerate(outputs):
        np.testing.assert_array_equal(read(stream, output), -ONES * number)


def test_memory_is_given_up_with_its_outputs(
    ort: FakeOnnxRuntime, gpu: FakeGpu, stream: FakeStream, tmp_path: Path
) -> None:
    runner = opened(ort, version(tmp_path, GROUP), stream)
    for _ in range(5):
        runner.enqueue({"IN": tensor(stream, ONES)})
        stream.synchronize()
    stream.synchronize()
    assert gpu.blocks == {}


def test_what_lies_on_the_host_is_bound_there_and_waited_for(
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


def test_a_session_that_would_run_on_the_cpu_is_no_session(
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


def test_memory_that_is_used_up_is_for_later(
    ort: FakeOnnxRuntime, gpu: FakeGpu, stream: FakeStream, tmp_path: Path
) -> None:
    runner = opened(ort, version(tmp_path, GROUP), stream)
    given = tensor(stream, ONES)
    gpu.limit_bytes = 30
    with pytest.raises(WeirError, match="Failed to allocate memory") as full:
        runner.enqueue({"IN": given})
    assert full.value.code == ErrorCode.UNAVAILABLE


def test_what_a_run_raises_fails_that_run(ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path) -> None:
    ort.output_shape = lambda shapes: shapes["MISSING"]
    runner = opened(ort, version(tmp_path, GROUP), stream)
    with pytest.raises(WeirError) as failed:
        runner.enqueue({"IN": tensor(stream, ONES)})
    assert failed.value.code == ErrorCode.INTERNAL


def test_the_cuda_provider_is_told_what_the_configuration_says(
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
    told = dict(ort.sessions[-1].cuda or {})
    assert told["user_compute_stream"] == str(stream.handle)
    assert {key: told[key] for key in values} == {
        **values,
        "do_copy_in_default_stream": "1",
        "use_tf32": "0",
        "device_id": "0",  # as in Triton, the instance's
    }
    assert told.keys() <= CUDA_OPTIONS


def test_the_parameters_from_before_the_accelerator_are_read(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path
) -> None:
    text = parameters(
        cudnn_conv_algo_search="2", arena_extend_strategy="1", gpu_mem_limit="99", do_copy_in_default_stream="0"
    )
    opened(ort, version(tmp_path, GROUP + text), stream)
    told = dict(ort.sessions[-1].cuda or {})
    assert (told["cudnn_conv_algo_search"], told["arena_extend_strategy"]) == ("DEFAULT", "kSameAsRequested")
    assert (told["gpu_mem_limit"], told["do_copy_in_default_stream"]) == ("99", "0")


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
def test_what_a_gpu_can_t_be_told_is_refused(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(WeirError) as refused:
        opened(ort, version(tmp_path, GROUP + text), stream)
    assert refused.value.message == message


def test_arenas_of_the_gpu_shrink(ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path) -> None:
    text = parameters(memory__enable_memory_arena_shrinkage="gpu:0;cpu:0")
    runner = opened(ort, version(tmp_path, GROUP + text), stream)
    assert runner._run_options.entries == {
        "memory.enable_memory_arena_shrinkage": "gpu:0;cpu:0",
        "disable_synchronize_execution_providers": "1",
    }


def test_a_graph_is_captured_at_the_second_run_of_its_shapes(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path
) -> None:
    runner = opened(ort, version(tmp_path, GROUP + GRAPHS), stream)
    assert isinstance(runner, OnnxGraphRunner)
    outputs, expected = [], []
    for number in range(6):
        for rows in (1, 2):
            array = np.full((rows, 3), number * 10 + rows, np.float32)
            outputs += runner.enqueue({"IN": tensor(stream, array)})
            expected.append(-array)
    stream.synchronize()
    for output, array in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(read(stream, output), array)
    session = ort.sessions[-1]
    assert session.cuda is not None
    assert session.cuda["enable_cuda_graph"] == "1"
    assert (len(session._graphs), session.replays) == (2, 8)


def test_the_graphs_of_an_instance_are_bounded(
    ort: FakeOnnxRuntime, gpu: FakeGpu, stream: FakeStream, tmp_path: Path
) -> None:
    runner = opened(ort, version(tmp_path, GROUP + accelerated("cuda", enable_cuda_graph="1")), stream)
    for _ in range(3):
        for rows in range(1, MAX_GRAPHS + 5):
            array = np.full((rows, 3), rows, np.float32)
            (output,) = runner.enqueue({"IN": tensor(stream, array)})
            stream.synchronize()
            np.testing.assert_array_equal(read(stream, output), -array)
    assert len(ort.sessions[-1]._graphs) == MAX_GRAPHS
    del output
    runner.close()
    stream.synchronize()
    ort.sessions.clear()
    assert gpu.blocks == {}


def test_a_graph_needs_its_inputs_on_the_gpu(ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path) -> None:
    ort.network.inputs[0].place = "Cpu"
    with pytest.raises(WeirError, match="CUDA graphs need inputs on the GPU, and IN is not"):
        opened(ort, version(tmp_path, GROUP + GRAPHS), stream)


def test_an_instance_on_a_gpu_opens_its_session_when_it_has_its_stream(
    ort: FakeOnnxRuntime, stream: FakeStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []
    instances = SimpleNamespace(DeviceInstance=lambda *given: made.append(given))
    monkeypatch.setitem(sys.modules, "worker.cuda", SimpleNamespace(device_instance=instances))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "worker.cuda.device_instance", instances)  # type: ignore[arg-type]
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


def test_instances_that_share_a_session_have_it_copy(ort: FakeOnnxRuntime, tmp_path: Path) -> None:
    text = GROUP + parameters(share_session_between_instances="true")
    loaded = OnnxRuntimeBackend().load(version(tmp_path, text))
    described = len(ort.sessions)
    first, second = (loaded.create_instance(InstanceDevice("KIND_GPU", 0, f"net_{n}")) for n in range(2))
    other = loaded.create_instance(InstanceDevice("KIND_GPU", 1, "net_2"))
    sessions = [instance._runner._session for instance in (first, second, other)]  # type: ignore[attr-defined]
    assert sessions[0] is sessions[1]
    assert [session.cuda for session in ort.sessions[described:]] == [{"device_id": "0"}, {"device_id": "1"}]
    np.testing.assert_array_equal(first._runner.run({"IN": ONES})[0], -ONES)  # type: ignore[attr-defined]
    assert ort.preloads > 0


def test_models_that_take_strings_have_their_session_copy(ort: FakeOnnxRuntime, tmp_path: Path) -> None:
    ort.network.inputs[0].type = "tensor(string)"
    loaded = OnnxRuntimeBackend().load(version(tmp_path, GROUP))
    instance = loaded.create_instance(InstanceDevice("KIND_GPU", 0, "net_0"))
    session = instance._runner._session  # type: ignore[attr-defined]
    assert session.cuda == {"device_id": "0"}


def test_a_model_for_gpus_alone_has_no_session_on_the_cpu(ort: FakeOnnxRuntime, tmp_path: Path) -> None:
    loaded = OnnxRuntimeBackend().load(version(tmp_path, GROUP))
    (describing,) = ort.sessions
    assert describing.options.graph_optimization_level == "none"
    assert loaded._session is None  # type: ignore[attr-defined]


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
def test_what_it_can_run_is_told(
    monkeypatch: pytest.MonkeyPatch,
    devices: WorkerDevices,
    found: Installation | None,
    runs_on: tuple[str, ...],
    problem: str,
) -> None:
    monkeypatch.setattr(backend_module, "installation", lambda: found)
    availability = OnnxRuntimeBackend().availability(devices)
    assert availability.runs_on == runs_on
    assert (problem in "".join(availability.problems)) if problem else not availability.problems


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

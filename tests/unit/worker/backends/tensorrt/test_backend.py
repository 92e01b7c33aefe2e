from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.fakes import tensorrt_module as fake_tensorrt
from tests.support.fakes.tensorrt_module import Memory, Stream, plan
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.backend_api.config_support import check_supported
from weir.worker.backend_api.interface import DeviceTensor, InstanceDevice, ModelVersion
from weir.worker.backends.tensorrt import backend as backend_module
from weir.worker.backends.tensorrt.backend import NOT_INSTALLED, TensorRtBackend
from weir.worker.backends.tensorrt.engine import RunnerOptions, TensorRtEngine, TensorRtRunner
from weir.worker.devices.gpus import CPU_ONLY, NO_CUDA_BINDINGS, WorkerDevices

LOGGER = SimpleNamespace(log=lambda severity, message: None)


def runner_for(content: bytes, **options) -> TensorRtRunner:
    engine = TensorRtEngine(fake_tensorrt, content, LOGGER)
    return TensorRtRunner(engine, Stream(), ["OUT"], "net", RunnerOptions(**options))


def on_device(array: np.ndarray, datatype: str = "FP32") -> DeviceTensor:
    memory = Memory(array.nbytes)
    ctypes.memmove(memory.pointer, np.ascontiguousarray(array).ctypes.data, array.nbytes)
    return DeviceTensor(datatype, array.shape, memory.pointer, memory)


def to_host(tensor: DeviceTensor, dtype: type = np.float32) -> np.ndarray:
    size = int(np.prod(tensor.shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(tensor.pointer, size), dtype).reshape(tensor.shape)


def rows(count: int) -> np.ndarray:
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4)


def test_an_engine_describes_its_tensors() -> None:
    described = TensorRtEngine(fake_tensorrt, plan(), LOGGER).described()
    assert [(t.name, t.data_type, t.dims) for t in described.inputs] == [("IN", "TYPE_FP32", [-1, 4])]
    assert [(t.name, t.data_type, t.dims) for t in described.outputs] == [("OUT", "TYPE_FP32", [-1, 4])]


def test_batches_of_several_shapes() -> None:
    runner = runner_for(plan())
    for count in (1, 8, 3):
        (out,) = runner.enqueue({"IN": on_device(rows(count))})
        assert out.shape == (count, 4)
        np.testing.assert_array_equal(to_host(out), rows(count) * 2)


def test_an_output_outlives_the_next_run() -> None:
    runner = runner_for(plan())
    (first,) = runner.enqueue({"IN": on_device(rows(2))})
    runner.enqueue({"IN": on_device(rows(2) + 100)})
    np.testing.assert_array_equal(to_host(first), rows(2) * 2)


def test_a_shape_outside_of_all_profiles_is_refused() -> None:
    runner = runner_for(plan())
    with pytest.raises(WeirError, match="dimension 0 to be between 1 and 8 but received 9") as refused:
        runner.enqueue({"IN": on_device(rows(9))})
    assert refused.value.code is ErrorCode.INVALID_ARG
    with pytest.raises(WeirError, match="Expected 2 dimensions, got 1"):
        runner.enqueue({"IN": on_device(np.zeros(4, np.float32))})
    (out,) = runner.enqueue({"IN": on_device(rows(1))})  # and the next is served
    np.testing.assert_array_equal(to_host(out), rows(1) * 2)


def test_the_profile_with_the_nearest_best_shape_is_used() -> None:
    profiles = [{"IN": [[1, 4], [1, 4], [32, 4]]}, {"IN": [[1, 4], [16, 4], [32, 4]]}, {"IN": [[1, 4], [3, 4], [4, 4]]}]
    fake_tensorrt.contexts.clear()
    runner = runner_for(plan(profiles=profiles), profiles=("0", "1"))
    for count in (1, 2, 14, 14, 20, 3):
        runner.enqueue({"IN": on_device(rows(count))})
    (context,) = fake_tensorrt.contexts
    # Profile 2 would be nearer to 3 rows, but its group does not have it.
    assert context.profiles_set == [0, 1, 0]


def test_a_profile_that_the_engine_lacks() -> None:
    with pytest.raises(WeirError, match="no optimization profile '1', of 1"):
        runner_for(plan(), profiles=("1",))


def test_an_output_whose_size_depends_on_the_content() -> None:
    runner = runner_for(plan("nonzero"))
    for values in ([1, 0, 2], [0, 0, 5, 6, 7]):
        (out,) = runner.enqueue({"IN": on_device(np.array(values, np.float32))})
        np.testing.assert_array_equal(to_host(out), [value for value in values if value])


def test_a_shape_tensor_stays_on_the_host() -> None:
    runner = runner_for(plan("fill"))
    assert runner.host_inputs == {"SHAPE"}
    (out,) = runner.enqueue({"SHAPE": np.array([2, 3], np.int64)})
    np.testing.assert_array_equal(to_host(out), np.full((2, 3), 7, np.float32))


def test_failures_of_the_engine_are_errors() -> None:
    with pytest.raises(WeirError, match="could not deserialize"):
        TensorRtEngine(fake_tensorrt, b"not a plan", LOGGER)
    with pytest.raises(WeirError, match="too little free memory"):
        runner_for(plan(no_memory=True))
    with pytest.raises(WeirError, match="failed to run TensorRT inference"):
        runner_for(plan(fails=True)).enqueue({"IN": on_device(rows(1))})
    with pytest.raises(WeirError, match="type FP8, which requests can't contain"):
        TensorRtEngine(fake_tensorrt, plan(dtype="FP8"), LOGGER)
    with pytest.raises(WeirError, match="execution_context_allocation_strategy"):
        runner_for(plan(), allocation_strategy="USER_MANAGED")
    with pytest.raises(WeirError, match="unexpected inference input 'X'"):
        runner_for(plan()).enqueue({"IN": on_device(rows(1)), "X": on_device(rows(1))})


def test_tensors_that_are_not_linear_are_rejected() -> None:
    tensors = [
        {"name": "IN", "mode": "INPUT", "dtype": "HALF", "shape": [-1, 4], "format": "Two wide channel FP16 (kCHW2)"},
        {"name": "OUT", "mode": "OUTPUT", "dtype": "HALF", "shape": [-1, 4]},
    ]
    with pytest.raises(
        WeirError, match=r"tensor 'IN' has TensorRT's format \"Two wide channel FP16 \(kCHW2\)\", which"
    ):
        runner_for(plan(tensors=tensors))


def test_the_runner_of_a_graph_has_a_context_of_its_own() -> None:
    fake_tensorrt.contexts.clear()
    runner = runner_for(plan())
    graph = runner.for_graph()
    graph.enqueue({"IN": on_device(rows(2))})
    runner.enqueue({"IN": on_device(rows(5))})
    assert [context.shapes for context in fake_tensorrt.contexts] == [{"IN": (5, 4)}, {"IN": (2, 4)}]
    graph.close()
    (out,) = runner.enqueue({"IN": on_device(rows(3))})
    np.testing.assert_array_equal(to_host(out), rows(3) * 2)


def test_engines_share_a_logger_and_find_the_plugins_of_tensorrt(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setattr(fake_tensorrt, "__spec__", SimpleNamespace())
    monkeypatch.setattr(backend_module, "_capability", lambda gpu: "9.0")
    selected: list[int] = []
    monkeypatch.setattr(backend_module, "_set_device", selected.append)
    fake_tensorrt.registrations.clear()
    backend_module._logger.cache_clear()
    backend_module._register_plugins.cache_clear()
    for version in (1, 2):
        (tmp_path / str(version)).mkdir()
        (tmp_path / str(version) / "model.plan").write_bytes(plan(has_plugins=True))
        config = ModelConfig(name="net", backend="tensorrt")
        described = TensorRtBackend().describe(ModelVersion("net", version, tmp_path, config, own_gpus=(3,)))
        assert described is not None
    assert selected == [3, 3], "the GPU of the worker"
    assert [namespace for _, namespace in fake_tensorrt.registrations] == [""]
    assert fake_tensorrt.registrations[0][0] is backend_module._logger(fake_tensorrt)


def test_availability(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TensorRtBackend()
    assert backend.availability(CPU_ONLY).problems == (NOT_INSTALLED,)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setattr(fake_tensorrt, "__spec__", SimpleNamespace())
    assert backend.availability(CPU_ONLY).runs_on == ()
    monkeypatch.setattr(backend_module, "cuda_obstacle", lambda: NO_CUDA_BINDINGS)
    assert backend.availability(WorkerDevices((0,), (0,))) == ((), ("model.plan",), "", (NO_CUDA_BINDINGS,))
    monkeypatch.setattr(backend_module, "cuda_obstacle", lambda: "")
    assert backend.availability(WorkerDevices((0,), (0,))).runs_on == ("KIND_GPU",)


def test_tensorrt_is_not_used_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    # The real one crashes the process.
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setattr(ctypes, "CDLL", _no_driver)
    model = ModelVersion("net", 1, tmp_path, ModelConfig(name="net", backend="tensorrt"))
    with pytest.raises(WeirError, match="no NVIDIA driver") as refused:
        TensorRtBackend().load(model).create_instance(InstanceDevice("KIND_GPU", 0, "net_0"))
    assert refused.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(WeirError, match="runs on KIND_GPU only"):
        TensorRtBackend().load(model).create_instance(InstanceDevice("KIND_CPU", 0, "net_0"))


def _no_driver(name: str, *_: object, **__: object) -> None:
    raise OSError(f"{name}: cannot open shared object file")


def test_shape_tensors_are_served_without_batches() -> None:
    config = {
        "name": "net",
        "backend": "tensorrt",
        "input": [{"name": "SHAPE", "data_type": "TYPE_INT64", "dims": [2], "is_shape_tensor": True}],
        "instance_group": [{"kind": "KIND_GPU", "gpus": [0], "profile": ["0"]}],
        "cc_model_filenames": {"9.0": "hopper.plan"},
    }
    check_supported(ModelConfig.model_validate(config))
    with pytest.raises(WeirError, match="shape tensors"):
        check_supported(ModelConfig.model_validate({**config, "max_batch_size": 4}))

"""Options of a configuration for ONNX Runtime on the CPU: their effect on sessions, and errors at load."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.models.onnx_files import CPU, graph, output_of, parameters, version
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.backend_api.interface import ModelVersion
from weir.worker.backends.onnxruntime import options as options_module
from weir.worker.backends.onnxruntime.backend import OnnxRuntimeBackend
from weir.worker.backends.onnxruntime.options import OnnxOptions, cpu_providers
from weir.worker.backends.onnxruntime.session import open_session
from weir.worker.devices.gpus import WorkerDevices

ONES = np.ones((2, 3), np.float32)


def session_of(model: ModelVersion) -> Any:
    return open_session(onnxruntime, model, OnnxOptions.of(model), cpu_providers(onnxruntime, model.config))


def test_the_defaults_are_one_thread_and_all_optimizations(tmp_path: Path) -> None:
    options = session_of(version(tmp_path)).get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (True, True)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor can't be divided")
@pytest.mark.parametrize("end", [min, max], ids=["the first", "the last"])
def test_threads_for_all_cores_stay_on_those_that_the_process_may_use(
    tmp_path: Path, end: Callable[[set[int]], int]
) -> None:
    """ONNX Runtime binds its threads to cores of the machine, whatever the affinity mask of the process is."""
    model = version(tmp_path, parameters(intra_op_thread_count="0", inter_op_thread_count="0", execution_mode="1"))
    everywhere = os.sched_getaffinity(0)
    tasks = Path("/proc/self/task")
    before = {task.name for task in tasks.iterdir()}
    os.sched_setaffinity(0, {end(everywhere)})
    try:
        session = session_of(model)
        started = {task.name for task in tasks.iterdir()} - before
        assert all(os.sched_getaffinity(int(task)) == {end(everywhere)} for task in started)
        assert session.get_session_options().intra_op_num_threads == 1
    finally:
        os.sched_setaffinity(0, everywhere)
    assert session_of(model).get_session_options().intra_op_num_threads in (0, len(everywhere))


def test_every_parameter_of_a_session_reaches_it(tmp_path: Path) -> None:
    text = parameters(
        intra_op_thread_count="2",
        inter_op_thread_count="3",
        execution_mode="1",
        enable_mem_arena="false",
        enable_mem_pattern="0",
        session__use_device_allocator_for_initializers="true",
        session__disable_prepacking="1",
        optimization__enable_gelu_approximation="1",
    )
    options = session_of(version(tmp_path, text)).get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 3)
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (False, False)
    for entry in (
        "session.use_device_allocator_for_initializers",
        "session.disable_prepacking",
        "optimization.enable_gelu_approximation",
    ):
        assert options.get_session_config_entry(entry) == "1"
    # More threads than one don't spin unless they are reported to.
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.get_session_config_entry("session.inter_op.allow_spinning") == "0"


def test_threads_spin_if_configured(tmp_path: Path) -> None:
    text = parameters(intra_op_thread_count="2", session__intra_op__allow_spinning="1")
    options = session_of(version(tmp_path, text)).get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"


@pytest.mark.parametrize(
    ("level", "expected"), [(-1, "ORT_ENABLE_BASIC"), (1, "ORT_ENABLE_EXTENDED"), (2, "ORT_DISABLE_ALL")]
)
def test_the_level_of_the_graph_is_triton_s(tmp_path: Path, level: int, expected: str) -> None:
    options = session_of(version(tmp_path, f"optimization {{ graph {{ level: {level} }} }}")).get_session_options()
    assert options.graph_optimization_level.name == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"intra_op_thread_count": "many"}, "failed to convert 'many' to integral number"),
        (
            {"inter_op_thread_count": "-1"},
            "Invalid configuration value provided. Expected values for inter_op_thread_count are 0 or more but got -1 .",
        ),
        (
            {"execution_mode": "2"},
            "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got 2 .",
        ),
        ({"enable_mem_arena": "maybe"}, "failed to convert 'maybe' to boolean"),
        ({"enable_mem_pattern": "2"}, "failed to convert '2' to boolean"),
        ({"session.intra_op.allow_spinning": "banana"}, "failed to convert 'banana' to boolean"),
        (
            {"memory.enable_memory_arena_shrinkage": "gpu:0"},
            "Did not find an arena based allocator registered for device-id combination in the memory arena shrink list: "
            "gpu:0",
        ),
        (
            {"memory.enable_memory_arena_shrinkage": "cpu:0", "enable_mem_arena": "0"},
            "Did not find an arena based allocator registered for device-id combination in the memory arena shrink list: "
            "cpu:0",
        ),
        (
            {"memory.enable_memory_arena_shrinkage": "disk:0"},
            "Unsupported device specified in the memory arena shrink list: disk",
        ),
        (
            {"memory.enable_memory_arena_shrinkage": "cpu:x"},
            "Unsupported device id in the memory arena shrink list: x",
        ),
    ],
)
def test_invalid_values_fail_the_load(tmp_path: Path, values: dict[str, str], message: str) -> None:
    with pytest.raises(WeirError) as refused:
        OnnxRuntimeBackend().load(version(tmp_path, parameters(**values)))
    assert (refused.value.code, refused.value.message) == (ErrorCode.INVALID_ARG, message)


@pytest.mark.parametrize("entry", ["cpu", "cpu:0", "cpu:0;cpu"])
def test_arenas_shrink_after_each_run(tmp_path: Path, entry: str) -> None:
    model = version(tmp_path, parameters(memory__enable_memory_arena_shrinkage=entry))
    np.testing.assert_array_equal(output_of(model, ONES), -ONES)
    run_options = OnnxOptions.of(model).run_options(onnxruntime)
    assert run_options.get_run_config_entry("memory.enable_memory_arena_shrinkage") == entry


def test_instances_on_the_cpu_share_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    session = onnxruntime.InferenceSession

    def open_recorded(path: str, *arguments: Any, **options: Any) -> Any:
        opened.append(path)
        return session(path, *arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", open_recorded)
    loaded = OnnxRuntimeBackend().load(version(tmp_path))
    for _ in range(2):
        loaded.create_instance(CPU)
    assert len(opened) == 1


def test_accelerators_of_the_cpu_keep_their_order(tmp_path: Path) -> None:
    if "AzureExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime was built without a second provider")
    text = 'optimization { execution_accelerators { cpu_execution_accelerator { name: "azure" } } }'
    model = version(tmp_path, text)
    assert session_of(model).get_providers() == ["AzureExecutionProvider", "CPUExecutionProvider"]
    np.testing.assert_array_equal(output_of(model, ONES), -ONES)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("warp", ErrorCode.INVALID_ARG, "unknown Execution Accelerator 'warp' is requested"),
        ("cpu", ErrorCode.INVALID_ARG, "unknown Execution Accelerator 'cpu' is requested"),
        (
            "openvino",
            ErrorCode.UNAVAILABLE,
            "Execution Accelerator 'openvino' is not available: the installed onnxruntime was built without "
            f"OpenVINOExecutionProvider, and has {', '.join(onnxruntime.get_available_providers())}",
        ),
    ],
)
def test_errors_name_a_missing_accelerator(tmp_path: Path, name: str, code: ErrorCode, message: str) -> None:
    text = f'optimization {{ execution_accelerators {{ cpu_execution_accelerator {{ name: "{name}" }} }} }}'
    with pytest.raises(WeirError) as refused:
        OnnxRuntimeBackend().load(version(tmp_path, text))
    assert (refused.value.code, refused.value.message) == (code, message)


def test_errors_of_a_library_of_operations_contain_no_path(tmp_path: Path) -> None:
    text = 'model_operations { op_library_filename: "ops/none.so" }'
    with pytest.raises(WeirError) as absent:
        OnnxRuntimeBackend().load(version(tmp_path, text))
    assert absent.value.message == (
        "unable to find 'ops/none.so' (field 'model_operations.op_library_filename') in the folder of model 'net'"
    )
    (tmp_path / "net" / "ops").mkdir()
    (tmp_path / "net" / "ops" / "none.so").write_bytes(b"no library")
    for load in (OnnxRuntimeBackend().load, OnnxRuntimeBackend().describe):
        with pytest.raises(WeirError) as broken:
            load(version(tmp_path, text))
        assert broken.value.message.startswith(
            "onnx runtime error: [ONNXRuntimeError] : 1 : FAIL : Failed to load library "
        )
        assert str(tmp_path) not in broken.value.message
        assert "none.so" in broken.value.message


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to make a library of operations with")
def test_a_library_of_operations_is_registered_with_each_session(tmp_path: Path) -> None:
    model = version(tmp_path, 'model_operations { op_library_filename: "ops.so" }')
    source = (
        "int calls; void *RegisterCustomOps(void *options, void *api) { (void)options, (void)api; calls++; return 0; }"
    )
    library = tmp_path / "net" / "ops.so"
    command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True, timeout=30)
    opened = ctypes.CDLL(str(library))  # so that it isn't closed, and the number with it, after each session
    assert OnnxRuntimeBackend().describe(model) is not None
    np.testing.assert_array_equal(output_of(model, ONES), -ONES)
    assert ctypes.c_int.in_dll(opened, "calls").value == 2


def test_a_library_of_operations_lies_in_the_folder_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "outside.so").write_bytes(b"")
    with pytest.raises(WeirError, match="must stay within the model's folder"):
        OnnxRuntimeBackend().load(version(tmp_path, 'model_operations { op_library_filename: "../outside.so" }'))


def test_errors_name_unknown_operations(tmp_path: Path) -> None:
    with pytest.raises(WeirError, match=r"onnx runtime error: .*fancy"):
        OnnxRuntimeBackend().load(version(tmp_path, model=graph("Shiny", domain="fancy")))


def test_a_model_of_several_files_is_loaded(tmp_path: Path) -> None:
    numbers = np.arange(3000, dtype=np.float32).reshape(1, 3000)
    weights = numpy_helper.from_array(numbers, "WEIGHTS")
    made = helper.make_graph(
        [helper.make_node("Add", ["IN", "WEIGHTS"], ["OUT"])],
        "graph",
        [helper.make_tensor_value_info("IN", TensorProto.FLOAT, ["batch", 3000])],
        [helper.make_tensor_value_info("OUT", TensorProto.FLOAT, ["batch", 3000])],
        [weights],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for name in ("model.onnx", "model.onnx/model.onnx"):
        root = tmp_path / name.replace("/", "-")
        path = root / "net" / "1" / name
        path.parent.mkdir(parents=True)
        onnx.save_model(
            copy.deepcopy(model), path, save_as_external_data=True, location="model.onnx.data", size_threshold=0
        )
        assert (path.parent / "model.onnx.data").stat().st_size >= numbers.nbytes
        loaded = version(root)
        assert OnnxRuntimeBackend().describe(loaded) is not None
        np.testing.assert_array_equal(output_of(loaded, np.zeros((1, 3000), np.float32)), numbers)


def test_a_missing_model_file_has_triton_s_error(tmp_path: Path) -> None:
    model = version(tmp_path)
    (model.directory / "model.onnx").unlink()
    with pytest.raises(WeirError) as absent:
        OnnxRuntimeBackend().load(model)
    assert absent.value.code == ErrorCode.UNAVAILABLE
    assert absent.value.message == "unable to find 'net/1/model.onnx' for model instance 'net'"


def test_bf16_is_run_as_bit_patterns(tmp_path: Path) -> None:
    model = version(tmp_path, model=graph("Identity", TensorProto.BFLOAT16), datatype="BF16")
    patterns = np.array([[0x3F80, 0x4000, 0xC040]], np.uint16)
    np.testing.assert_array_equal(output_of(model, patterns, "BF16"), patterns)
    assert output_of(model, np.empty((1, 0), np.uint16), "BF16").shape == (1, 0)


# In a separate process, because the pool belongs to the process.
_GLOBAL_POOL = """
import json, sys
from pathlib import Path
import numpy as np
import onnxruntime
from tests.support.models.onnx_files import output_of, parameters, version
from weir.schemas.core.errors import WeirError
from weir.worker.backends.onnxruntime import options as options_module
from weir.worker.backends.onnxruntime.backend import OnnxRuntimeBackend
from weir.worker.backends.onnxruntime.options import OnnxOptions
from weir.worker.backends.onnxruntime.session import open_session

settings = {"enable-global-threadpool": "1", "intra_op_thread_count": "2", "inter_op_thread_count": "1"}
root, seen = Path(sys.argv[1]), []
for number in ("a", "b"):
    model = version(root / number, parameters(intra_op_thread_count="7"), settings=settings)
    assert OnnxRuntimeBackend().describe(model) is not None
    options = open_session(
        onnxruntime, model, OnnxOptions.of(model), [("CPUExecutionProvider", {})]
    ).get_session_options()
    seen.append((options.use_per_session_threads, options.intra_op_num_threads))
    assert (output_of(model, np.ones((1, 2), np.float32)) == -1).all()
print(json.dumps(seen))
"""


def test_a_global_pool_serves_all_sessions(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _GLOBAL_POOL, str(tmp_path)]
    path = str(Path(__file__).parents[5])
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[False, 0], [False, 0]], "models' own counts are of no account"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable-global-threadpool": "perhaps"}, "failed to convert 'perhaps' to boolean"),
        (
            {"enable-global-threadpool": "1", "intra_op_thread_count": "x"},
            "failed to convert 'x' to integral number",
        ),
    ],
)
def test_invalid_settings_are_rejected(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(WeirError) as refused:
        OnnxRuntimeBackend().load(version(tmp_path, settings=settings))
    assert refused.value.message == message


def test_availability_without_a_gpu() -> None:
    availability = OnnxRuntimeBackend().availability(WorkerDevices())
    assert availability.runs_on == ("KIND_CPU",)
    assert availability.version == onnxruntime.__version__
    assert availability.problems == ("KIND_GPU: the driver reports no GPU on this machine",)
    on_gpu_host = OnnxRuntimeBackend().availability(WorkerDevices((0,), (0,)))
    if on_gpu_host.runs_on == ("KIND_CPU",):
        assert "install weir-serve[gpu]" in on_gpu_host.problems[0]


def test_threads_for_all_processors_are_those_of_the_cpu_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "computing_threads", lambda: 3)
    model = version(tmp_path, parameters(intra_op_thread_count="0"))
    assert session_of(model).get_session_options().intra_op_num_threads == 3

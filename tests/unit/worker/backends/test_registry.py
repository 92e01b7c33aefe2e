"""The backend of a configuration, where its file is searched, and which settings it gets."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from weir.commands.doctor.backend_rows import backend_rows
from weir.repository.completion import DescribedModel
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.backend_api.config_support import OWN_BACKEND, PYTHON
from weir.worker.backend_api.interface import Backend, ModelVersion
from weir.worker.backends.custom import CustomBackend
from weir.worker.backends.onnxruntime.backend import OnnxRuntimeBackend
from weir.worker.backends.python.backend import PythonBackend
from weir.worker.backends.registry import BACKENDS, BackendRegistry, built_in, conflict_of
from weir.worker.devices.gpus import HostGpus, WorkerDevices

NAMES_ITSELF = """
from weir.repository.completion import DescribedModel, DescribedTensor

class Backend:
    def describe(self, model):
        return DescribedModel([DescribedTensor({!r}, "TYPE_FP32", [1])], [])

    def load(self, model): ...
"""


def write(file: Path, text: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text or NAMES_ITSELF.format(file.as_posix()))
    return file


def file_of(registry: BackendRegistry, config: ModelConfig, folder: Path, version: int = 1) -> str:
    """The file whose backend describes the version."""
    backend = registry.of(config, folder, version)
    assert registry.kind_of(backend, config) == OWN_BACKEND
    return described_by(backend, ModelVersion(config.name, version, folder, config))


def described_by(backend: Backend, model: ModelVersion) -> str:
    described = backend.describe(model)
    assert isinstance(described, DescribedModel)
    return described.inputs[0].name


@pytest.mark.parametrize(("runtime", "filename"), [("", "backend.py"), ("mine.py", "mine.py")])
def test_a_file_is_searched_where_triton_searches_libraries(tmp_path: Path, runtime: str, filename: str) -> None:
    model = tmp_path / "models" / "m"
    directories = [tmp_path / "first", tmp_path / "second"]
    registry = BackendRegistry(backend_directories=directories)
    config = ModelConfig(name="m", backend="mine", runtime=runtime)
    with pytest.raises(WeirError, match="unable to find backend library"):
        registry.of(config, model)
    places = [directories[1] / "mine", directories[0] / "mine", model, model / "1"]
    for folder in places:
        file = write(folder / filename)
        assert file_of(registry, config, model) == file.as_posix(), "each is preferred to those before"
    assert file_of(registry, config, model, version=2) == (model / filename).as_posix()


def test_each_version_may_have_a_backend_of_its_own(tmp_path: Path) -> None:
    registry = BackendRegistry()
    config = ModelConfig(name="m", backend="mine")
    for version in (1, 2):
        write(tmp_path / str(version) / "backend.py")
    backend = registry.of(config, tmp_path, 1)
    assert described_by(backend, ModelVersion("m", 2, tmp_path, config)).endswith("2/backend.py")


def test_built_in_backends_are_found_by_name(tmp_path: Path) -> None:
    write(tmp_path / "onnxruntime" / "backend.py")
    registry = BackendRegistry(backend_directories=[tmp_path])
    for runtime in ("", "libtriton_onnxruntime.so"):
        config = ModelConfig(name="m", backend="onnxruntime", runtime=runtime)
        assert isinstance(registry.of(config, tmp_path), OnnxRuntimeBackend)
    config = ModelConfig(name="m", backend="onnxruntime", runtime="backend.py")
    assert isinstance(registry.of(config, tmp_path), CustomBackend), "a file that is named is meant"
    (hidden,) = registry.in_directories()
    assert hidden.backend is None
    assert hidden.problem == 'hidden by Weir\'s backend of that name, except from models with runtime: "backend.py"'


def test_python_based_backends_lie_in_backend_directories_only(tmp_path: Path) -> None:
    write(tmp_path / "models" / "m" / "1" / "model.py")
    registry = BackendRegistry(backend_directories=[tmp_path / "backends"])
    with pytest.raises(WeirError, match="unable to find backend library for backend 'based'"):
        registry.of(ModelConfig(name="m", backend="based"), tmp_path / "models" / "m")
    with pytest.raises(WeirError, match=r"unable to find Python backend based backend library 'model\.py'"):
        registry.of(ModelConfig(name="m", backend="based", runtime="model.py"), tmp_path / "models" / "m")
    write(tmp_path / "backends" / "based" / "model.py")
    for runtime in ("", "model.py"):
        config = ModelConfig(name="m", backend="based", runtime=runtime)
        backend = registry.of(config, tmp_path / "models" / "m")
        assert isinstance(backend, PythonBackend)
        assert registry.kind_of(backend, config) == PYTHON
    write(tmp_path / "backends" / "based" / "backend.py")
    assert isinstance(registry.of(ModelConfig(name="m", backend="based"), tmp_path), CustomBackend)


@pytest.mark.parametrize(
    ("backend", "hint"),
    [
        ("dali", "There are based, onnxruntime, python, pytorch, tensorrt (weir backends); others can be written"),
        ("onnx_runtime", "did you mean 'onnxruntime'? There are "),
        ("base", "did you mean 'based'? There are "),
    ],
)
def test_an_unknown_backend_is_told_which_there_are(tmp_path: Path, backend: str, hint: str) -> None:
    write(tmp_path / "based" / "model.py")
    write(tmp_path / "library" / "libtriton_library.so")
    registry = BackendRegistry(backend_directories=[tmp_path])
    with pytest.raises(WeirError) as refused:
        registry.of(ModelConfig(name="m", backend=backend), tmp_path)
    assert (
        f"for backend '{backend}', try specifying runtime on the model configuration. {hint}" in refused.value.message
    )


@pytest.mark.parametrize(
    ("backend", "runtime", "code"),
    [
        ("mine", "../mine.py", ErrorCode.INVALID_ARG),
        ("mine", "/mine.py", ErrorCode.INVALID_ARG),
        ("..", "mine.py", ErrorCode.INVALID_ARG),
        ("../x", "", ErrorCode.INVALID_ARG),
        ("/x", "model.py", ErrorCode.INVALID_ARG),
        ("mine", "libtriton_other.so", ErrorCode.UNSUPPORTED),
        ("", "", ErrorCode.INVALID_ARG),
    ],
)
def test_no_file_outside_the_environment_is_run(tmp_path: Path, backend: str, runtime: str, code: ErrorCode) -> None:
    for folder in (tmp_path, tmp_path / "models", tmp_path / "x"):
        for filename in ("mine.py", "model.py", "backend.py"):
            write(folder / filename)
    registry = BackendRegistry(backend_directories=[tmp_path / "backends"])
    with pytest.raises(WeirError) as refused:
        registry.of(ModelConfig(name="m", backend=backend, runtime=runtime), tmp_path / "models" / "m")
    assert refused.value.code is code


def test_a_link_out_of_the_model_s_folder_is_not_followed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside.py")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine.py").symlink_to(outside)
    with pytest.raises(WeirError, match="must stay within the model's folder"):
        BackendRegistry().of(ModelConfig(name="m", backend="mine", runtime="mine.py"), tmp_path / "m")


def test_backend_directories_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "a" / "own" / "backend.py", "raise OSError('not today')")
    write(tmp_path / "a" / "based" / "model.py")
    write(tmp_path / "b" / "own" / "backend.py")
    write(tmp_path / "b" / "compiled" / "libtriton_compiled.so")
    write(tmp_path / "b" / "python" / "libtriton_python.so")
    write(tmp_path / "b" / "nothing" / "readme.txt")
    registry = BackendRegistry(backend_directories=[tmp_path / "a", tmp_path / "b"])
    found = {row.name: row for row in registry.in_directories()}
    assert list(found) == ["based", "own", "compiled"]
    assert found["own"].file == tmp_path / "a" / "own" / "backend.py"
    assert found["compiled"].problem == "shared libraries of Triton's can't be loaded"
    own = found["own"].backend
    assert own is not None
    problems = own.availability(WorkerDevices()).problems
    assert problems == ("backend 'own': OSError: not today\n\nAt:\n  backend.py(1): <module>\n",)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_reports_its_availability(name: str) -> None:
    module, _, kind = BACKENDS[name].partition(":")
    if find_spec(module) is None:
        with pytest.raises(WeirError, match=f"^UNAVAILABLE: backend '{name}' can't run here: No module named"):
            built_in(name)
    else:
        backend = built_in(name)
        assert type(backend).__name__ == kind
        available = backend.availability(WorkerDevices())
        assert available.runs_on or available.problems


def test_settings_of_all_backends_and_of_one() -> None:
    registry = BackendRegistry(["a=1", "b=1", "python,b=2", "mine,c=3", "python,a=x=y", "onnxruntime,a=9"])
    assert registry.settings_of("pytorch") == {"a": "1", "b": "1"}
    assert registry.settings_of("python") == {"a": "x=y", "b": "2"}
    assert registry.settings_of("mine", PYTHON) == {"a": "x=y", "b": "2", "c": "3"}


def install(folder: Path, *packages: str) -> None:
    """Makes these packages look installed in the folder."""
    for package in packages:
        metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info" / "METADATA"
        write(metadata, f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")


def test_two_packages_that_own_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "gpu", "onnxruntime-gpu")
    monkeypatch.syspath_prepend(tmp_path / "gpu")
    assert conflict_of("onnxruntime") == "", "in folders of their own they don't disturb each other"
    install(tmp_path / "both", "onnxruntime", "onnxruntime-gpu")
    monkeypatch.syspath_prepend(tmp_path / "both")
    assert "pip uninstall onnxruntime onnxruntime-gpu" in conflict_of("onnxruntime")
    assert conflict_of("python") == ""
    with pytest.raises(
        WeirError, match=r"^UNAVAILABLE: backend 'onnxruntime' can't run here: the packages onnxruntime and onnx"
    ):
        BackendRegistry().of(ModelConfig(name="m", backend="onnxruntime"), tmp_path)
    assert isinstance(BackendRegistry().of(ModelConfig(name="m", backend="python"), tmp_path), PythonBackend)
    (reported,) = (row for row in backend_rows(BackendRegistry(), HostGpus()) if row.name == "onnxruntime")
    assert (reported.cpu, reported.problems) == (False, [conflict_of("onnxruntime")])

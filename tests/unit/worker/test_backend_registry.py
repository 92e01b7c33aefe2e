"""Which backend a configuration means, where its file is looked for, and which settings it gets."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from schemas.errors import ErrorCode, WeirError
from schemas.model_config import ModelConfig
from weir.backends_command import backend_rows
from worker.backend import ModelVersion
from worker.backend_registry import BACKENDS, BackendRegistry, built_in
from worker.backend_settings import BackendSettings
from worker.backends.onnxruntime import OnnxRuntimeBackend
from worker.backends.python import PythonBackend
from worker.config_support import OWN_BACKEND, PYTHON
from worker.devices import WorkerDevices
from worker.gpus import HostGpus
from worker.own_backend import OwnBackend
from worker.package_conflicts import conflict_of

NAMES_ITSELF = """
class Backend:
    def load(self, model):
        return Loaded()

class Loaded:
    NAME = {!r}
    def create_instance(self, device): ...
    def unload(self): ...
"""


def write(file: Path, text: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text or NAMES_ITSELF.format(file.as_posix()))
    return file


def loaded_from(registry: BackendRegistry, config: ModelConfig, folder: Path, version: int = 1) -> str:
    """The file that the loaded version names as its code."""
    backend = registry.of(config, folder, version)
    assert registry.kind_of(backend, config) == OWN_BACKEND
    loaded = backend.load(ModelVersion(config.name, version, folder, config))
    return str(loaded._loaded.NAME)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("runtime", "filename"), [("", "backend.py"), ("mine.py", "mine.py")])
def test_a_file_is_looked_for_as_triton_looks_for_libraries(tmp_path: Path, runtime: str, filename: str) -> None:
    model = tmp_path / "models" / "m"
    directories = [tmp_path / "first", tmp_path / "second"]
    registry = BackendRegistry(backend_directories=directories)
    config = ModelConfig(name="m", backend="mine", runtime=runtime)
    with pytest.raises(WeirError, match="unable to find backend library"):
        registry.of(config, model)
    places = [directories[1] / "mine", directories[0] / "mine", model, model / "1"]
    for folder in places:
        file = write(folder / filename)
        assert loaded_from(registry, config, model) == file.as_posix(), "each is preferred to those before"
    assert loaded_from(registry, config, model, version=2) == (model / filename).as_posix()


def test_each_version_may_have_a_backend_of_its_own(tmp_path: Path) -> None:
    registry = BackendRegistry()
    config = ModelConfig(name="m", backend="mine")
    for version in (1, 2):
        write(tmp_path / str(version) / "backend.py")
    backend = registry.of(config, tmp_path, 1)
    loaded = backend.load(ModelVersion("m", 2, tmp_path, config))
    assert loaded._loaded.NAME.endswith("2/backend.py")  # type: ignore[attr-defined]


def test_what_is_part_of_weir_is_found_by_name_alone(tmp_path: Path) -> None:
    write(tmp_path / "onnxruntime" / "backend.py")
    registry = BackendRegistry(backend_directories=[tmp_path])
    for runtime in ("", "libtriton_onnxruntime.so"):
        config = ModelConfig(name="m", backend="onnxruntime", runtime=runtime)
        assert isinstance(registry.of(config, tmp_path), OnnxRuntimeBackend)
    config = ModelConfig(name="m", backend="onnxruntime", runtime="backend.py")
    assert isinstance(registry.of(config, tmp_path), OwnBackend), "a file that is named is meant"
    (hidden,) = registry.in_directories()
    assert hidden.backend is None
    assert hidden.problem == 'hidden by Weir\'s backend of that name, except from models with runtime: "backend.py"'


def test_python_based_backends_lie_in_backend_directories_alone(tmp_path: Path) -> None:
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
    assert isinstance(registry.of(ModelConfig(name="m", backend="based"), tmp_path), OwnBackend)


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
def test_nothing_outside_is_run(tmp_path: Path, backend: str, runtime: str, code: ErrorCode) -> None:
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
def test_every_backend_tells_what_it_can_do_here(name: str) -> None:
    module, _, kind = BACKENDS[name].partition(":")
    if find_spec(module) is None:
        with pytest.raises(WeirError, match=f"^backend '{name}' can't run here: No module named"):
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


def test_the_default_batch_size() -> None:
    assert BackendSettings().default_max_batch_size("onnxruntime") == 4
    settings = BackendSettings(["default-max-batch-size=8", "onnxruntime,default-max-batch-size=0"])
    assert settings.default_max_batch_size("pytorch") == 8
    assert settings.default_max_batch_size("onnxruntime") == 0


FORM = "--backend-config option format is '<backend name>,<setting>=<value>'. Got {}"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        *((text, FORM.format(text)) for text in ("foo", "a,", "python,a=", "=x", "a=b,c", "python,=c", "")),
        (
            ",a=b",
            "No backend specified. --backend-config option format is <backend name>,<setting>=<value> or "
            "<setting>=<value>. Got ,a=b",
        ),
        (
            "python,default-max-batch-size=many",
            "--backend-config: default-max-batch-size is a number of at least 0. Got many",
        ),
    ],
)
def test_settings_of_another_form_are_refused_in_triton_s_words(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        BackendRegistry([text])
    assert str(refused.value) == complaint


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
    with pytest.raises(WeirError, match=r"^backend 'onnxruntime' can't run here: the packages onnxruntime and onnx"):
        BackendRegistry().of(ModelConfig(name="m", backend="onnxruntime"), tmp_path)
    assert isinstance(BackendRegistry().of(ModelConfig(name="m", backend="python"), tmp_path), PythonBackend)
    (told,) = (row for row in backend_rows(BackendRegistry(), HostGpus()) if row.name == "onnxruntime")
    assert (told.cpu, told.problems) == (False, [conflict_of("onnxruntime")])

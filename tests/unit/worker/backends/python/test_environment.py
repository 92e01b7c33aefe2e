"""Environments of Python models: packed, unpacked and from requirements, and their errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.python_scripts import ModelProcess, Models, execute_body, only, python_request
from weir.repository.config_text import config_from_dict
from weir.schemas.core.errors import WeirError
from weir.worker.backend_api.interface import ModelVersion
from weir.worker.backends.python import environment as python_environment
from weir.worker.backends.python.environment import (
    EnvironmentCache,
    PythonEnvironment,
    check_parameters,
    environment_of,
)
from weir.worker.backends.python.process import ProcessSpec

TELL = execute_body(
    """
    import greeting
    reported = {"prefix": sys.prefix, "word": greeting.WORD, "path": os.environ["PATH"].split(":")[0]}
    reported["own"] = [name for name in os.environ if name.startswith("WEIR_")]
    return [pb_utils.InferenceResponse([pb_utils.Tensor("T", np.array([json.dumps(reported)], dtype=object))])]
    """
)

Version = Callable[..., ModelVersion]


@pytest.fixture
def version(tmp_path: Path) -> Version:
    """Creates a model that returns its environment; arguments are its parameters."""
    folder = Models(tmp_path).write(TELL)

    def of(**parameters: str) -> ModelVersion:
        config = {"name": "m", "backend": "python"}
        config["parameters"] = {name: {"string_value": value} for name, value in parameters.items()}
        settings = {"environment-cache": str(tmp_path / "cache")}
        return ModelVersion("m", 1, folder, config_from_dict(config), settings=settings)

    return of


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that could have been unpacked here: its own interpreter, numpy, and a package of its own."""
    folder = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--copies", folder], check=True)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    (site_packages / "greeting.py").write_text("WORD = 'packed'\n")
    packages = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (packages / name).exists():
            (site_packages / name).symlink_to(packages / name)
    return folder


def ask(version: ModelVersion, environment: PythonEnvironment) -> dict:
    process = ModelProcess(ProcessSpec(version.model_directory, 1, environment=environment))
    try:
        process.load(30)
        (output,) = only(process.execute([python_request()])).outputs
    finally:
        process.stop(5)
    return json.loads(bytes(output.data)[4:])


class TestPacked:
    def test_an_unpacked_environment(self, version: Version, environment: Path) -> None:
        """It has no msgpack: the process gets that of the worker, and removes the variable with its path."""
        model = version(EXECUTION_ENV_PATH=str(environment))
        reported = ask(model, environment_of(model))
        assert reported == {
            "prefix": str(environment),
            "word": "packed",
            "path": str(environment / "bin"),
            "own": [],
        }

    def test_an_archive_is_unpacked_once(self, version: Version, environment: Path, tmp_path: Path) -> None:
        model = version(EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/env.tar.gz")
        with tarfile.open(model.model_directory / "env.tar.gz", "w:gz", compresslevel=1) as tar:
            tar.add(
                environment, ".", filter=lambda member: None if member.issym() and "numpy" in member.name else member
            )
        (unlinked,) = environment.glob("lib/python3*/site-packages")
        first = _unpacked_with_numpy(model)
        assert ask(model, environment_of(model))["word"] == "packed"
        assert environment_of(model).interpreter == first.interpreter
        assert Path(first.interpreter).is_relative_to(tmp_path / "cache")
        assert unlinked.exists()

    def test_members_that_lie_outside_are_refused(self, version: Version, tmp_path: Path) -> None:
        (tmp_path / "evil").write_text("x")
        with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as tar:
            tar.add(tmp_path / "evil", "../evil2")
        with pytest.raises(WeirError, match=r"failed to unpack the Python environment .*outside"):
            environment_of(version(EXECUTION_ENV_PATH=str(tmp_path / "env.tar.gz")))
        assert not list((tmp_path / "cache").glob("*/*"))

    def test_a_file_that_is_no_archive(self, version: Version, tmp_path: Path) -> None:
        (tmp_path / "env.tar.gz").write_text("no tar")
        with pytest.raises(WeirError, match="failed to unpack"):
            environment_of(version(EXECUTION_ENV_PATH=str(tmp_path / "env.tar.gz")))

    def test_a_missing_environment(self, version: Version) -> None:
        with pytest.raises(WeirError, match=r"^INTERNAL: Failed to get the canonical path for nowhere\.tar\.gz\.$"):
            environment_of(version(EXECUTION_ENV_PATH="nowhere.tar.gz"))

    def test_an_environment_without_activation_script(self, version: Version, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(WeirError, match=r"bin/activate does not exist\. The Python environment should contain"):
            environment_of(version(EXECUTION_ENV_PATH=str(tmp_path / "empty")))

    def test_without_numpy(self, version: Version, tmp_path: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
        with pytest.raises(WeirError, match=r"lacks the package 'numpy', which every Python model needs"):
            environment_of(version(EXECUTION_ENV_PATH=str(tmp_path / "bare")))

    def test_of_an_old_python(self, version: Version, tmp_path: Path) -> None:
        (tmp_path / "old" / "bin").mkdir(parents=True)
        (tmp_path / "old" / "bin" / "activate").touch()
        python = tmp_path / "old" / "bin" / "python"
        python.write_text("#!/bin/sh\necho '[[3, 8], [\"numpy\"]]'\n")
        python.chmod(0o755)
        with pytest.raises(WeirError, match=r"has Python 3\.8, and models need 3\.11 or later"):
            environment_of(version(EXECUTION_ENV_PATH=str(tmp_path / "old")))


def _unpacked_with_numpy(model: ModelVersion) -> PythonEnvironment:
    """Unpacks the model's archive, which is kept small by leaving numpy out, and puts it in."""
    with pytest.raises(WeirError, match="numpy"):
        environment_of(model)
    cache = Path(model.settings["environment-cache"])
    (site_packages,) = cache.glob("*/lib/python3*/site-packages")
    (site_packages / "own.pth").write_text(str(Path(np.__file__).parents[1]) + "\n")
    return environment_of(model)


class TestRequirements:
    def test_are_installed_once_and_found(self, version: Version, tmp_path: Path) -> None:
        model = version(requirements="requirements.txt")
        _write_wheel(model.model_directory / "wheels")
        (model.model_directory / "requirements.txt").write_text("--no-index\n--find-links wheels\ngreeting==1.0\n")
        made: list[PythonEnvironment] = []
        threads = [threading.Thread(target=lambda: made.append(environment_of(model))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({environment.interpreter for environment in made}) == 1
        assert len(made) == 3
        assert ask(model, made[0])["word"] == "installed"
        assert len(list((tmp_path / "cache").glob("*.lock"))) == 1

    @pytest.mark.parametrize(
        ("text", "environments"),
        [
            ("# two\nnumpy >= 2, <3 ; python_version > '3'\nmsgpack[a,b]~=1.0\n", 1),
            ("--no-index\nnumpy", 2),
            ("numpy @ file:numpy.whl", 2),
            ("./numpy", 2),
            ("numpy-2.0.tar.gz", 2),
        ],
    )
    def test_models_with_the_same_requirements_share_an_environment(
        self, text: str, environments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = EnvironmentCache(tmp_path / "cache")
        monkeypatch.setattr(python_environment, "_run_installer", lambda *arguments: None)
        monkeypatch.setattr(python_environment, "_add_worker_packages", staticmethod(lambda folder: None))
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "needs.txt").write_text(text)
        interpreters = {made.installed(tmp_path / name / "needs.txt", tmp_path / name) for name in ("one", "other")}
        assert len(interpreters) == environments

    def test_requirements_that_can_not_be_installed(self, version: Version, tmp_path: Path) -> None:
        model = version(requirements="needs.txt")
        (model.model_directory / "needs.txt").write_text("--no-index\nno-such-package-anywhere==3\n")
        with pytest.raises(WeirError, match=r"(?s)failed to install 'needs\.txt': .*no-such-package-anywhere"):
            environment_of(model)
        assert not list((tmp_path / "cache").glob("*/*"))

    def test_a_missing_requirements_file(self, version: Version) -> None:
        with pytest.raises(WeirError, match=r"^INVALID_ARG: model 'm' has no requirements file 'none\.txt'$"):
            environment_of(version(requirements="none.txt"))

    def test_together_with_a_packed_environment(self, version: Version) -> None:
        with pytest.raises(WeirError, match="set only one"):
            environment_of(version(requirements="a.txt", EXECUTION_ENV_PATH="b"))


class TestVariables:
    def test_one_thread_by_default(self, version: Version, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setenv("NATS_URL", "secret")
        variables = environment_of(version()).variables()
        assert variables["OMP_NUM_THREADS"] == "1"
        assert "NATS_URL" not in variables
        assert environment_of(version(OMP_NUM_THREADS="3")).variables()["OMP_NUM_THREADS"] == "3"
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert environment_of(version()).variables()["OMP_NUM_THREADS"] == "2"
        assert os.environ["NATS_URL"] == "secret"

    def test_force_cpu_only_input_tensors(self, version: Version) -> None:
        for value in ("yes", "no"):
            check_parameters(version(FORCE_CPU_ONLY_INPUT_TENSORS=value).config)
        with pytest.raises(WeirError, match="Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: maybe"):
            check_parameters(version(FORCE_CPU_ONLY_INPUT_TENSORS="maybe").config)


def _write_wheel(folder: Path) -> None:
    folder.mkdir()
    info = "greeting-1.0.dist-info"
    with zipfile.ZipFile(folder / "greeting-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("greeting.py", "WORD = 'installed'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"greeting.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")

"""The environments of Python models: the interpreter and the variables with which their processes run.

The parameters of a model's configuration choose one of three kinds:
- by default the worker's own interpreter;
- `EXECUTION_ENV_PATH`: a packed environment (conda-pack's tar) or an unpacked one, as in Triton;
- `requirements`: the worker's own packages, preceded by those that a requirements file names.

Packed environments are unpacked, and requirements installed, once on a host (`EnvironmentCache`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgpack

from weir.repository.paths import MAX_REQUIREMENTS_BYTES, read_small_file
from weir.runtime.archives import unpack_tar
from weir.runtime.child_processes import run_in_group
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, internal, invalid
from weir.worker.backend_api.interface import ModelVersion

logger = logging.getLogger("weir.worker")

EXECUTION_ENV_PATH = "EXECUTION_ENV_PATH"
REQUIREMENTS = "requirements"
OMP_NUM_THREADS = "OMP_NUM_THREADS"
FORCE_CPU_ONLY_INPUT_TENSORS = "FORCE_CPU_ONLY_INPUT_TENSORS"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"

OLDEST_PYTHON = (3, 11)
"""The oldest version of Python that can run a model's process."""

INSPECTION_TIMEOUT_S = 60.0

CACHE_SETTING = "environment-cache"
"""The setting of the backend that names the cache's folder (`--backend-config=python,environment-cache=...`)."""

INSTALL_TIMEOUT_S = 1800.0
"""How long the installation of requirements may take."""

STUB_PATH = "WEIR_STUB_PATH"
"""The variable with the path of msgpack, for a process whose environment has none. The process removes it."""

_WITHHELD_VARIABLES = ("WEIR_", "NATS_")
"""Prefixes of variables that user code does not get: they hold the broker's address and credentials."""

_INSPECTION_SCRIPT = """
import importlib.util, json, sys
found = [name for name in ("numpy", "msgpack") if importlib.util.find_spec(name)]
print(json.dumps([sys.version_info[:2], found]))
"""

_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w.,\s-]*\])?\s*([<>=!~][^/@\\]*)?(;[^/@\\]*)?", re.ASCII)
_ARCHIVES = (".whl", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz", ".xz", ".txz", ".lz", ".tlz", ".lzma")
_LAST_LINES = 12
_COMPLETE_MARK = ".complete"


class PythonEnvironment(NamedTuple):
    """An interpreter, and the variables that are added to the worker's, or replace them."""

    interpreter: str = sys.executable
    own: Mapping[str, str] = {}

    def variables(self) -> dict[str, str]:
        """All variables of a process. Numerical libraries use one thread by default, since each instance has a process."""
        return {OMP_NUM_THREADS: "1"} | _inherited_variables() | dict(self.own)


WORKER_ENVIRONMENT = PythonEnvironment()
"""The worker's own interpreter."""


def environment_of(model: ModelVersion) -> PythonEnvironment:
    """The environment that a model's configuration asks for, which is created first where necessary.

    Blocks for as long as an installation takes. Raises WeirError with the reason when it can't be created.
    """
    packed, requirements = _parameter(model, EXECUTION_ENV_PATH), _parameter(model, REQUIREMENTS)
    if packed and requirements:
        raise invalid(
            f"model '{model.name}' has both parameters '{EXECUTION_ENV_PATH}' and '{REQUIREMENTS}': set only one"
        )
    cache = EnvironmentCache.of(model.settings)
    if packed:
        environment = _packed_environment(packed, cache)
    elif requirements:
        file = model.model_directory / requirements
        if not file.is_file():
            raise invalid(f"model '{model.name}' has no requirements file '{requirements}'")
        environment = PythonEnvironment(str(cache.installed(file, model.model_directory)))
    else:
        environment = WORKER_ENVIRONMENT
    threads = _parameter(model, OMP_NUM_THREADS)
    if threads:
        environment = environment._replace(own={**environment.own, OMP_NUM_THREADS: threads})
    return environment


def check_parameters(config: ModelConfig) -> None:
    """Raises WeirError (INVALID_ARG) for an invalid parameter of Triton's Python backend."""
    parameter = config.parameters.get(FORCE_CPU_ONLY_INPUT_TENSORS)
    if parameter is not None and parameter.string_value not in ("yes", "no"):
        raise invalid(f"Incorrect value for {FORCE_CPU_ONLY_INPUT_TENSORS}: {parameter.string_value}'")


class EnvironmentCache:
    """Environments of Python models, created once on a host and kept in `folder`.

    Each has a folder that is named by a digest of what it was created from. Its creator holds a file lock, for which other
    workers and threads wait. It is complete once it contains a marker file, so one that was interrupted is created again.
    All methods block and are for any thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> EnvironmentCache:
        """The cache that the backend's settings name, by default the user's in `$XDG_CACHE_HOME` or `~/.cache`."""
        named = settings.get(CACHE_SETTING)
        if named:
            return cls(Path(named))
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls(Path(home) / "weir" / "python-environments")

    def unpacked(self, archive: Path) -> Path:
        """The folder of a packed environment. An archive that has changed on disk is unpacked again.

        Raises WeirError (INTERNAL) for a file that is no archive, or has members outside of it.
        """
        status = archive.stat()
        key = _key("archive", str(archive), str(status.st_size), str(status.st_mtime_ns))

        def unpack(folder: Path) -> None:
            logger.info("unpacking the Python environment %s", archive)
            try:
                unpack_tar(archive, folder)
            except (tarfile.TarError, EOFError, OSError, ValueError) as error:
                raise internal(f"failed to unpack the Python environment '{archive}': {error}") from error

        return self._created(key, unpack)

    def installed(self, requirements: Path, folder: Path) -> Path:
        """The interpreter of an environment with the worker's own packages and those that `requirements` names.

        Relative paths in the file are relative to `folder`. Models whose files name the same packages, and nothing but
        packages, share an environment. Raises WeirError (INTERNAL) with the last lines of the tool that failed.
        """
        try:
            text = read_small_file(requirements, MAX_REQUIREMENTS_BYTES).decode(errors="replace")
        except OSError as error:
            raise internal(f"failed to read the requirements '{requirements}': {error.strerror}") from error
        key = _key("requirements", text, sys.version, sys.prefix, "" if _is_location_independent(text) else str(folder))

        def install(environment: Path) -> None:
            logger.info("installing %s", requirements)
            python = str(environment / "bin" / "python")
            temporary = environment / ".tmp"
            temporary.mkdir()
            uv = shutil.which("uv")
            if uv is not None:
                create = [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(environment)]
                add = [uv, "pip", "install", "--python", python, "-r", str(requirements)]
            else:
                create = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
                add = [sys.executable, "-m", "pip", "--python", python, "install", "--disable-pip-version-check"]
                add += ["--no-input", "-r", str(requirements)]
            _run_installer(create, folder, requirements, temporary)
            _add_worker_packages(environment)
            _run_installer(add, folder, requirements, temporary)
            shutil.rmtree(temporary, ignore_errors=True)

        return self._created(key, install) / "bin" / "python"

    def _created(self, key: str, create: Callable[[Path], None]) -> Path:
        folder = self._folder / key
        mark = folder / _COMPLETE_MARK
        if mark.exists():
            return folder
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._folder / f"{key}.lock"):
                if not mark.exists():
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir()
                    try:
                        create(folder)
                    except WeirError:
                        shutil.rmtree(folder, ignore_errors=True)
                        raise
                    mark.touch()
        except OSError as error:
            raise internal(f"failed to create a Python environment in '{self._folder}': {error}") from error
        return folder


def _parameter(model: ModelVersion, name: str) -> str:
    return model.config.parameter(name).replace(_MODEL_DIRECTORY, str(model.model_directory.resolve()))


def _inherited_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_WITHHELD_VARIABLES)}


def _packed_environment(location: str, cache: EnvironmentCache) -> PythonEnvironment:
    path = Path(location)
    if not path.exists():
        raise internal(f"Failed to get the canonical path for {location}.")
    folder = path.resolve() if path.is_dir() else cache.unpacked(path.resolve())
    if not (folder / "bin" / "activate").is_file():
        raise internal(
            f"Path {folder}/bin/activate does not exist. The Python environment should contain an 'activate' script."
        )
    interpreter = folder / "bin" / "python"
    if not os.access(interpreter, os.X_OK):
        raise internal(f"the Python environment '{location}' has no executable interpreter 'bin/python'")
    own = _activation_variables(folder)
    if not _has_msgpack(str(interpreter), location, tuple(sorted(own.items()))):
        own[STUB_PATH] = str(Path(msgpack.__file__).parent.parent)
    return PythonEnvironment(str(interpreter), own)


def _activation_variables(folder: Path) -> dict[str, str]:
    """The variables that the environment's activation script sets, and those it needs wherever it was unpacked."""
    before = WORKER_ENVIRONMENT.variables()
    command = ["bash", "-c", 'source "$0" >&2 && exec env -0', str(folder / "bin" / "activate")]
    output = _output(command, before, f"activate the Python environment '{folder}'")
    after = dict(row.split("=", 1) for row in output.split("\0") if "=" in row)
    changed = {name: value for name, value in after.items() if before.get(name) != value and name not in ("_", "SHLVL")}
    # The script may name the folder in which the environment was created, which does not exist here.
    for name, entry in (("PATH", folder / "bin"), ("LD_LIBRARY_PATH", folder / "lib")):
        rest = changed.get(name, before.get(name, "")).split(os.pathsep)
        changed[name] = os.pathsep.join([str(entry), *(other for other in rest if other and other != str(entry))])
    return changed


@lru_cache
def _has_msgpack(interpreter: str, location: str, own: tuple[tuple[str, str], ...]) -> bool:
    """Whether the environment has msgpack; raises WeirError where a model's process can't run in it."""
    variables = PythonEnvironment(interpreter, dict(own)).variables()
    what = f"run the interpreter of the Python environment '{location}'"
    version, packages = json.loads(_output([interpreter, "-c", _INSPECTION_SCRIPT], variables, what))
    if tuple(version) < OLDEST_PYTHON:
        needed, found = (".".join(map(str, numbers)) for numbers in (OLDEST_PYTHON, version))
        raise internal(f"the Python environment '{location}' has Python {found}, and models need {needed} or later")
    if "numpy" not in packages:
        raise internal(f"the Python environment '{location}' lacks the package 'numpy', which every Python model needs")
    return "msgpack" in packages


def _output(command: list[str], variables: Mapping[str, str], what: str) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=variables,
            timeout=INSPECTION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise internal(f"failed to {what}: {error}") from error
    if done.returncode != 0:
        raise internal(f"failed to {what}: {done.stderr.strip()[-2000:] or f'status {done.returncode}'}")
    return done.stdout


def _add_worker_packages(environment: Path) -> None:
    """Puts the worker's packages behind those of the environment, whose own packages of the same names come first."""
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    own = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (site_packages / "weir-own.pth").write_text("\n".join(own) + "\n")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_location_independent(text: str) -> bool:
    """Whether requirements mean the same in every folder: they contain no option, path or file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return all(_PACKAGE.fullmatch(line) and not line.lower().endswith(_ARCHIVES) for line in lines if line)


def _key(*facts: str) -> str:
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def _run_installer(command: list[str], folder: Path, requirements: Path, temporary: Path) -> None:
    # An installer that is killed leaves its temporary files in the environment's folder, which is removed.
    variables = {**_inherited_variables(), "TMPDIR": str(temporary)}
    try:
        done = run_in_group(command, INSTALL_TIMEOUT_S, cwd=folder, stderr=subprocess.STDOUT, env=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise internal(f"failed to install '{requirements.name}': {error}") from error
    if done.returncode != 0:
        last = "\n".join(done.stdout.strip().splitlines()[-_LAST_LINES:])
        raise internal(f"failed to install '{requirements.name}': {last}")

"""`PythonEnvironment`: the interpreter and the variables with which the processes of a Python model run.

Three kinds, by parameters of the model's configuration:
- the worker's own interpreter, if nothing is said;
- `EXECUTION_ENV_PATH`: a packed environment (conda-pack's tar) or an unpacked one, as in Triton;
- `requirements`: the worker's own packages, and beside them what a file of requirements names.

Packed environments and requirements are made once into a cache and stay there: see `python_environment_cache`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgpack

from schemas.errors import internal, invalid
from schemas.model_config import ModelConfig
from worker.backend import ModelVersion
from worker.backends.python_environment_cache import EnvironmentCache

EXECUTION_ENV_PATH = "EXECUTION_ENV_PATH"
REQUIREMENTS = "requirements"
OMP_NUM_THREADS = "OMP_NUM_THREADS"
FORCE_CPU_ONLY_INPUT_TENSORS = "FORCE_CPU_ONLY_INPUT_TENSORS"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"

OLDEST_PYTHON = (3, 11)
"""What a model's process needs."""

EXAMINE_TIMEOUT_S = 60.0

_OWN_VARIABLES = ("WEIR_", "NATS_")

STUB_PATH = "WEIR_STUB_PATH"
"""The variable that tells a model's process where it finds msgpack, if its environment has none. It removes it."""

_EXAMINE = """
import importlib.util, json, sys
found = [name for name in ("numpy", "msgpack") if importlib.util.find_spec(name)]
print(json.dumps([sys.version_info[:2], found]))
"""


class PythonEnvironment(NamedTuple):
    """See the module. `own` are variables that take the place of the worker's, or add to them."""

    interpreter: str = sys.executable
    own: Mapping[str, str] = {}

    def variables(self) -> dict[str, str]:
        """All variables of a process. One thread for numerical libraries, unless somebody said otherwise: there are
        instances for more.
        """
        # Where the broker is and what opens it is no business of user code.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)}
        return {OMP_NUM_THREADS: "1"} | inherited | dict(self.own)


OWN_ENVIRONMENT = PythonEnvironment()
"""The worker's own interpreter."""


def environment_of(model: ModelVersion) -> PythonEnvironment:
    """The environment that a model's configuration asks for, made first where that is needed.

    Blocking, for as long as an installation takes. Raises WeirError with the reason when there is no such environment.
    """
    packed, requirements = _parameter(model, EXECUTION_ENV_PATH), _parameter(model, REQUIREMENTS)
    if packed and requirements:
        raise invalid(
            f"model '{model.name}' has both parameters '{EXECUTION_ENV_PATH}' and '{REQUIREMENTS}': one environment "
            "can't be both"
        )
    cache = EnvironmentCache.of(model.settings)
    if packed:
        environment = _foreign(packed, cache)
    elif requirements:
        environment = PythonEnvironment(str(cache.installed(_file_of(model, requirements), model.model_directory)))
    else:
        environment = OWN_ENVIRONMENT
    threads = _parameter(model, OMP_NUM_THREADS)
    if threads:
        environment = environment._replace(own={**environment.own, OMP_NUM_THREADS: threads})
    return environment


def check_parameters(config: ModelConfig) -> None:
    """Raises WeirError (INVALID_ARG) for a parameter of Triton's Python backend whose value makes no sense."""
    parameter = config.parameters.get(FORCE_CPU_ONLY_INPUT_TENSORS)
    if parameter is not None and parameter.string_value not in ("yes", "no"):
        raise invalid(f"Incorrect value for {FORCE_CPU_ONLY_INPUT_TENSORS}: {parameter.string_value}'")


def _parameter(model: ModelVersion, name: str) -> str:
    parameter = model.config.parameters.get(name)
    value = "" if parameter is None else parameter.string_value
    return value.replace(_MODEL_DIRECTORY, str(model.model_directory.resolve()))


def _file_of(model: ModelVersion, name: str) -> Path:
    path = model.model_directory / name
    if not path.is_file():
        raise invalid(f"model '{model.name}' has no file of requirements '{name}'")
    return path


def _foreign(place: str, cache: EnvironmentCache) -> PythonEnvironment:
    path = Path(place)
    if not path.exists():
        raise internal(f"Failed to get the canonical path for {place}.")
    folder = path.resolve() if path.is_dir() else cache.unpacked(path.resolve())
    if not (folder / "bin" / "activate").is_file():
        raise internal(
            f"Path {folder}/bin/activate does not exist. The Python environment should contain an 'activate' script."
        )
    interpreter = folder / "bin" / "python"
    if not os.access(interpreter, os.X_OK):
        raise internal(f"the Python environment '{place}' has no interpreter 'bin/python' that can be run")
    own = _activated(folder)
    if not _examined(str(interpreter), place, tuple(sorted(own.items()))):
        own[STUB_PATH] = str(Path(msgpack.__file__).parent.parent)
    return PythonEnvironment(str(interpreter), own)


def _activated(folder: Path) -> dict[str, str]:
    """The variables that the environment's own script sets, and those that it needs wherever it was unpacked."""
    before = OWN_ENVIRONMENT.variables()
    command = ["bash", "-c", 'source "$0" >&2 && exec env -0', str(folder / "bin" / "activate")]
    done = _run(command, before, f"activate the Python environment '{folder}'")
    after = dict(row.split("=", 1) for row in done.split("\0") if "=" in row)
    changed = {name: value for name, value in after.items() if before.get(name) != value and name not in ("_", "SHLVL")}
    # A script that names the folder in which the environment was made leads nowhere.
    for name, entry in (("PATH", folder / "bin"), ("LD_LIBRARY_PATH", folder / "lib")):
        rest = changed.get(name, before.get(name, "")).split(os.pathsep)
        changed[name] = os.pathsep.join([str(entry), *(other for other in rest if other and other != str(entry))])
    return changed


@lru_cache
def _examined(interpreter: str, place: str, own: tuple[tuple[str, str], ...]) -> bool:
    """Whether the environment has msgpack; raises WeirError where a model's process can't run in it."""
    variables = PythonEnvironment(interpreter, dict(own)).variables()
    told = _run([interpreter, "-c", _EXAMINE], variables, f"run the interpreter of the Python environment '{place}'")
    version, found = json.loads(told)
    if tuple(version) < OLDEST_PYTHON:
        needed, there = (".".join(map(str, numbers)) for numbers in (OLDEST_PYTHON, version))
        raise internal(f"the Python environment '{place}' is of Python {there}, and models need {needed} or later")
    if "numpy" not in found:
        raise internal(f"the Python environment '{place}' lacks the package 'numpy', which every Python model needs")
    return "msgpack" in found


def _run(command: list[str], variables: Mapping[str, str], what: str) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=variables,
            timeout=EXAMINE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise internal(f"failed to {what}: {error}") from error
    if done.returncode != 0:
        raise internal(f"failed to {what}: {done.stderr.strip()[-2000:] or f'status {done.returncode}'}")
    return done.stdout

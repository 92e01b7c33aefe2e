"""What kind of file a PyTorch model is, told by what is in it: names alone don't say.

All kinds are zip archives. A `.pt2` may be a program of `torch.export` or a package of AOTInductor, and a `.pt` may be
TorchScript or nothing but weights, which are of use only beside the `model.py` that says what to do with them.
"""

from __future__ import annotations

import zipfile
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from schemas.errors import WeirError, invalid, unavailable
from worker.backend import ModelVersion

_MODULE_FILE = "model.py"
_DEFAULT_FILES = ("model.pt", "model.pt2")


class Format(Enum):
    """What the file holds."""

    TORCHSCRIPT = "TorchScript"
    EXPORTED = "torch.export"
    COMPILED = "AOTInductor"
    MODULE = "torch.nn.Module"
    """The source of a class, with weights beside it."""


class Artifact(NamedTuple):
    """A model's file; `weights` are those of a class that is given as source, None where there are none."""

    format: Format
    path: Path
    weights: Path | None = None


def find_artifact(model: ModelVersion) -> Artifact:
    """The file of this version. Raises WeirError when there is none, or it is none that can be served.

    As in Triton: `default_model_filename`, without it `model.pt` and then `model.pt2`; a `model.py` where `runtime` or
    `default_model_filename` names it. Here it is also taken where the file beside it holds only weights.
    """
    config = model.config
    name = config.default_model_filename
    if config.runtime == _MODULE_FILE or name.endswith(".py"):
        return _module(model, name if name.endswith(".py") else _MODULE_FILE)
    is_default = name in ("", *_DEFAULT_FILES)
    names = dict.fromkeys([name, *_DEFAULT_FILES] if is_default else [name])
    path = next((model.directory / name for name in names if name and (model.directory / name).is_file()), None)
    if path is None:
        if is_default and (model.directory / _MODULE_FILE).is_file():
            return _module(model, _MODULE_FILE)
        raise unavailable(f"unable to find '{name or _DEFAULT_FILES[0]}' in version {model.version} of '{model.name}'")
    found = format_of(path)
    if found is not None:
        return Artifact(found, path)
    if (model.directory / _MODULE_FILE).is_file():
        return _module(model, _MODULE_FILE)
    raise _unknown(model, path)


def format_of(path: Path) -> Format | None:
    """The format of a file, None for one that holds weights alone or nothing of PyTorch's."""
    try:
        with zipfile.ZipFile(path) as archive:
            # Everything lies in one folder, whose name is whatever the file was called when it was written.
            members = {name.partition("/")[2] for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError):
        return None
    if any(member.startswith("data/aotinductor/") for member in members):
        return Format.COMPILED
    if any(member.startswith("models/") and member.endswith(".json") for member in members):
        return Format.EXPORTED
    if any(member.startswith("code/") for member in members):
        return Format.TORCHSCRIPT
    return None


def _module(model: ModelVersion, name: str) -> Artifact:
    path = model.directory / name
    if not path.is_file():
        raise unavailable(f"unable to find '{name}' in version {model.version} of '{model.name}'")
    weights = path.with_suffix(".pt")
    return Artifact(Format.MODULE, path, weights if weights.is_file() else None)


def _unknown(model: ModelVersion, path: Path) -> WeirError:
    return invalid(
        f"failed to load model '{model.name}': '{path.name}' is neither TorchScript nor written by torch.export nor "
        "compiled by AOTInductor; weights alone (a state_dict) need a model.py beside them"
    )

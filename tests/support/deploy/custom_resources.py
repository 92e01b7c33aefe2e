"""Validation of custom resources by the full definitions of KEDA 2.20 and prometheus-operator 0.93.

`make test` unpacks packages of cloudcoil into `.venv/custom-resources`. They hold pydantic models that were generated from
the CustomResourceDefinitions. The models need only a few base classes of cloudcoil, which itself needs Python 3.14. This
module provides those classes, and they reject fields that a definition does not have.

The models take 250 MB, so a process of their own validates (`python -m tests.support.deploy.custom_resources`): it reads an
object in each line, answers with a line, and ends with its input.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pydantic

from tests.support.deploy.compose_project import ROOT

FOLDER = ROOT / ".venv" / "custom-resources"

_MODELS = {
    "keda.sh/v1alpha1": Path("keda", "v1alpha1.py"),
    "monitoring.coreos.com/v1": Path("prometheus_operator", "v1.py"),
}


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class _Metadata(pydantic.BaseModel):
    """Any metadata: `kubernetes_schemas` checks it by the schema of Kubernetes."""

    model_config = pydantic.ConfigDict(extra="allow")

    class Builder:
        """Named in annotations of the models."""


class _Generic:
    """Takes the place of the classes that build objects step by step, which nothing here does."""

    def __class_getitem__(cls, _arguments: Any) -> type:
        return cls


_NAMES = {
    "BaseModel": _Strict,
    "Resource": _Strict,
    "ObjectMeta": _Metadata,
    **dict.fromkeys(("BaseBuilder", "BaseModelBuilder", "BuilderContextBase"), _Generic),
    **dict.fromkeys(("GenericListBuilder", "ListBuilderContext"), _Generic),
    **dict.fromkeys(("UNSET", "Never", "Self"), None),
}


def is_custom(item: dict[str, Any]) -> bool:
    """Whether the object is of a kind that KEDA or the Prometheus operator defines."""
    return item["apiVersion"] in _MODELS


def are_installed() -> bool:
    """Whether the packages are there."""
    return FOLDER.is_dir()


def problems(item: dict[str, Any]) -> list[str]:
    """What is wrong with a custom resource, apart from its metadata. Raises RuntimeError where that can't be told: without
    the packages, or for a kind that there is no definition of.
    """
    with _turn:
        process = _process()
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{json.dumps(item)}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"'{item['apiVersion']}' '{item['kind']}' can't be validated: see stderr")
    found: list[str] = json.loads(answer)
    return found


_turn = threading.Lock()


@functools.cache
def _process() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __spec__.name]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)  # it ends its input, and waits for the end of the process
    return process


def _problems(item: dict[str, Any]) -> list[str]:
    model = getattr(_models(item["apiVersion"]), item["kind"])
    try:
        model.model_validate_json(json.dumps(item))
    except pydantic.ValidationError as error:
        return [f"{'/'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return []


@functools.cache
def _models(api_version: str) -> ModuleType:
    path = FOLDER / "cloudcoil" / "models" / _MODELS[api_version]
    name = f"{__name__}_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # Pydantic looks up names of types there, also later.
    sys.modules[name] = module
    bases = ("cloudcoil", "cloudcoil.apimachinery", "cloudcoil.pydantic", "cloudcoil.resources")
    for base in bases:
        provided = ModuleType(base)
        vars(provided).update(_NAMES)
        sys.modules[base] = provided
    try:
        spec.loader.exec_module(module)
    finally:
        for base in bases:
            del sys.modules[base]
    return module


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_problems(json.loads(line))), flush=True)

"""Validation of custom resources by the full definitions of KEDA 2.20 and prometheus-operator 0.93.

`make test` unpacks packages of cloudcoil into `.venv/custom-resources`. They hold pydantic models that were generated from
the CustomResourceDefinitions. The models need only a few base classes of cloudcoil, which itself needs Python 3.14. This
module provides those classes, and they reject fields that a definition does not have.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
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
    """What is wrong with a custom resource, apart from its metadata. Raises FileNotFoundError without the packages, and
    AttributeError for a kind that there is no definition of.
    """
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

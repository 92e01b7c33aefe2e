"""Validation of manifests by the schemas of Kubernetes, KEDA and the Prometheus operator.

Kubernetes' own schemas come with kubernetes-validate, in their strict form; `custom_resources` has those of the others.
"""

from __future__ import annotations

import functools
import json
import re
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.support.deploy import custom_resources

RELEASES = ("v1.31.0", "v1.34.0", "v1.37.0")
"""The releases of Kubernetes that the manifests are checked against, by the OpenAPI schemas of their API servers."""


def problems(item: dict[str, Any], release: str = RELEASES[-1]) -> list[str]:
    """What is wrong with an object by the schema of its kind. Raises FileNotFoundError for a kind without a schema,
    and for a custom resource if the packages with the definitions are not installed.
    """
    if custom_resources.is_custom(item):
        return custom_resources.problems(item) + _found(_metadata_validator(release), item["metadata"], "metadata/")
    return _found(_validator(item["kind"], item["apiVersion"], release), item)


def _found(validator: Draft202012Validator, item: dict[str, Any], place: str = "") -> list[str]:
    found = validator.iter_errors(item)
    return [f"{place}{'/'.join(map(str, problem.absolute_path))}: {problem.message}" for problem in found]


@functools.cache
def _validator(kind: str, api_version: str, release: str) -> Draft202012Validator:
    # As kubernetes-validate names its files: rbac.authorization.k8s.io/v1 is rbac-v1.
    short = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    return _with_definitions(_read(f"{kind.lower()}-{short}.json", release), release)


@functools.cache
def _metadata_validator(release: str) -> Draft202012Validator:
    return _with_definitions(_read("objectmeta-meta-v1.json", release), release)


def _with_definitions(schema: dict[str, Any], release: str) -> Draft202012Validator:
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(release))


@functools.cache
def _definitions(release: str) -> Registry[Any]:
    return Resource.from_contents(_read("_definitions.json", release)) @ Registry()


def _read(name: str, release: str) -> Any:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"{release}-local-strict"
    return json.loads((folder / name).read_text())

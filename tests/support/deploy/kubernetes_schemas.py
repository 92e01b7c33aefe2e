"""Validation of manifests by the schemas of Kubernetes, KEDA and the Prometheus operator.

Kubernetes' own schemas come with kubernetes-validate, in their strict form. Those in `tests/deploy/schemas/` are of the
custom resources (KEDA 2.16, prometheus-operator 0.80), reduced from the models in the cloudcoil packages.
"""

from __future__ import annotations

import functools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

RELEASES = ("v1.31.0", "v1.34.0", "v1.37.0")
"""The releases of Kubernetes that the manifests are checked against, by the OpenAPI schemas of their API servers."""

CUSTOM = {
    "ScaledObject": "keda.sh/v1alpha1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}
"""The custom resources that there are schemas of."""


def problems(item: dict[str, Any], release: str = RELEASES[-1]) -> list[str]:
    """What is wrong with an object by the schema of its kind. Raises FileNotFoundError for a kind that there is none of."""
    found = _validator(item["kind"], item["apiVersion"], release).iter_errors(item)
    return [f"{'/'.join(map(str, problem.absolute_path))}: {problem.message}" for problem in found]


@functools.cache
def _validator(kind: str, api_version: str, release: str) -> Draft202012Validator:
    if CUSTOM.get(kind) == api_version:
        schemas = Path(__file__).parents[2] / "deploy" / "schemas"
        return Draft202012Validator(json.loads((schemas / f"{kind}.json").read_text()))
    # As kubernetes-validate names its files: rbac.authorization.k8s.io/v1 is rbac-v1.
    short = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _read(f"{kind.lower()}-{short}.json", release)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(release))


@functools.cache
def _definitions(release: str) -> Registry[Any]:
    return Resource.from_contents(_read("_definitions.json", release)) @ Registry()


def _read(name: str, release: str) -> Any:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"{release}-local-strict"
    return json.loads((folder / name).read_text())

"""The output of `kubectl kustomize` for a folder, for the features of kustomize that `k8s/` uses; others are rejected.

The order is that of kustomize: resources, generators, components of a folder, patches (JSON 6902, with a target of kind
and name), replicas, the namespace. Names of generated ConfigMaps end in a hash of their content, also where pods refer to
them. Source: kustomize, api/hasher/hasher.go.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

CLUSTER_WIDE = {"Namespace"}
_KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "components",
    "patches",
    "generatorOptions",
    "configMapGenerator",
}


def documents(path: Path) -> list[Any]:
    """The documents of a YAML file."""
    with path.open() as file:
        return [document for document in yaml.safe_load_all(file) if document is not None]


def rendered(folder: Path) -> list[Object]:
    """The objects of a kustomization."""
    return _with_all_of(folder, [])


def _with_all_of(folder: Path, objects: list[Object]) -> list[Object]:
    (reply,) = documents(folder / "kustomization.yaml")
    assert reply.keys() <= _KNOWN, f"{folder}: the tests don't know {reply.keys() - _KNOWN}"
    is_component = reply["kind"] == "Component"
    objects = objects if is_component else []
    for resource in reply.get("resources", ()):
        path = folder / resource
        objects += rendered(path) if path.is_dir() else documents(path)
    options = reply.get("generatorOptions", {})
    for generator in reply.get("configMapGenerator", ()):
        objects.append(_config_map(folder, generator, options))
    for component in reply.get("components", ()):
        objects = _with_all_of(folder / component, objects)
    for patch in reply.get("patches", ()):
        _patch(objects, patch)
    for item in objects:
        if "namespace" in reply and item["kind"] not in CLUSTER_WIDE:
            item["metadata"]["namespace"] = reply["namespace"]
    _refer_to_hashed(objects)
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(names)) == len(names), f"{folder}: twice the same"
    return objects


def _config_map(folder: Path, generator: Object, options: Object) -> Object:
    assert generator.keys() == {"name", "files"}
    labels = {"labels": options["labels"]} if "labels" in options else {}
    data = {name: (folder / name).read_text() for name in generator["files"]}
    name = generator["name"]
    suffix = "" if options.get("disableNameSuffixHash") else f"-{content_hash(data)}"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}{suffix}", **labels},
        "data": data,
    }


def content_hash(data: dict[str, str]) -> str:
    """The end of a ConfigMap's name: from a SHA-256 of its data, without characters that may make words."""
    document = {"data": data or "", "kind": "ConfigMap", "name": ""}  # the name does not count
    text = json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    for character in "<>&\u2028\u2029":  # as Go's encoding of JSON writes them
        text = text.replace(character, f"\\u{ord(character):04x}")
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return digest.translate(str.maketrans("013ae", "ghkmt"))


def _refer_to_hashed(objects: list[Object]) -> None:
    """Has volumes of pods refer to generated ConfigMaps by their names with hashes."""
    maps = [item["metadata"]["name"] for item in objects if item["kind"] == "ConfigMap"]
    for item in objects:
        for volume in item.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", ()):
            if "configMap" in volume:
                named = volume["configMap"]["name"]
                hashed = [name for name in maps if re.fullmatch(rf"{re.escape(named)}-[2-9bcdf-hkmt]{{10}}", name)]
                volume["configMap"]["name"] = hashed[0] if hashed else named


def _patch(objects: list[Object], patch: Object) -> None:
    assert patch.keys() == {"target", "patch"}
    target = patch["target"]
    assert target.keys() <= {"kind", "name"}
    found = [
        item
        for item in objects
        if item["kind"] == target["kind"] and re.fullmatch(target.get("name", ".*"), item["metadata"]["name"])
    ]
    assert found, f"a patch is for nothing: {target}"
    for item in found:
        for operation in yaml.safe_load(patch["patch"]):
            _apply(item, copy.deepcopy(operation))


def _apply(item: Any, operation: Object) -> None:
    """One operation of RFC 6902: `add` to a list or a mapping, `replace`, `remove`."""
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    for part in way:
        item = item[int(part) if isinstance(item, list) else part]
    match operation["op"], item:
        case "add", list():
            item.insert(len(item) if last == "-" else int(last), operation["value"])
        case "add", dict():
            item[last] = operation["value"]
        case "replace", list():
            item[int(last)] = operation["value"]
        case "replace", dict():
            assert last in item, f"nothing to replace at {operation['path']}"
            item[last] = operation["value"]
        case "remove", _:
            del item[int(last) if isinstance(item, list) else last]
        case unknown:
            raise AssertionError(f"the tests don't know {unknown}")

"""The CPU image has what it should and no more, and starts fast."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.deploy.test_images import IMAGES, pins
from tests.support.deploy.container_engine import Engine
from tests.support.deploy.container_project import LABEL, Container

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

MOST_MB = 400


@pytest.fixture(scope="module")
def idle(engine: Engine) -> Iterator[Container]:
    """A container of the image that runs nothing."""
    body = {
        "Image": "weir:cpu",
        "Entrypoint": ["sleep", "600"],
        "Cmd": [],
        "Labels": {LABEL: "image"},
        "StopTimeout": 0,
    }
    container = Container(engine, "weir", engine.ask("POST", "/containers/create", body)["Id"])
    container.start()
    yield container
    engine.ask("DELETE", f"/containers/{container.name}", force=True)


def output(container: Container, *command: str) -> str:
    code, text = container.run(*command)
    assert code == 0, text
    return text.strip()


def test_it_is_small(engine: Engine) -> None:
    assert engine.ask("GET", "/images/weir:cpu/json")["Size"] / 1e6 < MOST_MB


def test_a_change_of_the_sources_makes_one_small_layer_anew(engine: Engine) -> None:
    layers = engine.ask("GET", "/images/weir:cpu/history")
    copies = [layer["Size"] / 1e6 for layer in layers if "/opt/weir" in layer["CreatedBy"] and layer["Size"]]
    assert len(copies) == 2
    assert copies[0] < 20 < copies[1]


def test_it_has_no_pip_and_no_compiler(idle: Container) -> None:
    for program in ("pip", "gcc", "cc", "make", "strip", "node"):
        assert idle.run("sh", "-c", f"command -v {program}")[0] != 0, program
    for python in ("/opt/weir/bin/python", "/usr/local/bin/python"):
        for module in ("pip", "setuptools"):
            code, text = idle.run(python, "-c", f"import {module}")
            assert code == 1, (python, module)
            assert "ModuleNotFoundError" in text


def test_it_runs_as_a_user_that_owns_nothing(idle: Container) -> None:
    assert output(idle, "id", "-u") == output(idle, "id", "-g") == "10001"
    found = output(idle, "sh", "-c", "find / -xdev -user 10001 2>/dev/null; true")
    assert sorted(found.splitlines()) == ["/run/weir", "/var/lib/weir"]
    writable = output(idle, "sh", "-c", "find /opt /usr /etc -xdev -writable -not -type l 2>/dev/null; true")
    assert writable == ""
    setuid = output(idle, "sh", "-c", "find /opt -xdev -perm /6000 2>/dev/null; true")
    assert setuid == ""


def test_the_list_of_its_packages_is_that_of_the_lock(idle: Container) -> None:
    bom = json.loads(output(idle, "cat", "/opt/weir/share/weir/sbom.cdx.json"))
    assert bom["bomFormat"] == "CycloneDX"
    listed = {one["name"].lower().replace("_", "-"): one["version"] for one in bom["components"]}
    locked = pins(IMAGES / "cpu.lock")
    # The lock is of all platforms: it may have packages that this one does not need.
    assert {name: version for name, version in listed.items() if version not in locked.get(name, ())} == {}
    installed = output(idle, "python", "-c", _INSTALLED).split()
    assert set(installed) - {"weir-serve"} == listed.keys()
    assert {one["purl"].partition("/")[0] for one in bom["components"]} == {"pkg:pypi"}


_INSTALLED = """
import importlib.metadata as metadata
print(*(one.name.lower().replace("_", "-") for one in metadata.distributions()))
"""


def test_modules_are_compiled(idle: Container) -> None:
    """A root that can't be written to would have every start compile them."""
    missing = output(idle, "python", "-c", _NOT_COMPILED)
    assert missing == "[]"


_NOT_COMPILED = """
import importlib.util, pathlib, sysconfig
root = pathlib.Path(sysconfig.get_path("purelib"))
print([str(path) for name in ("weir", "grpc", "numpy") for path in (root / name).rglob("*.py")
       if not pathlib.Path(importlib.util.cache_from_source(path)).exists()])
"""


def test_the_web_files_are_there(idle: Container) -> None:
    root = "/opt/weir/lib/python3.11/site-packages"
    for name in ("weir/console/web/vendor/preact.mjs", "weir/gateway/http/openapi/vendor/swagger-ui-bundle.js"):
        assert int(output(idle, "stat", "-c", "%s", f"{root}/{name}")) > 1000


def test_libraries_load_without_their_debugging_information(idle: Container) -> None:
    names = "numpy, onnxruntime, uvloop, rapidjson, grpc, orjson, msgpack, obstore, nacl.signing, pydantic"
    code = (
        f"import {names}; import numpy as n; print(n.linalg.inv(n.eye(3)).sum(), onnxruntime.get_available_providers())"
    )
    assert output(idle, "python", "-c", code).startswith("3.0")


def test_the_command_is_there(idle: Container) -> None:
    assert "weir" in output(idle, "weir", "--version")

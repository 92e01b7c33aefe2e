"""Compose files are translated to requests of a container engine, without one: all keys are known, and mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.deploy.compose_project import PROJECTS, ComposeProject, example_environment
from tests.support.deploy.container_engine import EngineError
from tests.support.deploy.container_project import ContainerProject, seconds, size_in_bytes


def project(name: str) -> ContainerProject:
    return ContainerProject(ComposeProject(PROJECTS[name], example_environment()), None, "test")  # type: ignore[arg-type]


def bodies(name: str) -> dict[str, dict[str, Any]]:
    made = project(name)
    return {service: made.translated(service, described) for service, described in made.project.services.items()}


@pytest.mark.parametrize("name", ["one machine", "roles apart"])
def test_every_key_of_a_shape_is_translated(name: str) -> None:
    for service, body in bodies(name).items():
        host = body["HostConfig"]
        assert host["CapDrop"] == ["ALL"], service
        assert host["SecurityOpt"] == ["no-new-privileges"], service
        assert host.get("Memory", 0) > 0 or service == "nats-data", service


def test_limits_health_and_mounts_are_those_of_the_file() -> None:
    body = bodies("one machine")["weir"]
    host = body["HostConfig"]
    assert (host["Memory"], host["PidsLimit"], host["ShmSize"]) == (8 << 30, 4096, 2 << 30)
    assert (host["Init"], host["ReadonlyRootfs"], body["StopTimeout"]) == (True, True, 90)
    assert body["Healthcheck"]["Interval"] == 5_000_000_000
    assert body["Healthcheck"]["Test"][0] == "CMD"
    by_target = {mount["Target"]: mount for mount in host["Mounts"]}
    assert by_target["/models"]["ReadOnly"]
    assert by_target["/models"]["Type"] == "bind"
    # A free port of the host in the place of each: tests run beside other servers.
    assert host["PortBindings"]["8000/tcp"] == [{"HostIp": "127.0.0.1", "HostPort": ""}]
    shared = bodies("roles apart")["worker"]["HostConfig"]["Mounts"]
    (memory,) = [mount for mount in shared if mount["Target"] == "/dev/shm"]
    assert memory["VolumeOptions"] == {"NoCopy": True}
    assert memory["Source"] == "test-shm"


def test_what_is_not_known_is_rejected() -> None:
    made = project("one machine")
    with pytest.raises(EngineError, match="privileged: not translated"):
        made.translated("weir", {**made.project.services["weir"], "privileged": True})


def test_sizes_and_durations() -> None:
    assert [size_in_bytes(text) for text in ("2gb", "512m", "64k", 7)] == [2 << 30, 512 << 20, 64 << 10, 7]
    assert [seconds(text) for text in ("1m30s", "5s", "200ms", "2h")] == [90, 5, 0.2, 7200]

"""`ContainerProject`: a compose project as containers of an `Engine`, as `docker compose up` would start them.

Services are translated to the engine's interface one to one, health checks and limits included; keys that are not
translated are rejected. The engines that tests may have are older than Compose's second version, which the files need.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.deploy.compose_project import COMPOSE, PROJECTS, ComposeProject, example_environment
from tests.support.deploy.container_engine import Engine, EngineError
from tests.support.waiting import wait_until

LABEL = "weir.tests"
"""Everything that a project makes has this label, with the project's name."""

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}
_WAIT_S = 120.0


@dataclass
class Container:
    """One container of a service."""

    engine: Engine
    service: str
    name: str

    def inspect(self) -> dict[str, Any]:
        """What the engine knows of it."""
        return self.engine.ask("GET", f"/containers/{self.name}/json")

    @property
    def state(self) -> dict[str, Any]:
        """Whether it runs, its health, its exit code, whether it was killed for memory."""
        return self.inspect()["State"]

    @property
    def is_well(self) -> bool:
        """Whether its health check succeeds."""
        return self.state["Running"] and self.state.get("Health", {}).get("Status") == "healthy"

    @property
    def address(self) -> str:
        """Its address in the project's network."""
        (network,) = self.inspect()["NetworkSettings"]["Networks"].values()
        return network["IPAddress"]

    def published(self, port: int) -> str:
        """The `host:port` at which this port of the container is published; another one after each start."""
        (place, *_) = self.inspect()["NetworkSettings"]["Ports"][f"{port}/tcp"]
        return f"{place['HostIp']}:{place['HostPort']}"

    def logs(self, lines: int = 60) -> str:
        """The last lines that it has written."""
        framed = self.engine.raw("GET", f"/containers/{self.name}/logs", stdout=True, stderr=True, tail=lines)
        return _unframed(framed).decode(errors="replace")

    def run(self, *command: str, user: str = "") -> tuple[int, str]:
        """(exit code, output) of a command in the container, as its user or as `user`."""
        body = {"Cmd": list(command), "AttachStdout": True, "AttachStderr": True, "User": user}
        made = self.engine.ask("POST", f"/containers/{self.name}/exec", body)["Id"]
        framed = self.engine.raw("POST", f"/exec/{made}/start", {"Detach": False, "Tty": False})
        output = _unframed(framed).decode(errors="replace")
        return self.engine.ask("GET", f"/exec/{made}/json")["ExitCode"], output

    def start(self) -> None:
        """Starts it, and returns when it runs."""
        self.engine.ask("POST", f"/containers/{self.name}/start")

    def stop(self) -> tuple[int, float]:
        """Stops it as `docker stop` does; (exit code, seconds that it took)."""
        began_s = time.monotonic()
        self.engine.ask("POST", f"/containers/{self.name}/stop")
        return self.state["ExitCode"], time.monotonic() - began_s

    def kill(self) -> None:
        """Sends SIGKILL to all of it, as `docker kill` does: the engine does not restart it."""
        self.engine.ask("POST", f"/containers/{self.name}/kill")

    def crash(self) -> None:
        """Kills what its init process runs, from inside: the engine restarts it, as its restart policy says."""
        self.run("python", "-ISc", _KILL_CHILDREN)

    def wait_well(self, timeout_s: float = _WAIT_S) -> None:
        """Returns when its health check succeeds; fails with its log if it does not."""
        try:
            wait_until(lambda: self.is_well, timeout_s)
        except AssertionError:
            raise AssertionError(f"{self.name} did not become healthy: {self.state}\n{self.logs()}") from None


# The processes whose parent is the container's first one.
_KILL_CHILDREN = """
import os, signal
for name in filter(str.isdigit, os.listdir('/proc')):
    try:
        parent = open(f'/proc/{name}/stat').read().rpartition(') ')[2].split()[1]
        if parent == '1' and int(name) != os.getpid():
            os.kill(int(name), signal.SIGKILL)
    except (OSError, IndexError):
        pass
"""


class ContainerProject:
    """The services of `project` on `engine`. Volumes, networks and containers have `name` before their own."""

    def __init__(self, project: ComposeProject, engine: Engine, name: str) -> None:
        self.project = project
        self.name = name
        self.engine = engine
        self._containers: list[Container] = []
        self._numbers = itertools.count(1)

    def up(self) -> None:
        """Starts all services, each when those that it depends on are as it wants; returns when all are healthy."""
        for kind, path in (("networks", "/networks/create"), ("volumes", "/volumes/create")):
            for short, options in (self.project.document.get(kind) or {}).items():
                self._make(path, short, options or {})
        for service in self._order():
            self._wait_for_dependencies(service)
            deploy = self.project.services[service].get("deploy", {})
            for _ in range(deploy.get("replicas", 1)):
                self.add(service)
        for container in self._containers:
            if "healthcheck" in self.project.services[container.service]:
                container.wait_well()

    def of(self, service: str) -> list[Container]:
        """The containers of a service, in the order of their start."""
        return [container for container in self._containers if container.service == service]

    def add(self, service: str, **changes: Any) -> Container:
        """Starts one more container of a service, whose keys `changes` replace."""
        container = Container(self.engine, service, f"{self.name}-{service}-{next(self._numbers)}")
        described = {**self.project.services[service], **changes}
        self.engine.ask("POST", "/containers/create", self.translated(service, described), name=container.name)
        self._containers.append(container)
        container.start()
        return container

    def remove(self, container: Container) -> None:
        """Removes a container that has ended."""
        self._containers.remove(container)
        self.engine.ask("DELETE", f"/containers/{container.name}", v=True)

    def stop_all(self) -> dict[str, list[tuple[int, float]]]:
        """Stops services in the opposite order of their start, as `docker compose down`; what `stop` returns by service."""
        return {service: [one.stop() for one in self.of(service)] for service in reversed(self._order())}

    def close(self) -> None:
        """Removes the project's containers, networks and volumes, whatever their state."""
        wanted = json.dumps({"label": [f"{LABEL}={self.name}"]})
        for one in self.engine.ask("GET", "/containers/json", all=True, filters=wanted):
            self.engine.ask("DELETE", f"/containers/{one['Id']}", force=True, v=True)
        for one in self.engine.ask("GET", "/networks", filters=wanted):
            self.engine.ask("DELETE", f"/networks/{one['Id']}")
        for one in self.engine.ask("GET", "/volumes", filters=wanted)["Volumes"] or ():
            self.engine.ask("DELETE", f"/volumes/{one['Name']}")

    def _make(self, path: str, short: str, options: dict[str, Any]) -> None:
        _reject_others(short, options, {"driver", "driver_opts"})
        body: dict[str, Any] = {"Name": f"{self.name}-{short}", "Labels": {LABEL: self.name}}
        if options:
            body |= {"Driver": options["driver"], "DriverOpts": options.get("driver_opts", {})}
        self.engine.ask("POST", path, body)

    def _order(self) -> list[str]:
        """The services, each after those that it depends on."""
        ordered: list[str] = []

        def visit(service: str) -> None:
            for needed in self.project.services[service].get("depends_on", ()):
                visit(needed)
            if service not in ordered:
                ordered.append(service)

        for service in self.project.services:
            visit(service)
        return ordered

    def _wait_for_dependencies(self, service: str) -> None:
        needed = self.project.services[service].get("depends_on", {})
        for name, how in needed.items():
            for container in self.of(name):
                match how["condition"]:
                    case "service_healthy":
                        container.wait_well()
                    case "service_completed_successfully":
                        state = wait_until(lambda one=container: _ended(one), _WAIT_S)
                        assert state["ExitCode"] == 0, container.logs()
                    case other:
                        raise EngineError(f"{service}: the condition {other} is not translated")

    def translated(self, service: str, described: dict[str, Any]) -> dict[str, Any]:
        """The body of the engine's request to create a container. Raises EngineError for a key that is not translated."""
        _reject_others(service, described, _TRANSLATED)
        host: dict[str, Any] = {
            "Binds": [],
            "Tmpfs": dict(_tmpfs(entry) for entry in described.get("tmpfs", ())),
            "RestartPolicy": {"Name": described.get("restart", "no")},
            "Init": described.get("init", False),
            "ReadonlyRootfs": described.get("read_only", False),
            "CapDrop": described.get("cap_drop", []),
            "CapAdd": described.get("cap_add", []),
            "SecurityOpt": [
                option.replace("no-new-privileges:true", "no-new-privileges") for option in described["security_opt"]
            ],
            "Ulimits": [_ulimit(*entry) for entry in described.get("ulimits", {}).items()],
            "Sysctls": described.get("sysctls", {}),
            "Mounts": [self._mount(entry) for entry in described.get("volumes", ())],
        }
        if "shm_size" in described:
            host["ShmSize"] = size_in_bytes(described["shm_size"])
        limits = described.get("deploy", {}).get("resources", {}).get("limits", {})
        _reject_others(service, limits, {"memory", "pids", "cpus"})
        if "memory" in limits:
            host["Memory"] = size_in_bytes(limits["memory"])
        if "pids" in limits:
            host["PidsLimit"] = int(limits["pids"])
        if "cpus" in limits:
            host["NanoCpus"] = int(float(limits["cpus"]) * 1e9)
        body = {
            "Image": described["image"],
            "Env": [f"{name}={value}" for name, value in described.get("environment", {}).items()],
            "Labels": {LABEL: self.name},
            "HostConfig": host,
            "ExposedPorts": {},
        }
        for key, name in (
            ("command", "Cmd"),
            ("entrypoint", "Entrypoint"),
            ("user", "User"),
            ("stop_signal", "StopSignal"),
        ):
            if key in described:
                body[name] = described[key]
        if "healthcheck" in described:
            body["Healthcheck"] = _health_check(described["healthcheck"])
        if "stop_grace_period" in described:
            body["StopTimeout"] = round(seconds(described["stop_grace_period"]))
        host["PortBindings"] = ports = {}
        for entry in described.get("ports", ()):
            address, _, inner = entry.rsplit(":", 2)
            body["ExposedPorts"][f"{inner}/tcp"] = {}
            # A free port in the place of the file's: see `Container.published`.
            ports[f"{inner}/tcp"] = [{"HostIp": address, "HostPort": ""}]
        if "network_mode" in described:
            host["NetworkMode"] = described["network_mode"]
        else:
            (network,) = described.get("networks", ["default"])
            host["NetworkMode"] = f"{self.name}-{network}" if "networks" in described else "bridge"
            if "networks" in described:
                body["NetworkingConfig"] = {"EndpointsConfig": {host["NetworkMode"]: {"Aliases": [service]}}}
        return body

    def _mount(self, entry: str | dict[str, Any]) -> dict[str, Any]:
        """A mount of the engine's; the folder of a bind mount must be there, as with `create_host_path: false`."""
        if isinstance(entry, str):
            source, target, *mode = entry.split(":")
            kind = "bind" if source.startswith((".", "/")) else "volume"
            assert mode in ([], ["ro"], ["nocopy"]), f"{mode} is not translated"
            entry = {"type": kind, "source": source, "target": target, "read_only": mode == ["ro"]}
            entry["volume"] = {"nocopy": mode == ["nocopy"]}
        _reject_others("volumes", entry, {"type", "source", "target", "read_only", "bind", "volume"})
        is_bind = entry["type"] == "bind"
        source = str((COMPOSE / entry["source"]).resolve()) if is_bind else f"{self.name}-{entry['source']}"
        mount = {
            "Type": entry["type"],
            "Source": source,
            "Target": entry["target"],
            "ReadOnly": entry.get("read_only", False),
        }
        if not is_bind:
            mount["VolumeOptions"] = {"NoCopy": entry.get("volume", {}).get("nocopy", False)}
        return mount


@contextlib.contextmanager
def started(engine: Engine, name: str, models: Path) -> Iterator[ContainerProject]:
    """The compose project `name` with this model repository, all healthy. Afterwards nothing of it is left."""
    environment = {**example_environment(), "WEIR_MODELS": str(models)}
    project = ContainerProject(ComposeProject(PROJECTS[name], environment), engine, f"weir-{os.getpid()}")
    try:
        project.up()
        yield project
    finally:
        project.close()


_TRANSLATED = {
    "image", "build", "command", "entrypoint", "user", "environment", "volumes", "tmpfs", "shm_size", "healthcheck",
    "ports", "stop_grace_period", "stop_signal", "restart", "init", "read_only", "cap_drop", "cap_add", "security_opt",
    "networks", "network_mode", "depends_on", "deploy", "ulimits", "sysctls",
}  # fmt: skip


def size_in_bytes(text: str | int) -> int:
    """A size of a compose file, as `2gb`, in bytes."""
    found = re.fullmatch(r"(\d+)([a-z]*)", str(text).lower())
    assert found, f"{text} is no size"
    return int(found[1]) * _UNITS[found[2]]


def seconds(text: str) -> float:
    """A duration of a compose file, as `1m30s`, in seconds."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
    parts = re.findall(r"(\d+)(ms|s|m|h)", text)
    assert parts, f"{text} is no duration"
    return sum(int(number) * units[unit] for number, unit in parts)


def _health_check(described: dict[str, Any]) -> dict[str, Any]:
    _reject_others("healthcheck", described, {"test", "interval", "timeout", "start_period", "retries"})
    times = (("interval", "Interval"), ("timeout", "Timeout"), ("start_period", "StartPeriod"))
    translated = {name: int(seconds(described[key]) * 1e9) for key, name in times if key in described}
    return {"Test": described["test"], "Retries": described.get("retries", 3), **translated}


def _ulimit(name: str, limit: int | dict[str, int]) -> dict[str, Any]:
    both = limit if isinstance(limit, dict) else {"soft": limit, "hard": limit}
    return {"Name": name, "Soft": both["soft"], "Hard": both["hard"]}


def _tmpfs(entry: str) -> tuple[str, str]:
    target, _, options = entry.partition(":")
    return target, options


def _reject_others(where: str, given: dict[str, Any], known: set[str]) -> None:
    if others := given.keys() - known:
        raise EngineError(f"{where}: {', '.join(sorted(others))}: not translated; add it to {__name__}")


def _ended(container: Container) -> dict[str, Any] | None:
    state = container.state
    return None if state["Running"] or state["Status"] == "created" else state


def _unframed(framed: bytes) -> bytes:
    """The bytes of an engine's stream: frames with a header of 8 bytes, the last four of which are the length."""
    parts, position = [], 0
    while position + 8 <= len(framed):
        (length,) = struct.unpack_from(">I", framed, position + 4)
        parts.append(framed[position + 8 : position + 8 + length])
        position += 8 + length
    return b"".join(parts)

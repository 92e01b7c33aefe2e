"""`Shape`: the services of a compose project as plain processes, started by the commands in its files.

Each container becomes a process with a loopback address of its own, so that all keep their ports. Commands, environment
and configuration files are adapted: service names become addresses, `0.0.0.0` becomes the process's own address, and
paths in the container become the mounted folders. Services of other programs (proxy, Prometheus, Grafana) are left out.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.deploy.compose_project import COMPOSE, ComposeProject, Mount
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.weir_server import clean_environment
from weir.bus.nats.embedded_server import find_binary
from weir.runtime.child_processes import dies_with_parent

START_S = 60.0


@dataclass
class Container:
    """One process in the place of a container of `service`."""

    service: str
    address: str
    folder: Path
    mounts: dict[str, Path] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it has written."""
        return (self.folder / "log").read_text()


class Shape:
    """A running project; `folder` takes what it writes."""

    def __init__(self, project: ComposeProject, folder: Path) -> None:
        self._project = project
        self._folder = folder
        self.containers: list[Container] = []
        # Any two runs have networks of their own: there are 64 516 of them.
        self._network = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        for name, service in project.services.items():
            if _program(service):
                replicas = service.get("deploy", {}).get("replicas", 1)
                for _ in range(replicas):
                    self.containers.append(self._container(name, service))

    def start(self) -> None:
        """Starts services in the order of what they depend on, each once those are well; returns when all are."""
        for name in self._order():
            for waited, who in self._dependencies():
                if who == name:
                    self._wait_well(waited)
            for container in self.of(name):
                self._start(container)
        for name in self._order():
            self._wait_well(name)

    def of(self, service: str) -> list[Container]:
        """The processes of one service."""
        return [container for container in self.containers if container.service == service]

    def gateways(self, service: str) -> list[Endpoints]:
        """Where the containers of this service listen."""
        return [Endpoints(*(f"{one.address}:{port}" for port in (8000, 8001, 8002))) for one in self.of(service)]

    def end(self) -> dict[str, list[int | None]]:
        """Ends all as `docker compose down` does; the exit statuses by service."""
        statuses: dict[str, list[int | None]] = {}
        for name in reversed(self._order()):
            running = [one.process for one in self.of(name) if one.process]
            for process in running:
                process.send_signal(signal.SIGTERM)
            statuses[name] = [process.wait(90) for process in running]
        return statuses

    def close(self) -> None:
        """Kills what still runs."""
        for container in self.containers:
            if container.process and container.process.poll() is None:
                os.killpg(container.process.pid, signal.SIGKILL)
                container.process.wait()

    def _container(self, name: str, service: dict[str, Any]) -> Container:
        number = len(self.containers) + 1
        folder = self._folder / f"{name}-{number}"
        folder.mkdir()
        container = Container(name, f"{self._network}.{number}", folder)
        for volume in service.get("volumes", ()):
            source, target = Mount.of(volume)
            if target == "/dev/shm":
                continue
            path = COMPOSE / source if source.startswith((".", "/")) else self._folder / "volumes" / source
            if path.is_relative_to(self._folder):
                path.mkdir(parents=True, exist_ok=True)
            container.mounts[target] = path
        for tmpfs in service.get("tmpfs", ()):
            target = tmpfs.partition(":")[0]
            container.mounts[target] = folder / target.strip("/").replace("/", "-")
            container.mounts[target].mkdir()
        return container

    def _start(self, container: Container) -> None:
        service = self._project.services[container.service]
        for target, path in container.mounts.items():
            if path.is_relative_to(COMPOSE):  # configuration that names services
                container.mounts[target] = self._translated_folder(container, path)
        environment = self._environment(container)
        with (container.folder / "log").open("wb") as log:
            container.process = subprocess.Popen(
                [*_program(service), *(self._here(word, container) for word in service["command"])],
                cwd=container.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_parent(),
            )

    def _environment(self, container: Container) -> dict[str, str]:
        service = self._project.services[container.service]
        given = {name: self._here(str(value), container) for name, value in service.get("environment", {}).items()}
        image = _image_environment() if _program(service)[-1] == "weir" else {}
        image = {name: self._here(value, container) for name, value in image.items()}
        # A container has a home of its own, in which its server registers.
        home = {"XDG_DATA_HOME": str(container.folder / "home")}
        return {**clean_environment(container.folder), **home, **image, **given}

    def run(self, container: Container, *words: str) -> str:
        """What `weir` and these words print in the container, as of `docker compose exec`; they must succeed."""
        command = [*_program(self._project.services[container.service]), *words]
        done = subprocess.run(
            command, env=self._environment(container), cwd=container.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _translated_folder(self, container: Container, path: Path) -> Path:
        folder = container.folder / path.name
        folder.mkdir()
        for file in path.iterdir():
            (folder / file.name).write_text(self._here(file.read_text(), container))
        return folder

    def _here(self, text: str, container: Container) -> str:
        """`text` with what it names of the containers' world as it is here."""
        targets = "|".join(map(re.escape, sorted(container.mounts, key=len, reverse=True)))
        if targets:
            text = re.sub(rf"(?<![\w/.])({targets})(?![\w.-])", lambda found: str(container.mounts[found[1]]), text)
        for name in {one.service for one in self.containers}:
            text = re.sub(rf"\b{name}(?=:\d)", self.of(name)[0].address, text)
        return text.replace("0.0.0.0", container.address)

    def _wait_well(self, name: str) -> None:
        for container in self.of(name):
            process = container.process
            assert process is not None

            deadline = time.monotonic() + START_S
            while not self.is_well(container):
                assert process.poll() is None, f"{name} has ended: {container.log}"
                assert time.monotonic() < deadline, f"{name} is not well in time: {container.log}"
                time.sleep(0.2)  # the check is a program of its own

    def is_well(self, container: Container) -> bool:
        """What the container's health check says."""
        test = self._project.services[container.service]["healthcheck"]["test"]
        words = [self._here(word, container).replace("127.0.0.1", container.address) for word in test[1:]]
        if words[0] == "wget":  # of the image; here there may be none
            try:
                with urllib.request.urlopen(words[-1], timeout=3) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False
        words[0] = {"python": sys.executable, "weir-alive": str(COMPOSE / "images" / "weir-alive")}[words[0]]
        environment = {"PATH": os.environ["PATH"]}
        environment |= {name: self._here(value, container) for name, value in _image_environment().items()}
        return subprocess.run(words, env=environment, capture_output=True).returncode == 0

    def _dependencies(self) -> set[tuple[str, str]]:
        """(service that is waited for, who waits), of those that run here."""
        run = {one.service for one in self.containers}
        return {(on, name) for name in run for on in self._project.services[name].get("depends_on", ()) if on in run}

    def _order(self) -> list[str]:
        """The services that run here, each behind those that it depends on."""
        names = list(dict.fromkeys(one.service for one in self.containers))
        waited = {name: {on for on, who in self._dependencies() if who == name} for name in names}
        return sorted(names, key=lambda name: len(waited[name]))


def _program(service: dict[str, Any]) -> list[str]:
    """What stands in the place of the image's entry point; nothing where it isn't ours."""
    if "entrypoint" in service:
        return []
    image = service["image"].partition(":")[0]
    return {"weir": [sys.executable, "-P", "-m", "weir"], "nats": [str(find_binary())]}.get(image, [])


def _image_environment() -> dict[str, str]:
    """What the image sets of ours."""
    return dict(re.findall(r"(WEIR_\w+)=(\S+)", (COMPOSE / "images" / "Dockerfile").read_text()))


def monitor(container: Container, path: str) -> dict[str, Any]:
    """What a nats-server tells at its monitoring port."""
    with urllib.request.urlopen(f"http://{container.address}:8222{path}", timeout=5) as answer:
        reply: dict[str, Any] = json.loads(answer.read())
    return reply

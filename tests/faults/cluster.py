"""`Cluster`: nats-server and any number of each role as separate processes, which are restarted when they die.

It acts as a container orchestrator: a process that exits is restarted after a short delay with the same options and ports.
It has no knowledge of the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.faults.policy import lets_in_the_key_alone, new_key
from tests.faults.steps import PausePoints
from weir import API_KEY_VARIABLE
from weir.bus.nats.embedded_server import find_binary
from weir.runtime.child_processes import dies_with_parent
from weir.runtime.readiness import READY_FD

_ROOT = Path(__file__).parents[2]
_LOOPBACK = "127.0.0.1"
_NATS_PORT = 4222
_LOOK_S = 0.02
_RESTART_S = 0.1
_SAMPLE_S = 0.25
_READY_S = 60.0
_STOP_S = 30.0

Prefix = Sequence[str]
"""Arguments in front of a command, which run it on another host."""


@dataclass(kw_only=True)
class Shape:
    """The processes of a cluster. `syncs` is nats-server's `sync_interval`, "" for its default."""

    schedulers: int = 1
    workers: int = 1
    gateways: int = 1
    syncs: str = "always"
    nats: dict[str, Any] = field(default_factory=dict)
    """Additional nats-server configuration."""
    prefixes: dict[str, Prefix] = field(default_factory=dict)
    """The host of a process, by name."""
    environment: dict[str, dict[str, str]] = field(default_factory=dict)
    """Additional environment of a process, by name."""
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Additional command line options, by role."""
    addresses: dict[str, str] = field(default_factory=dict)
    """The listen address of a process, by name; loopback by default."""
    policy: Path | None = None
    """The access policy of the gateways. The key of a client is then in the variable WEIR_API_KEY of this process."""

    def names(self, role: str) -> list[str]:
        """The processes of a role."""
        counts = {"scheduler": self.schedulers, "worker": self.workers, "gateway": self.gateways, "nats-server": 1}
        return [f"{role}-{number}" for number in range(counts[role])]


class Member:
    """One process across restarts."""

    def __init__(self, name: str, start: Callable[[], subprocess.Popen[bytes]], watches_ready: bool) -> None:
        self.name = name
        self.role = name.rpartition("-")[0]
        self.is_kept = True
        self.process: subprocess.Popen[bytes] | None = None
        self.lives = 0
        self.worst_rss_bytes = 0
        self.watches_ready = watches_ready
        self.start = start
        self.ready_fd: int | None = None
        self.facts: dict[str, Any] = {}
        self.is_ready = False
        self.died_s = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process is not None
        return self.process.pid

    def read_ready(self) -> None:
        """Read the ready pipe."""
        if self.ready_fd is None:
            return
        with contextlib.suppress(BlockingIOError):
            line = os.read(self.ready_fd, 1 << 20)
            reply = json.loads(line) if line.endswith(b"\n") else {}
            self.facts = self.facts or reply
            self.is_ready = bool(reply.get("ready"))
            self.close_ready()

    def close_ready(self) -> None:
        """Close the ready pipe."""
        if self.ready_fd is not None:
            os.close(self.ready_fd)
            self.ready_fd = None


class Cluster:
    """A running cluster. `steps` are the pause points of its roles."""

    def __init__(self, folder: Path, repository: Path, shape: Shape) -> None:
        self.folder = folder
        self.shape = shape
        self.members: dict[str, Member] = {}
        self.steps = PausePoints(folder / "p")
        self._repository = repository
        self._nats_address = shape.addresses.get("nats-server-0", _LOOPBACK)
        self._nats_port = _free_port() if self._nats_address == _LOOPBACK else _NATS_PORT
        self._nats_binary = str(find_binary())
        self._is_ending = False

    @property
    def nats_url(self) -> str:
        """The URL of nats-server."""
        return f"nats://{self._nats_address}:{self._nats_port}"

    def http(self, number: int = 0) -> tuple[str, int]:
        """The HTTP address of a gateway."""
        name = f"gateway-{number}"
        return self._address(name), int(self.members[name].facts["http_port"])

    def grpc(self, number: int = 0) -> str:
        """The gRPC address of a gateway."""
        name = f"gateway-{number}"
        return f"{self._address(name)}:{self.members[name].facts['grpc_port']}"

    def metrics(self, number: int = 0) -> str:
        """The URL of a gateway's metrics."""
        name = f"gateway-{number}"
        return f"http://{self._address(name)}:{self.members[name].facts['metrics_port']}/metrics"

    def _address(self, name: str) -> str:
        return self.shape.addresses.get(name, _LOOPBACK)

    def log(self, name: str) -> str:
        """The log of a process across restarts."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    async def start(self) -> None:
        """Start all processes and wait until they are ready. Raises RuntimeError on a time-out."""
        for role in ("nats-server", "scheduler", "worker", "gateway"):
            for name in self.shape.names(role):
                member = self.members[name] = Member(name, lambda n=name: self._start(n), role != "nats-server")
                self._begin(member)
            await self.until(lambda role=role: all(m.is_ready for m in self.of(role)), _READY_S, f"{role} ready")
        if self.shape.policy is not None:
            os.environ[API_KEY_VARIABLE] = await new_key(f"--nats={self.nats_url}")
            for number in range(self.shape.gateways):
                await lets_in_the_key_alone(self.http(number))

    def of(self, role: str) -> list[Member]:
        """The processes of a role."""
        return [member for member in self.members.values() if member.role == role]

    async def mind(self) -> None:
        """Restart processes that died and sample memory, until cancelled."""
        sampled_s = 0.0
        while not self._is_ending:
            self._look()
            if time.monotonic() - sampled_s > _SAMPLE_S:
                sampled_s = time.monotonic()
                self._sample()
            await asyncio.sleep(_LOOK_S)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process, if it runs."""
        member = self.members[name]
        if member.is_running:
            os.kill(member.pid, number)

    async def until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> None:
        """Wait until `condition` is true. Raises RuntimeError on a time-out."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not within {timeout_s:.0f} s: {what}")
            self._look()
            await asyncio.sleep(_LOOK_S)

    async def whole(self, timeout_s: float = _READY_S) -> None:
        """Wait until every process is ready."""
        await self.until(
            lambda: all(m.is_running and m.is_ready for m in self.members.values() if m.is_kept), timeout_s, "all ready"
        )

    def worst_rss_bytes(self) -> dict[str, int]:
        """The peak memory of a process with its children, by role."""
        worst: dict[str, int] = {}
        for member in self.members.values():
            worst[member.role] = max(worst.get(member.role, 0), member.worst_rss_bytes)
        return worst

    async def end(self) -> list[str]:
        """Stop all processes, gateways first; returns those that had to be killed."""
        self._is_ending = True
        late: list[str] = []
        for role in ("gateway", "worker", "scheduler", "nats-server"):
            members = [member for member in self.of(role) if member.is_running]
            for member in members:
                os.kill(member.pid, signal.SIGCONT)
                os.kill(member.pid, signal.SIGTERM)
            deadline_s = time.monotonic() + _STOP_S
            while any(member.is_running for member in members) and time.monotonic() < deadline_s:
                await asyncio.sleep(_LOOK_S)
            late += [member.name for member in members if member.is_running]
            for member in members:
                self.kill(member.name)
        for member in self.members.values():
            member.close_ready()
            if member.process is not None:
                member.process.wait()
        self.steps.close()
        return late

    def _look(self) -> None:
        now_s = time.monotonic()
        for member in self.members.values():
            if member.is_running:
                if not member.watches_ready:
                    member.is_ready = member.is_ready or _listens(self._nats_address, self._nats_port)
                member.read_ready()
            elif member.is_kept and not self._is_ending:
                if member.died_s == 0.0:
                    member.is_ready, member.died_s = False, now_s
                elif now_s - member.died_s > _RESTART_S:
                    self._begin(member)

    def _begin(self, member: Member) -> None:
        member.close_ready()
        member.is_ready, member.died_s = False, 0.0
        member.lives += 1
        member.process = member.start()

    def _sample(self) -> None:
        for member in self.members.values():
            if member.is_running:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(member.pid)
                    rss_bytes = process.memory_info().rss
                    if member.role == "worker":
                        for child in process.children(recursive=True):
                            with contextlib.suppress(psutil.Error):
                                rss_bytes += child.memory_info().rss
                    member.worst_rss_bytes = max(member.worst_rss_bytes, rss_bytes)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        member, role = self.members[name], self.members[name].role
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WEIR_")}
        environment |= {"PYTHONPATH": str(_ROOT), "WEIR_PAUSE_POINTS": str(self.steps.folder)}
        environment |= self.shape.environment.get(name, {})
        handed_on: tuple[int, ...] = ()
        if role != "nats-server":
            member.ready_fd, announced = os.pipe()
            os.set_blocking(member.ready_fd, False)
            environment[READY_FD] = str(announced)
            handed_on = (announced,)
        with (self.folder / f"{name}.log").open("ab") as log:
            try:
                return subprocess.Popen(
                    [*self.shape.prefixes.get(name, ()), *self._command(name, role)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=handed_on,
                    start_new_session=True,
                    preexec_fn=dies_with_parent(),
                )
            finally:
                for fd in handed_on:
                    os.close(fd)

    def _command(self, name: str, role: str) -> list[str]:
        if role == "nats-server":
            store = self.folder / "store"
            jetstream = {"store_dir": str(store), **({"sync_interval": self.shape.syncs} if self.shape.syncs else {})}
            config = {
                "listen": f"{self._nats_address}:{self._nats_port}",
                "max_payload": 8 << 20,
                "max_pending": 512 << 20,
                "jetstream": jetstream,
                **self.shape.nats,
            }
            file = self.folder / "nats.conf"
            file.write_text(json.dumps(config))
            return [self._nats_binary, "-c", str(file)]
        command = [sys.executable, "-P", "-m", "tests.faults.pause_points", role, f"--nats={self.nats_url}"]
        command += self.shape.options.get(role, ())
        if role == "worker":
            command.append(f"--model-repository={self._repository}")
        if role == "gateway" and self.shape.policy is not None:
            command.append(f"--access-policy={self.shape.policy}")
        if role == "gateway":
            facts = self.members[name].facts
            command += [f"--{door}-port={facts.get(f'{door}_port', 0)}" for door in ("http", "grpc", "metrics")]
            command += [f"--{door}-address={self._address(name)}" for door in ("http", "grpc", "metrics")]
        return command


@contextlib.asynccontextmanager
async def running(folder: Path, repository: Path, shape: Shape) -> AsyncIterator[Cluster]:
    """A supervised cluster, which ends with the context."""
    cluster = Cluster(folder, repository, shape)
    minding: asyncio.Task[None] | None = None
    try:
        await cluster.start()
        minding = asyncio.create_task(cluster.mind())
        yield cluster
    finally:
        if minding is not None:
            minding.cancel()
        await cluster.end()
        if shape.policy is not None:
            os.environ.pop(API_KEY_VARIABLE, None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex((address, port)) == 0

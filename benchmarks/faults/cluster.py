"""`Cluster`: nats-server and any number of each role as processes of their own, which come back when they die.

It stands for what keeps containers running: whoever ends unasked is started again after a moment, with the same options and
the same ports. Nothing in it knows what is asked of the roles.
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

from benchmarks.faults.steps import Steps
from bus.embedded import find_binary
from bus.parent_death import dies_with_parent
from telemetry.readiness import READY_FD

_ROOT = Path(__file__).parents[2]
_LOOPBACK = "127.0.0.1"
_NATS_PORT = 4222
_LOOK_S = 0.02
_RESTART_S = 0.1
_SAMPLE_S = 0.25
_READY_S = 60.0
_STOP_S = 30.0

Prefix = Sequence[str]
"""Words in front of a command, which put it on another host."""


@dataclass(kw_only=True)
class Shape:
    """What a cluster is made of. `syncs` is nats-server's `sync_interval`, "" for its own."""

    schedulers: int = 1
    workers: int = 1
    gateways: int = 1
    syncs: str = "always"
    nats: dict[str, Any] = field(default_factory=dict)
    """More of nats-server's configuration."""
    prefixes: dict[str, Prefix] = field(default_factory=dict)
    """By the name of a process: on which host it runs."""
    environment: dict[str, dict[str, str]] = field(default_factory=dict)
    """By the name of a process: more of its environment."""
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By role: options of its command."""
    addresses: dict[str, str] = field(default_factory=dict)
    """By the name of a process: where it listens, if not on loopback."""

    def names(self, role: str) -> list[str]:
        """The processes of a role."""
        counts = {"scheduler": self.schedulers, "worker": self.workers, "gateway": self.gateways, "nats-server": 1}
        return [f"{role}-{number}" for number in range(counts[role])]


class Member:
    """One process over all its lives."""

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
        """Whether it has a process now."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.process is not None
        return self.process.pid

    def read_ready(self) -> None:
        """Looks whether it has said that it is ready."""
        if self.ready_fd is None:
            return
        with contextlib.suppress(BlockingIOError):
            line = os.read(self.ready_fd, 1 << 20)
            told = json.loads(line) if line.endswith(b"\n") else {}
            self.facts = self.facts or told
            self.is_ready = bool(told.get("ready"))
            self.close_ready()

    def close_ready(self) -> None:
        """Nothing more is expected of the pipe."""
        if self.ready_fd is not None:
            os.close(self.ready_fd)
            self.ready_fd = None


class Cluster:
    """See the module. `steps` are the pause points of its roles."""

    def __init__(self, folder: Path, repository: Path, shape: Shape) -> None:
        self.folder = folder
        self.shape = shape
        self.members: dict[str, Member] = {}
        self.steps = Steps(folder / "p")
        self._repository = repository
        self._nats_address = shape.addresses.get("nats-server-0", _LOOPBACK)
        self._nats_port = _free_port() if self._nats_address == _LOOPBACK else _NATS_PORT
        self._nats_binary = str(find_binary())
        self._is_ending = False

    @property
    def nats_url(self) -> str:
        """Of nats-server."""
        return f"nats://{self._nats_address}:{self._nats_port}"

    def http(self, number: int = 0) -> tuple[str, int]:
        """Where a gateway takes HTTP."""
        name = f"gateway-{number}"
        return self._address(name), int(self.members[name].facts["http_port"])

    def metrics(self, number: int = 0) -> str:
        """The URL of a gateway's metrics."""
        name = f"gateway-{number}"
        return f"http://{self._address(name)}:{self.members[name].facts['metrics_port']}/metrics"

    def _address(self, name: str) -> str:
        return self.shape.addresses.get(name, _LOOPBACK)

    def log(self, name: str) -> str:
        """What all lives of a process wrote."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    async def start(self) -> None:
        """Returns when all are ready. Raises RuntimeError where one isn't in time."""
        for role in ("nats-server", "scheduler", "worker", "gateway"):
            for name in self.shape.names(role):
                member = self.members[name] = Member(name, lambda n=name: self._start(n), role != "nats-server")
                self._begin(member)
            await self.until(lambda role=role: all(m.is_ready for m in self.of(role)), _READY_S, f"{role} ready")

    def of(self, role: str) -> list[Member]:
        """The processes of a role."""
        return [member for member in self.members.values() if member.role == role]

    async def mind(self) -> None:
        """Starts again who has died, and looks at how much memory is used; for ever."""
        sampled_s = 0.0
        while not self._is_ending:
            self._look()
            if time.monotonic() - sampled_s > _SAMPLE_S:
                sampled_s = time.monotonic()
                self._sample()
            await asyncio.sleep(_LOOK_S)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to the process, if it runs."""
        member = self.members[name]
        if member.is_running:
            os.kill(member.pid, number)

    async def until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> None:
        """Returns once `condition` is true. Raises RuntimeError where it isn't in time."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not within {timeout_s:.0f} s: {what}")
            self._look()
            await asyncio.sleep(_LOOK_S)

    async def whole(self, timeout_s: float = _READY_S) -> None:
        """Returns when every process runs and is ready."""
        await self.until(
            lambda: all(m.is_running and m.is_ready for m in self.members.values() if m.is_kept), timeout_s, "all ready"
        )

    def worst_rss_bytes(self) -> dict[str, int]:
        """By role: the most that one of its processes, with its children, had in memory."""
        worst: dict[str, int] = {}
        for member in self.members.values():
            worst[member.role] = max(worst.get(member.role, 0), member.worst_rss_bytes)
        return worst

    async def end(self) -> list[str]:
        """Ends all, those that ask before those that answer; returns who did not end by itself."""
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
        command = [sys.executable, "-P", "-m", "weir", role, f"--nats={self.nats_url}"]
        command += self.shape.options.get(role, ())
        if role == "worker":
            command.append(f"--model-repository={self._repository}")
        if role == "gateway":
            facts = self.members[name].facts
            command += [f"--{door}-port={facts.get(f'{door}_port', 0)}" for door in ("http", "grpc", "metrics")]
            command += [f"--{door}-address={self._address(name)}" for door in ("http", "grpc", "metrics")]
        return command


@contextlib.asynccontextmanager
async def running(folder: Path, repository: Path, shape: Shape) -> AsyncIterator[Cluster]:
    """A cluster that is minded; everything of it ends with the context."""
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex((address, port)) == 0

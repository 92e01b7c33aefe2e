"""`Engine`: a Docker engine that builds Weir's images and runs them, and how one is had.

An engine that answers already (a developer's Docker, CI's) is used as it is. Else, as root and with Debian's packages
`docker.io` and `debootstrap`, a private one is started: `dockerd` in namespaces of its own for processes, mounts and
networks, so that no port, address or rule of the machine changes, and everything it started ends with it. Tests reach the
ports that it publishes by joining its network (`Engine.joined`).

To build, a private engine runs once before that in the machine's network, without a bridge and without rules for packets.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support.waiting import wait_until
from weir.runtime.child_processes import dies_with_parent

API = "/v1.41"
"""The version of the engine's interface: that of Docker 20.10, the oldest in use here."""

KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weir-containers"
"""Where images, build cache and the base image stay for the next run if WEIR_CONTAINERS_KEEP is set."""

_PROGRAMS = ("dockerd", "containerd", "runc", "iptables", "ip", "unshare")
_CLONE_NEWNET = 0x40000000  # linux/sched.h; Python 3.11 has no name for it
_ENGINE_START_S = 60.0

_KEY = Path("/etc/docker/key.json")
"""Written by dockerd wherever it starts, whatever its options."""


class EngineError(Exception):
    """The engine does not start, rejected a request, or a build failed."""


class Engine:
    """A Docker engine behind `socket`. `namespace` is a process in its network, None if it has the machine's."""

    def __init__(self, socket: str, client: str, namespace: int | None = None) -> None:
        self._client = client
        self._socket = socket
        self._namespace = namespace
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=socket), base_url=f"http://engine{API}", timeout=httpx.Timeout(150.0)
        )

    def close(self) -> None:
        """Ends the connection to the engine."""
        self._http.close()

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """The reply to a request to the engine's interface: parsed JSON, None for an empty one.

        Raises EngineError with the engine's message for a status of 400 or more.
        """
        response = self._request(method, path, body, query)
        return response.json() if response.content and "json" in response.headers.get("content-type", "") else None

    def raw(self, method: str, path: str, body: Any = None, **query: Any) -> bytes:
        """As `ask`; the bytes of the reply."""
        return self._request(method, path, body, query).content

    def _request(self, method: str, path: str, body: Any, query: dict[str, Any]) -> httpx.Response:
        # Not `json=None`: the engine takes an empty body with a JSON content type for a malformed one.
        content = {} if body is None else {"json": body}
        response = self._http.request(method, path, params=query, **content)
        if response.status_code >= 400:
            raise EngineError(f"{method} {path}: {response.status_code} {response.text.strip()}")
        return response

    def has_image(self, name: str) -> bool:
        """Whether there is an image of this name."""
        return self._http.get(f"/images/{name}/json").status_code == 200

    def command(self, *words: str, timeout_s: float = 900.0, stdin: Any = None) -> str:
        """The output of `docker WORDS`. Raises EngineError with what it wrote if it fails."""
        done = subprocess.run(
            [self._client, "--host", f"unix://{self._socket}", *words],
            env={**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"},
            stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise EngineError(f"docker {' '.join(words)}: exit status {done.returncode}\n{done.stdout[-8000:]}")
        return done.stdout

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Puts the calling thread, and threads that it starts from now on, into the engine's network for the context."""
        if self._namespace is None:
            yield
            return
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        its = os.open(f"/proc/{self._namespace}/ns/net", os.O_RDONLY)
        try:
            _set_network(its)
            yield
        finally:
            _set_network(own)
            os.close(own)
            os.close(its)


def missing() -> str:
    """Why no engine can be had on this machine; empty if one can."""
    client = _client()
    if client is None:
        return "there is no `docker` command that builds with BuildKit (Debian: apt-get install docker.io)"
    if _running_engine(client):
        return ""
    if os.geteuid() != 0:
        return "no Docker engine answers, and starting a private one takes root"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return (
            f"no Docker engine answers, and a private one needs {', '.join(absent)} (Debian: apt-get install docker.io)"
        )
    return ""


class Engines:
    """The engine of a run of tests: `building` first, then `running`. Images made by the first are those of the second."""

    def __init__(self) -> None:
        client = _client()
        assert client, missing()
        self._client = client
        self._existing = _running_engine(client)
        self._is_kept = bool(os.environ.get("WEIR_CONTAINERS_KEEP"))
        if self._is_kept:
            KEPT.mkdir(parents=True, exist_ok=True)
        self.folder = KEPT if self._is_kept else Path(tempfile.mkdtemp(prefix="weir-containers-"))
        """Takes what lasts as long as the engine: its data, and a base image."""

    @property
    def is_private(self) -> bool:
        """Whether the engine was started for this run, by this process."""
        return self._existing is None

    @contextlib.contextmanager
    def building(self) -> Iterator[Engine]:
        """An engine whose builds reach the network of the machine (`--network host`)."""
        offline = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")
        with self._engine(["unshare", "--mount"], offline) as engine:
            yield engine

    @contextlib.contextmanager
    def running(self) -> Iterator[Engine]:
        """An engine that runs containers. A private one has a network that leads nowhere."""
        with self._engine(["unshare", "--mount", "--net"], ()) as engine:
            yield engine

    def close(self) -> None:
        """Removes what a private engine leaves: images, volumes, logs."""
        if not self._is_kept:
            shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def _engine(self, namespaces: list[str], options: Sequence[str]) -> Iterator[Engine]:
        if self._existing:
            engine = Engine(self._existing, self._client)
            try:
                yield engine
            finally:
                engine.close()
            return
        with tempfile.TemporaryDirectory(prefix="weir-engine-") as folder:
            socket, log = Path(folder, "docker.sock"), Path(folder, "log")
            group = f"weir-{os.getpid()}"
            # With the process namespace's first process all others in it end, whatever state they are in.
            command = [*namespaces, "--pid", "--fork", "--kill-child", "--mount-proc", "--", "sh", "-ec", _START, "sh"]
            command += [f"--data-root={self.folder / 'data'}", f"--exec-root={folder}/run", f"--pidfile={folder}/pid"]
            command += [f"--host=unix://{socket}", f"--cgroup-parent=/{group}", "--oom-score-adjust=0", *options]
            had_key = _KEY.exists()
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, preexec_fn=dies_with_parent()
                )
            try:
                wait_until(lambda: _answers(str(socket)) or process.poll() is not None, _ENGINE_START_S)
                if process.poll() is not None:
                    raise EngineError(f"dockerd does not start here: {log.read_text()[-2000:].strip()}")
                engine = Engine(str(socket), self._client, process.pid)
                try:
                    yield engine
                finally:
                    engine.close()
            finally:
                _end(process)
                _remove_groups(group)
                if not had_key:
                    _KEY.unlink(missing_ok=True)


_START = """
ip link set lo up 2>/dev/null || true
exec dockerd "$@"
"""


def _client() -> str | None:
    """A `docker` that builds with BuildKit: up to Docker 22 it does so itself, then with the plug-in buildx."""
    for folder in os.get_exec_path():
        found = shutil.which("docker", path=folder)
        if not found:
            continue
        version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
        major = int("".join(filter(str.isdigit, version.partition("version ")[2].partition(".")[0])) or 0)
        if major < 23 or subprocess.run([found, "buildx", "version"], capture_output=True).returncode == 0:
            return found
    return None


def _running_engine(client: str) -> str | None:
    """The socket of the engine that `docker` would use, if it answers there."""
    done = subprocess.run([client, "context", "inspect"], capture_output=True, text=True)
    host = os.environ.get("DOCKER_HOST")
    if not host and done.returncode == 0:
        host = json.loads(done.stdout)[0]["Endpoints"]["docker"].get("Host", "")
    socket = (host or "unix:///var/run/docker.sock").removeprefix("unix://")
    return socket if _answers(socket) else None


def _answers(socket: str) -> bool:
    if not Path(socket).exists():
        return False
    with contextlib.suppress(httpx.HTTPError), httpx.Client(transport=httpx.HTTPTransport(uds=socket)) as http:
        return http.get("http://engine/_ping", timeout=5).status_code == 200
    return False


def _set_network(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the engine in order, so that its data is whole; what is left in its namespaces is killed."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(children.read_text().split()[0]), signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _remove_groups(name: str) -> None:
    """Removes the engine's empty control groups, deepest first."""
    for root in Path("/sys/fs/cgroup").glob(f"**/{name}") if Path("/sys/fs/cgroup").exists() else ():
        for folder in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
        with contextlib.suppress(OSError):
            root.rmdir()

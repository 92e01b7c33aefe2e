"""`Start`: roles as commands of their own against one nats-server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from endpoints import Endpoints
from role_process import RoleProcess
from serving import segments_of

from bus.embedded import EmbeddedNats


class Start:
    """Starts roles against one nats-server, and ends them."""

    def __init__(self, folder: Path, nats: Any = None) -> None:
        """`nats` is where they connect to, something with a `url` and `stop`; without it a server is started."""
        (folder / "logs").mkdir()
        self.folder = folder
        self._roles: list[RoleProcess] = []
        self.nats = nats
        if nats is None:
            self.nats = EmbeddedNats(folder / "nats")
            self.nats.start()

    def __call__(self, role: str, *options: str, host: str = "") -> RoleProcess:
        url = self.nats.url_of(role) if hasattr(self.nats, "url_of") else self.nats.url
        self._roles.append(RoleProcess(self.folder / "logs", role, f"--nats={url}", *options, host=host))
        return self._roles[-1]

    def worker(self, *options: str, host: str = "") -> RoleProcess:
        """A worker of the test's models, on another host than this where that is named."""
        return self("worker", f"--model-repository={self.folder / 'models'}", *options, host=host)

    def gateway(self, *options: str) -> Endpoints:
        """Where a new gateway listens."""
        ports = self("gateway", "--http-port=0", "--grpc-port=0", "--metrics-port=0", *options).facts
        return Endpoints(*(f"127.0.0.1:{ports[f'{name}_port']}" for name in ("http", "grpc", "metrics")))

    def logs(self) -> str:
        """What all roles have logged."""
        return "".join(role.log() for role in self._roles)

    def end_all(self) -> None:
        """Ends what still runs, those that ask before those that answer; nothing may be left of it."""
        running = [role for role in self._roles if role.process.poll() is None]
        segments = segments_of([role.process.pid for role in running])
        for role in reversed(running):
            assert role.end() == 0, role.log()
        assert not {name for name in segments if Path("/dev/shm", name).exists()}

    def close(self) -> None:
        """Kills what still runs."""
        for role in self._roles:
            role.process.kill()
            role.process.wait()
        self.nats.stop()

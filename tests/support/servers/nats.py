"""nats-server as operators run it: with any configuration, alone or as a cluster of three.

`make_certificates` writes an authority, a server and a client certificate signed by it, and wrong ones. `publish_raw`
publishes bytes that no client library would send, on a bare socket. `replicas_of` reads a stream's replicas.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nats

from tests.support.waiting import wait_until
from weir.bus.naming.permissions import USERS
from weir.bus.nats.embedded_server import find_binary
from weir.runtime.child_processes import dies_with_parent

_POLL_S = 0.03


class GivenNats:
    """One server with its store in `folder`; `syncs` is its `sync_interval`, None for nats-server's own."""

    def __init__(self, folder: Path, syncs: str | None = None, monitor: bool = True, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "listen": "127.0.0.1:-1",
            "jetstream": {"store_dir": str(folder), **({"sync_interval": syncs} if syncs else {})},
            "ports_file_dir": str(folder),
            **({"http": "127.0.0.1:-1"} if monitor else {}),
            **options,
        }
        self._file = folder / "nats.conf"
        self._config = config
        self._file.write_text(json.dumps(config))
        self.process = subprocess.Popen([find_binary(), "-c", self._file], stderr=subprocess.DEVNULL)
        self._ports = folder / f"nats-server_{self.process.pid}.ports"
        wait_until(lambda: bool(self._read()))
        told = self._read()
        self.url: str = told["nats"][0]
        self.monitor: str = told["monitoring"][0] if monitor else ""

    def _read(self) -> dict[str, list[str]]:
        try:
            told: dict[str, list[str]] = json.loads(self._ports.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return told

    def reload(self, **changes: Any) -> None:
        """Has it read its configuration again, with other options."""
        self._file.write_text(json.dumps({**self._config, "listen": self.url.split("//")[1], **changes}))
        self.process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()


class PermittedNats:
    """One server with the users of `weir nats-permissions`; `log_text` is what it has logged.

    `users` is the command's output, with users `broker_users` of clients.
    """

    def __init__(self, folder: Path, users: str, broker_users: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True)
        self._log = folder / "log"
        file = folder / "nats.conf"
        file.write_text(
            f'listen: "127.0.0.1:-1"\nports_file_dir: "{folder}"\nmax_payload: 8388608\n'
            f'jetstream {{ store_dir: "{folder}" }}\n{users}'
        )
        passwords = {f"WEIR_{user.upper()}_PASSWORD": f"of-{user}" for user in USERS}
        passwords |= {f"WEIR_USER_{user.upper().replace('-', '_')}_PASSWORD": f"of-{user}" for user in broker_users}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [find_binary(), "-c", file], stderr=log, env={**os.environ, **passwords}, preexec_fn=dies_with_parent()
            )
        ports = folder / f"nats-server_{self.process.pid}.ports"
        wait_until(lambda: ports.exists() and ports.read_text().endswith("}"))
        self._place = json.loads(ports.read_text())["nats"][0].removeprefix("nats://")
        self.url = self.url_of("admin")

    def url_of(self, user: str) -> str:
        """Where this user connects to, with the password in it."""
        return f"nats://weir-{user}:of-{user}@{self._place}"

    def url_of_client(self, name: str) -> str:
        """The same for a user of a client."""
        return f"nats://{name}:of-{name}@{self._place}"

    @property
    def log_text(self) -> str:
        """What it has logged."""
        return self._log.read_text()

    @property
    def violations(self) -> list[str]:
        """What it has forbidden."""
        return [line for line in self.log_text.splitlines() if "Violation" in line]

    def stop(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()


class ClusterNode:
    """One server of a `NatsCluster`. What it is asked for comes from its monitor."""

    def __init__(self, folder: Path, name: str, ports: tuple[int, int, int], routes: list[str], **options: Any) -> None:
        folder.mkdir(parents=True)
        self.name = name
        self.url = f"nats://127.0.0.1:{ports[0]}"
        self.monitor = f"http://127.0.0.1:{ports[2]}"
        self.log = folder / "log"
        config = {
            "server_name": name,
            "listen": f"127.0.0.1:{ports[0]}",
            "http": f"127.0.0.1:{ports[2]}",
            "max_payload": 8 << 20,
            "jetstream": {"store_dir": str(folder / "store"), "max_mem": "8G", "max_file": "32G"},
            "cluster": {"name": "tests", "listen": f"127.0.0.1:{ports[1]}", "routes": routes, "pool_size": -1},
            **options,
        }
        self._file = folder / "nats.conf"
        self._file.write_text(json.dumps(config))
        self.start()

    def start(self) -> None:
        """Starts it, or again where it has ended."""
        # Without a preexec_fn: it may be started in a thread, with which it would end, beside threads of gRPC's.
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([find_binary(), "-c", self._file], stderr=log)

    def told(self, path: str) -> dict[str, Any]:
        """What its monitor says; nothing while it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.monitor}/{path}", timeout=2) as answer:
                told: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):
            return {}
        return told

    @property
    def is_healthy(self) -> bool:
        """Whether it has all that it is to keep."""
        return self.told("healthz").get("status") == "ok"

    @property
    def clients(self) -> list[str]:
        """The names of its connections."""
        return [client.get("name", "") for client in self.told("connz").get("connections", [])]

    @property
    def is_meta_leader(self) -> bool:
        """Whether it leads JetStream's API."""
        return bool(self.told("jsz").get("meta_cluster", {}).get("leader") == self.name)

    @property
    def led(self) -> set[str]:
        """The streams ("QUEUE") and consumers ("QUEUE event-m") that it leads, and "API" if it leads JetStream's API."""
        told = self.told("jsz?accounts=true&streams=true&consumers=true")
        leaders = {"API": told.get("meta_cluster", {}).get("leader")}
        for account in told.get("account_details", []):
            for stream in account.get("stream_detail", []):
                leaders[stream["name"]] = stream.get("cluster", {}).get("leader")
                for consumer in stream.get("consumer_detail") or []:
                    leaders[f"{stream['name']} {consumer['name']}"] = consumer.get("cluster", {}).get("leader")
        return {name for name, leader in leaders.items() if leader == self.name}

    def leads(self, stream: str) -> bool:
        """Whether it leads this stream."""
        accounts = self.told("jsz?accounts=true&streams=true").get("account_details", [])
        streams = [found for account in accounts for found in account.get("stream_detail", [])]
        return any(s["name"] == stream and s.get("cluster", {}).get("leader") == self.name for s in streams)

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()


class NatsCluster:
    """Three servers in one cluster, with JetStream."""

    def __init__(self, folder: Path, **options: Any) -> None:
        ports = _free_ports(9)
        routes = [f"nats://127.0.0.1:{port}" for port in ports[3:6]]
        self.nodes = [
            ClusterNode(folder / f"n{i}", f"n{i}", (ports[i], ports[3 + i], ports[6 + i]), routes, **options)
            for i in range(3)
        ]
        try:
            wait_until(self.is_whole, 30.0)
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        """All three, as `--nats` takes them."""
        return ",".join(node.url for node in self.nodes)

    def is_whole(self) -> bool:
        """Whether all three are there, and have a leader."""
        return all(node.is_healthy for node in self.nodes) and any(node.is_meta_leader for node in self.nodes)

    def leader_of(self, stream: str) -> ClusterNode:
        """The server that leads a stream; of JetStream's API for ""."""
        return wait_until(
            lambda: next((n for n in self.nodes if (n.leads(stream) if stream else n.is_meta_leader)), None), 30.0
        )

    def elections(self, lost: ClusterNode, led: set[str], since_s: float, timeout_s: float = 30.0) -> dict[str, float]:
        """When each of `led`, which the lost server led, had another leader: in seconds after `since_s` (monotonic)."""
        others = [node for node in self.nodes if node is not lost]
        elected: dict[str, float] = {}
        while len(elected) < len(led) and time.monotonic() < since_s + timeout_s:
            for node in others:
                for name in node.led & led:
                    elected.setdefault(name, time.monotonic() - since_s)
            time.sleep(_POLL_S)
        return elected

    def stop(self) -> None:
        """Ends all of them."""
        for node in self.nodes:
            node.kill()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def make_certificates(folder: Path) -> Path:
    """Files `<name>.pem` and `<name>.key` in `folder`: ca, other (an authority too), server, client, expired."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ca", "other"):
        openssl(
            "req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}"
        )
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name, days in (("server", "2"), ("client", "2"), ("expired", "0")):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", days, "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return folder


def publish_raw(url: str, *messages: tuple[bytes, bytes, bytes]) -> None:
    """Publishes messages of (subject, reply subject, data), and returns once nats-server has taken them."""
    where = urlsplit(url)
    assert where.hostname is not None
    options = {"verbose": False, "pedantic": False, "headers": True}
    if where.username:
        options |= {"user": unquote(where.username), "pass": unquote(where.password or "")}
    with socket.create_connection((where.hostname, where.port or 4222), timeout=10) as connection:
        lines = b"".join(
            b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(data), data) for subject, reply, data in messages
        )
        connection.sendall(b"CONNECT %b\r\n%bPING\r\n" % (json.dumps(options).encode(), lines))
        answered = b""
        while not answered.endswith(b"PONG\r\n"):
            more = connection.recv(65536)
            assert more, f"nats-server closed the connection: {answered[-200:]!r}"
            answered += more


async def replicas_of(url: str) -> set[int]:
    """How many servers keep its streams: all the numbers there are."""
    client = await nats.connect(url.split(","))
    try:
        return {info.config.num_replicas for info in await client.jetstream().streams_info()}
    finally:
        await client.close()

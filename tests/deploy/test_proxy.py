"""HAProxy, with the configuration of compose, starts with few descriptors and ends in order while connections are open."""

from __future__ import annotations

import re
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.deploy.compose_project import COMPOSE
from tests.support.waiting import wait_until
from weir.runtime.child_processes import dies_with_parent

CONFIG = (COMPOSE / "haproxy" / "haproxy.cfg").read_text()
DOOR = yaml.safe_load((COMPOSE / "roles.yaml").read_text())["services"]["door"]
HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")


def hard_stop_s() -> int:
    """After how many seconds the configuration ends the connections that are left."""
    found = re.search(r"^  hard-stop-after (\d+)s$", CONFIG, re.MULTILINE)
    assert found
    return int(found[1])


def test_connections_that_last_do_not_have_it_killed() -> None:
    assert DOOR["stop_signal"] == "SIGUSR1"
    assert hard_stop_s() + 2 <= int(DOOR["stop_grace_period"].removesuffix("s"))


@pytest.fixture
def backend() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@needs_haproxy
@pytest.mark.parametrize("descriptors", [1024, 4096])
def test_it_starts_with_few_descriptors_and_ends_with_status_0(
    descriptors: int, backend: socket.socket, tmp_path: Path
) -> None:
    ports = {"8000": free_port(), "8001": free_port()}
    text = CONFIG.replace(f"hard-stop-after {hard_stop_s()}s", "hard-stop-after 1s")
    for documented, port in ports.items():
        text = text.replace(f"bind :{documented}", f"bind 127.0.0.1:{port}")
    place = f"127.0.0.1:{backend.getsockname()[1]}"
    text = re.sub(r"server-template gateway 16 gateway:\d+ check", f"server gateway {place}", text)
    (tmp_path / "haproxy.cfg").write_text(text)
    die_with_parent = dies_with_parent()

    def limit() -> None:
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with (tmp_path / "log").open("wb") as log:
        # As the image's entry point starts it.
        process = subprocess.Popen(
            [str(HAPROXY), "-W", "-db", "-f", tmp_path / "haproxy.cfg"], stdout=log, stderr=log, preexec_fn=limit
        )

    def connected() -> socket.socket | None:
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            return socket.create_connection(("127.0.0.1", ports["8001"]), timeout=1)
        except OSError:
            return None

    def is_stopping() -> bool:
        process.send_signal(signal.SIGUSR1)
        return "Exiting Master process" in (tmp_path / "log").read_text()

    try:
        with wait_until(connected) as client:
            client.sendall(b"x")
            accepted, _ = backend.accept()
            with accepted:
                assert accepted.recv(1) == b"x"
                wait_until(is_stopping, 10.0)  # it loses a signal that comes in the moment of its start
                assert process.wait(10) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()

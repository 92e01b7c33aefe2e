"""`weir top` against a running server: once as plain text, and live in a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_identity, write_slow
from tests.support.servers.weir_server import Server

COMMAND = [sys.executable, "-P", "-m", "weir", "top"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("top")
    write_identity(folder / "models", "fast", "INT64", "dynamic_batching { }")
    write_slow(folder / "models")
    with Server(folder, folder / "models") as started:
        yield started


class Load:
    """Requests to model `slow`, of 50 ms each, one after the other, until the end of the block."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        value = {"VALUE": np.array([[7]], np.int64), "DELAY_MS": np.array([[50]], np.float32)}
        with self._server.http() as client:
            while not self._ended.is_set():
                client.infer("slow", http_inputs(value))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def test_without_a_terminal_it_prints_a_table_with_the_rates_of_now(server: Server) -> None:
    with Load(server):
        printed = subprocess.run(
            [*COMMAND, f"--nats={server.nats_url}", "--every=2"], capture_output=True, text=True, timeout=60
        )
    assert (printed.returncode, printed.stderr) == (0, "")
    lines = printed.stdout.splitlines()
    assert "1 gateway, 1 scheduler, 1 worker" in lines[0]
    assert re.search(r"[0-9.]+ req/s  0 fail/s  p50 [0-9.]+ p99 [0-9.]+ ms", lines[1])
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("slow", "fast"))}
    name, rate, p50, p99 = rows["slow"][:4]
    assert name == "slow"
    assert float(rate) > 0
    assert float(p50) > 45
    assert float(p99) >= float(p50)
    assert rows["slow"][-1] == "ready"
    assert rows["fast"][1] == "0"


def test_without_a_broker_it_says_so(tmp_path: Path) -> None:
    printed = subprocess.run(
        [*COMMAND, "--once", "--nats=nats://127.0.0.1:1"], capture_output=True, text=True, timeout=60
    )
    assert printed.returncode == 2
    assert printed.stderr.startswith("weir top: no NATS server answers at ")
    assert "Traceback" not in printed.stderr


def test_in_a_terminal_of_80_columns_it_shows_the_models_and_quits(server: Server) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    with Load(server):
        process = subprocess.Popen(
            [*COMMAND, f"--nats={server.nats_url}"],
            stdin=follower, stdout=follower, stderr=follower, env=environment,
        )  # fmt: skip
        os.close(follower)
        try:
            _read_until(leader, r"slow +[1-9][0-9.]* ")
            os.write(leader, b"\r")
            _read_until(leader, r"VERSION STATE")
            os.write(leader, b"q")
            _drain(leader, process)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
            os.close(leader)


def _read_until(leader: int, pattern: str, timeout_s: float = 30.0) -> None:
    """Reads what is drawn until `pattern` was, without the sequences that move the cursor and set colours."""
    drawn, end_s = "", time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if select.select([leader], [], [], 0.2)[0]:
            drawn += os.read(leader, 65_536).decode(errors="replace")
            if re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", drawn)):
                return
    pytest.fail(f"{pattern!r} was not drawn: {drawn[-3000:]!r}")


def _drain(leader: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        if select.select([leader], [], [], 0.2)[0]:
            try:
                os.read(leader, 65_536)
            except OSError:
                return  # the other end is closed

"""Gateways that share their ports, as the systemd units run them, are restarted one by one under load: no request fails."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.clients.request_ledger import Ledger
from tests.support.models.zoo import write_identity, write_slow
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.free_ports import free_port
from tests.support.servers.roles import Start
from tests.support.servers.weir_server import clean_environment
from tests.support.waiting import wait_until
from weir.runtime.child_processes import dies_with_parent

SHARED = ("--reuse-http-port=true", "--reuse-grpc-port=true", "--strict-readiness=false")


class Unit:
    """A gateway that is started as a service of type `notify`: `started` returns when it is ready."""

    def __init__(self, folder: Path, url: str, http_port: int, grpc_port: int) -> None:
        self._folder = folder
        self._command = [sys.executable, "-P", "-m", "weir", "gateway", f"--nats={url}", "--metrics-port=0", *SHARED]
        self._command += [f"--http-port={http_port}", f"--grpc-port={grpc_port}"]
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver, (self._folder / "log").open("ab") as log:
            path = self._folder / "notify"
            path.unlink(missing_ok=True)
            receiver.bind(str(path))
            receiver.settimeout(30)
            environment = {**clean_environment(self._folder), "NOTIFY_SOCKET": str(path)}
            process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=log, preexec_fn=dies_with_parent()
            )
            assert receiver.recv(100) == b"READY=1"
        return process

    def restart(self) -> None:
        """As `systemctl restart`."""
        self.stop()
        self.process = self._started()

    def stop(self) -> None:
        """As `systemctl stop`."""
        self.process.terminate()
        assert self.process.wait(30) == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_gateways_that_share_ports_are_restarted_one_by_one(tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "fast", "INT64", "dynamic_batching { }")
    write_slow(tmp_path / "models")
    start = Start(tmp_path)
    units: list[Unit] = []
    try:
        start("scheduler")
        start.worker()
        ports = free_port(), free_port()
        for number in range(2):
            (tmp_path / f"gateway-{number}").mkdir()
            units.append(Unit(tmp_path / f"gateway-{number}", start.nats.url, *ports))
        server = Endpoints(f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", "")
        wait_until(lambda: server.is_ready("fast") and server.is_ready("slow"))
        with Ledger(server, threads=12).sending() as ledger:
            ledger.wait_for_answers(time.monotonic())
            for unit in units * 2:
                unit.restart()
                ledger.wait_for_answers(time.monotonic())
        assert ledger.unanswered == 0
        assert ledger.faults == []
    finally:
        for unit in units:
            unit.stop()
        start.end_all()
        start.nats.stop()

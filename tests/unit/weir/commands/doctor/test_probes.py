"""The probes measure this machine, and notice what is changed on it."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weir.bus.nats.embedded_server import MINIMUM_VERSION
from weir.commands.doctor import probes
from weir.commands.doctor.facts import PortFacts
from weir.commands.listening import IN_USE, listen_problem
from weir.worker.devices.gpus import HostGpus


def test_ports_are_the_defaults_of_the_options() -> None:
    found = {port.name: (port.option, port.port) for port in probes.probe_ports()}
    assert {"http", "grpc", "metrics"} <= found.keys()
    assert found["http"] == ("--http-port", 8000)
    assert found["console"] == ("--console-port", 8080)
    assert {"sagemaker", "vertex ai", "nats"} & found.keys() == set()


def test_a_port_in_use_is_named_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert listen_problem("127.0.0.1", port) == IN_USE
        user, is_weir = probes._user_of(port)
        assert user.startswith(f"process {os.getpid()} (")
        assert not is_weir
    assert listen_problem("127.0.0.1", port) == ""


@pytest.mark.parametrize(
    ("command", "is_weir"), [("weir serve --http-port 1", True), ("weir gateway", True), ("weirdo serving", False)]
)
def test_a_server_of_weir_is_known_by_its_command(command: str, is_weir: bool) -> None:
    code = (
        "import socket, sys\n"
        "with socket.create_server(('127.0.0.1', 0)) as listener:\n"
        "    print(listener.getsockname()[1], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command.split()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert probes._user_of(int(process.stdout.readline()))[1] is is_weir
    finally:
        process.communicate("")


def test_limits_are_those_of_the_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
    try:
        found = probes.probe_limits()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.open_files == min(soft, 1000)
    assert 0 < found.memory_bytes <= found.machine_memory_bytes
    assert 1 <= found.processors <= found.machine_processors


def test_shared_memory_nats_server_and_python() -> None:
    memory = probes.probe_shared_memory()
    assert memory is not None
    assert 0 <= memory.free_bytes <= memory.total_bytes
    server = probes.probe_nats_server()
    assert Path(server.path).is_file()
    assert tuple(map(int, server.version.split("."))) >= MINIMUM_VERSION
    python = probes.probe_python()
    assert (python.uvloop_problem, python.version) == ("", sys.version.split()[0])


def test_the_cost_of_a_sync_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    began_s = time.perf_counter()
    found = probes.probe_disk(tmp_path / "not" / "there" / "yet")
    took_s = time.perf_counter() - began_s
    assert found.folder == tmp_path
    assert len(found.syncs_s) == probes.SYNCS
    assert min(found.syncs_s) > 0
    assert sum(found.syncs_s) <= took_s, "in seconds"
    assert 0 < found.free_bytes <= found.total_bytes
    assert found.file_system
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(file: int) -> None:
        time.sleep(0.02)

    monkeypatch.setattr(os, "fsync", slow)
    assert min(probes.probe_disk(tmp_path).syncs_s) >= 0.02


def test_a_folder_in_memory_is_noticed() -> None:
    assert probes.probe_disk(Path("/dev/shm")).file_system == "tmpfs"


def test_a_folder_that_is_not_writable() -> None:
    found = probes.probe_disk(Path("/proc/1"))
    assert found.syncs_s == ()
    assert found.problem


def test_the_clock() -> None:
    began_ns = time.perf_counter_ns()
    clock = probes.probe_clock()
    assert 1 < clock.monotonic_ns * probes._CLOCK_READS <= time.perf_counter_ns() - began_ns
    assert clock.is_synchronized in (True, False, None)


def test_without_a_driver_there_is_no_cuda() -> None:
    found = probes.probe_gpu(HostGpus(problem="none"))
    if found.cuda_version is None:
        assert found.driver_version == ""
    assert all(major >= 11 for _, _, major in found.packages)


def test_the_command_prints_json(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "weir", "doctor", "--json", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    document = json.loads(done.stdout)
    assert done.returncode == int(document["state"] == "problem"), done.stderr
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["nats-server"]["state"] == "ok"
    assert str(tmp_path) in checks["disk sync"]["finding"]


def test_without_any_use_a_port_has_no_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert probes._user_of(port) == ("", False)
    assert PortFacts("http", "--http-port", "127.0.0.1", port).problem == ""

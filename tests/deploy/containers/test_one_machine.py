"""`compose.yaml` on an engine: `weir serve` in a container, asked, stopped, killed, and limited as the file says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.clients.producers import int64_body
from tests.support.clients.request_ledger import Ledger
from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.deploy.container_engine import Engine
from tests.support.deploy.container_project import Container, ContainerProject, size_in_bytes, started
from tests.support.servers.endpoints import Endpoints
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def machine(engine: Engine, models: Path) -> Iterator[ContainerProject]:
    with started(engine, "one machine", models) as project:
        yield project


@pytest.fixture
def weir(machine: ContainerProject) -> Container:
    (container,) = machine.of("weir")
    container.wait_well()
    return container


def endpoints(container: Container) -> Endpoints:
    """Where its published ports are."""
    return Endpoints(*map(container.published, (8000, 8001, 8002)))


def ask(server: Endpoints, values: np.ndarray) -> None:
    with server.http() as http, server.grpc() as grpc:
        for answer in (
            http.infer("fast", http_inputs({"IN": values})),
            grpc.infer("fast", grpc_inputs({"IN": values})),
        ):
            np.testing.assert_array_equal(answer.as_numpy("OUT"), values)


def test_it_answers_stock_clients(weir: Container) -> None:
    server = endpoints(weir)
    ask(server, np.arange(6).reshape(1, 6))
    ask(server, np.arange(500_000).reshape(1, -1))  # by reference, in shared memory
    assert server.metrics()["nv_inference_request_success", "fast"] == 4


def test_it_is_ready_again_after_a_stop(weir: Container, report: Callable[[str], None]) -> None:
    """With two models, one of them in a process of its own; the report has the seconds from the container's start."""
    assert weir.stop()[0] == 0
    began_s = time.monotonic()
    weir.start()
    server = endpoints(weir)
    wait_until(lambda: server.is_ready("fast"))
    ready_s = time.monotonic() - began_s
    wait_until(lambda: server.is_ready(), 60)
    report(
        f"weir serve: `fast` ready {ready_s:.1f} s, all {time.monotonic() - began_s:.1f} s after the container's start"
    )


def test_it_may_do_what_the_file_allows_and_no_more(machine: ContainerProject, weir: Container) -> None:
    service = machine.project.services["weir"]
    code, status = weir.run("sh", "-c", "for i in /proc/[0-9]*; do cat $i/status; done")
    assert code == 0
    fields = [
        line.split(":\t") for line in status.splitlines() if line.startswith(("Cap", "NoNewPrivs", "Seccomp:", "Uid"))
    ]
    found = {name: {value for key, value in fields if key == name} for name, _ in fields}
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert found[name] == {"0" * 16}, name
    assert found["NoNewPrivs"] == {"1"}
    assert found["Seccomp"] == {"2"}
    assert found["Uid"] == {"\t".join(["10001"] * 4)}
    assert weir.run("sh", "-c", "echo x > /opt/weir/x")[0] != 0
    assert weir.run("sh", "-c", "echo x > /models/x")[0] != 0
    assert weir.run("touch", "/usr/x", user="0")[1].strip().endswith("Read-only file system")
    host = weir.inspect()["HostConfig"]
    limits = service["deploy"]["resources"]["limits"]
    assert host["Memory"] == size_in_bytes(limits["memory"])
    assert host["PidsLimit"] == limits["pids"]
    kib = weir.run("sh", "-c", "df -k /dev/shm | tail -1")[1].split()[1]
    assert int(kib) * 1024 == size_in_bytes(service["shm_size"])


def test_commands_find_the_server_from_within(weir: Container) -> None:
    """As docs/operations.md shows: `docker compose exec weir weir status`."""
    code, text = weir.run("weir", "status")
    assert code == 0, text
    assert "fast" in text
    code, text = weir.run("weir", "dead", "list")
    assert code == 0, text


def test_a_stop_under_load_loses_no_request_that_was_accepted(weir: Container, report: Callable[[str], None]) -> None:
    with Ledger(endpoints(weir), threads=8).sending() as ledger:
        ledger.wait_for_answers(time.monotonic())
        code, took_s = weir.stop()
        stopped_s = time.monotonic()
    assert code == 0, weir.logs()
    assert ledger.unanswered == 0
    # Its clients go on asking what is no more there; what was wrong before is of requests on the way.
    wrong = [entry for entry in ledger.entries if entry.fault and entry.sent_s < stopped_s - took_s]
    assert [entry.fault for entry in wrong] == []
    report(f"weir serve: stopped under load in {took_s:.1f} s, {len(ledger.entries)} requests")
    assert "Traceback" not in weir.logs(400)
    weir.start()
    weir.wait_well()


def test_what_is_accepted_outlives_the_container(machine: ContainerProject, weir: Container) -> None:
    url = f"http://{endpoints(weir).http_place}/v2/models/fast/infer"
    answer = httpx.post(url, content=int64_body(7), headers={"Prefer": "respond-async"})
    assert answer.status_code == 202
    location = answer.headers["location"]
    assert weir.stop()[0] == 0
    machine.remove(weir)
    fresh = machine.add("weir")
    fresh.wait_well()
    again = endpoints(fresh)
    status = wait_until(lambda: (found := json.loads(again.get(location)[1]))["status"] == "succeeded" and found, 30)
    assert status["model"] == "fast"


def test_a_crash_is_survived(weir: Container, report: Callable[[str], None]) -> None:
    starts = weir.inspect()["RestartCount"]
    began_s = time.monotonic()
    weir.crash()
    wait_until(lambda: weir.inspect()["RestartCount"] > starts)
    weir.wait_well()
    ask(endpoints(weir), np.arange(3).reshape(1, 3))
    report(f"weir serve: healthy {time.monotonic() - began_s:.1f} s after it was killed")


def test_it_leaves_its_volume_and_nothing_else(machine: ContainerProject, weir: Container) -> None:
    """In shared memory and in temporary folders too, after kills."""
    assert weir.stop()[0] == 0
    assert not weir.state["OOMKilled"]
    # Mount points and its init process are the engine's; Weir could not write there.
    changed = machine.engine.ask("GET", f"/containers/{weir.name}/changes") or []
    ours = ("/opt", "/home", "/var", "/models", "/root", "/usr/local", "/usr/lib")
    assert [one["Path"] for one in changed if one["Path"].startswith(ours)] == []
    weir.start()
    weir.wait_well()
    names = weir.run("ls", "/dev/shm")[1].split()
    server = endpoints(weir)
    ask(server, np.arange(500_000).reshape(1, -1))
    wait_until(lambda: server.in_flight() == 0)
    assert len(weir.run("ls", "/dev/shm")[1].split()) <= len(names) + 8

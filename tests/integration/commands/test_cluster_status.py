"""`weir status` of separate roles: a healthy cluster, and deaths, which it shows."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.interrupts import accept_interrupts
from tests.support.models.zoo import write_identity
from tests.support.servers.roles import RoleProcess, Start
from tests.support.servers.weir_server import clean_environment
from tests.support.waiting import wait_until
from weir.cluster.status.snapshot import ClusterStatus
from weir.commands.running_server import BrokerTarget
from weir.commands.status.display import WIDTH, print_status
from weir.commands.status.watch import collect_status, exit_status


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.began_s = time.time()
        write_identity(folder / "models", "fast", "INT64", "dynamic_batching { }", instances=2)
        self.start = Start(folder)
        self.folder = folder
        self.scheduler = self.start("scheduler")
        self.workers = [self.start.worker() for _ in range(2)]
        self.gateway = self.start.gateway()
        wait_until(self.gateway.is_ready)

    def status(self) -> ClusterStatus:
        return asyncio.run(collect_status(BrokerTarget(self.start.nats.url)))

    def wait_for(self, is_said: Callable[[ClusterStatus], bool]) -> None:
        """Returns when a status says so."""
        wait_until(lambda: is_said(self.status()))

    def command(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "weir", "status", *options],
            env={**clean_environment(self.folder), "XDG_DATA_HOME": str(self.folder / "nothing")},
            capture_output=True,
            text=True,
            timeout=30,
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield started
        started.start.end_all()
    finally:
        for worker in started.workers:
            worker.process.send_signal(signal.SIGCONT)
        started.start.close()


def test_a_whole_cluster_is_healthy(cluster: Cluster) -> None:
    wait_until(lambda: cluster.status().state == "healthy")
    status = cluster.status()
    assert sorted(role.role for role in status.roles) == ["gateway", "scheduler", "worker", "worker"]
    pids = {cluster.scheduler.process.pid, *(worker.process.pid for worker in cluster.workers)}
    assert pids <= {role.pid for role in status.roles}
    assert all(cluster.began_s <= role.since_ms / 1000 <= time.time() for role in status.roles)
    assert f"http://{cluster.gateway.http_place}" in status.roles[0].urls
    (model,) = status.models
    assert [(v.version, v.state, v.workers, v.instances) for v in model.versions] == [(1, "READY", 2, 4)]
    (queue,) = status.queues
    assert queue.claims == [queue.owner]
    assert queue.lanes["live"].depth == 0
    assert status.broker is not None
    assert {"LIVE", "QUEUE", "RESULT", "DEAD"} <= {stream.name for stream in status.broker.streams}


def test_json_follows_the_schema(cluster: Cluster) -> None:
    # The nats-server of the test lies where that of `weir serve --data-dir` would.
    done = cluster.command("--data-dir", str(cluster.start.nats.data_dir), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    reply = json.loads(done.stdout)
    status = ClusterStatus.model_validate(reply)
    assert (status.schema_version, status.state) == (1, "healthy")
    assert reply.keys() == ClusterStatus.model_fields.keys(), "each field is there, whatever its value"


def test_text_is_plain_and_fits(cluster: Cluster) -> None:
    out = io.StringIO()
    print_status(cluster.status(), Console(file=out, width=WIDTH))
    lines = out.getvalue().splitlines()
    assert lines[0] == "healthy: 1 host, 1 gateway, 1 scheduler, 2 workers, 1 model, 1 queue; instances 0% busy"
    assert all(line.isprintable() and len(line) <= WIDTH for line in lines)
    assert any("ack = fsync" in line for line in lines)


def test_watching_tells_one_object_a_line(cluster: Cluster) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "weir",
        "status",
        "--nats",
        cluster.start.nats.url,
        "--watch",
        "0.5",
        "--json",
    ]
    watching = subprocess.Popen(
        command,
        env=clean_environment(cluster.folder),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=accept_interrupts,
    )
    assert watching.stdout is not None
    states = [ClusterStatus.model_validate_json(watching.stdout.readline()).state for _ in range(2)]
    watching.send_signal(signal.SIGINT)
    assert (watching.wait(10), states) == (0, ["healthy"] * 2)
    watching.stdout.close()


def test_nobody_there_is_unreachable() -> None:
    status = asyncio.run(collect_status(BrokerTarget("nats://127.0.0.1:1")))
    assert (exit_status(status), status.state, status.broker) == (2, "unreachable", None)
    assert "127.0.0.1:1" in status.error


def ready_workers(status: ClusterStatus) -> list[int]:
    return [version.workers for model in status.models for version in model.versions]


def test_a_paused_worker_is_noticed_and_a_killed_one_gone(cluster: Cluster) -> None:
    worker = cluster.workers[0]

    def is_noticed(status: ClusterStatus) -> bool:
        # Its scheduler, on the same host, removes it from the registry within 2 s: then a new look knows nothing of it.
        states = {role.pid: role.state for role in status.roles}
        return states.get(worker.process.pid) in (None, "silent") and ready_workers(status) == [1]

    worker.process.send_signal(signal.SIGSTOP)
    cluster.wait_for(is_noticed)
    worker.end(signal.SIGKILL)
    # Its scheduler gives it up at once; whoever watched before tells of it for a while.
    cluster.wait_for(lambda status: worker.process.pid not in {role.pid for role in status.roles})
    assert ready_workers(cluster.status()) == [1]


def test_a_killed_scheduler_leaves_its_queues(cluster: Cluster) -> None:
    cluster.scheduler.end(signal.SIGKILL)
    cluster.wait_for(lambda status: not any(role.role == "scheduler" for role in status.roles))
    status = cluster.status()
    assert (status.state, exit_status(status)) == ("down", 3)
    assert {"no scheduler", "queue without owner"} <= {problem.kind for problem in status.problems}
    out = io.StringIO()
    print_status(status, Console(file=out, width=WIDTH))
    assert "! no scheduler replies: requests wait" in out.getvalue().splitlines()
    restarted: RoleProcess = cluster.start("scheduler")
    assert restarted.process.poll() is None
    wait_until(lambda: all(queue.owner for queue in cluster.status().queues))

"""`weir serve` with several gateways, schedulers and workers: one server to its clients and in its metrics."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.support.clients.stock import Answer, RawConnection, grpc_inputs, infer_body, post
from tests.support.models.zoo import write_identity, write_small_zoo
from tests.support.servers.several_gateways import connect, gateway_of, listeners, processes_of
from tests.support.servers.weir_server import Serve, Server
from tests.support.waiting import wait_until

GATEWAYS = WORKERS = SCHEDULERS = 2
VALUE = np.arange(3, dtype=np.float32).reshape(1, 3)
INFER = post("/v2/models/identity_FP32/infer", infer_body({"IN": VALUE}))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two processes of each role."""
    folder = tmp_path_factory.mktemp("several")
    write_small_zoo(folder / "models")
    with Server(
        folder,
        folder / "models",
        f"--gateways={GATEWAYS}",
        f"--schedulers={SCHEDULERS}",
        f"--workers={WORKERS}",
        "--allow-client-shm",
        "--gateway-memory-byte-size=100000000",
        f"--trace-config=triton,file={folder / 'traces'}",
        "--trace-config=rate=1",
    ) as server:
        yield server
        assert server.in_flight() == 0


def infer(connection: RawConnection) -> Answer:
    """The response to a small request."""
    answer = connection.ask(INFER)
    assert answer is not None
    return answer


def requests_of_gateways(server: Server) -> float:
    return server.metrics()["weir_gateway_requests", ""]


def restarted(server: Server, role: str, killed: int, count: int) -> None:
    """Returns when there are `count` processes of the role again, without `killed`."""
    wait_until(lambda: len(pids := processes_of(server, role)) == count and killed not in pids)


def test_each_role_has_its_processes(several: Server) -> None:
    counts = {role: len(processes_of(several, role)) for role in ("gateway", "scheduler", "worker", "durable")}
    assert counts == {"gateway": GATEWAYS, "scheduler": SCHEDULERS, "worker": WORKERS, "durable": 1}


def test_connections_reach_each_gateway_over_both_protocols(several: Server) -> None:
    for pid in processes_of(several, "gateway"):
        with connect(several, pid) as connection:
            assert infer(connection).document["outputs"][0]["data"] == VALUE.ravel().tolist()
    with several.grpc() as client:
        np.testing.assert_array_equal(client.infer("identity_FP32", grpc_inputs({"IN": VALUE})).as_numpy("OUT"), VALUE)


def test_the_metrics_are_those_of_all_gateways(several: Server) -> None:
    before = several.metrics()
    for count, pid in enumerate(processes_of(several, "gateway"), 3):
        with connect(several, pid) as connection:
            for _ in range(count):
                assert infer(connection).status == 200
    after = several.metrics()
    for metric in ("weir_gateway_requests", "nv_inference_request_success"):
        model = "" if metric.startswith("weir") else "identity_FP32"
        assert after[metric, model] - before[metric, model] == 3 + 4, metric
    lines = [line for line in several.metrics_page().splitlines() if line.startswith("weir_process_cpu_seconds{")]
    roles = [line.partition('role="')[2].partition('"')[0] for line in lines]
    assert sorted(roles) == ["durable", *["gateway"] * GATEWAYS, *["scheduler"] * SCHEDULERS, *["worker"] * WORKERS]


def test_the_limit_of_memory_is_that_of_all_gateways(several: Server) -> None:
    # `weir durable` has a ledger of its own, of the same size.
    assert several.metrics()["weir_memory_ledger_limit_bytes", ""] == 2 * 100_000_000


def test_each_gateway_reports_the_statistics_of_all(several: Server) -> None:
    counts = []
    for pid in processes_of(several, "gateway"):
        with connect(several, pid) as connection:
            assert infer(connection).status == 200
            counts.append(count_at(connection))
    assert counts == [counts[0], counts[0] + 1]


@pytest.mark.parametrize("number", range(GATEWAYS))
def test_a_killed_gateway_is_back_on_the_same_ports(several: Server, number: int) -> None:
    pids = processes_of(several, "gateway")
    other = pids[1 - number]
    with connect(several, other) as kept:
        os.kill(pids[number], signal.SIGKILL)
        # Its sockets are closed when its last thread has ended.
        wait_until(lambda: listeners(several.port) < GATEWAYS)
        assert infer(kept).status == 200
        # New connections reach the one that is left.
        for _ in range(10):
            with RawConnection(several.port) as connection:
                assert infer(connection).status == 200
        restarted(several, "gateway", pids[number], GATEWAYS)
    (new,) = set(processes_of(several, "gateway")) - {other}
    wait_until(lambda: listeners(several.port) == GATEWAYS)
    with connect(several, new) as connection:
        assert infer(connection).status == 200
    wait_until(lambda: _has_metrics(several))


def _has_metrics(server: Server) -> bool:
    try:
        return bool(server.metrics())
    except OSError:
        return False


def test_what_a_killed_gateway_counted_stays_in_the_sums(several: Server) -> None:
    (further,) = [
        pid for pid in processes_of(several, "gateway") if "--gateway-number" in " ".join(psutil.Process(pid).cmdline())
    ]
    with connect(several, further) as connection:
        for _ in range(5):
            assert infer(connection).status == 200
    before = requests_of_gateways(several)
    assert before >= 5
    os.kill(further, signal.SIGKILL)
    restarted(several, "gateway", further, GATEWAYS)
    wait_until(lambda: listeners(several.port) == GATEWAYS)
    for pid in processes_of(several, "gateway"):
        with connect(several, pid) as connection:
            assert infer(connection).status == 200
    assert requests_of_gateways(several) == before + 2


@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_a_killed_process_leaves_the_work_to_the_others(several: Server, role: str) -> None:
    killed = processes_of(several, role)[0]
    os.kill(killed, signal.SIGKILL)
    for _ in range(20):
        with RawConnection(several.port) as connection:
            assert infer(connection).status == 200
    restarted(several, role, killed, 2)
    several.wait_ready()


def count_at(connection: RawConnection) -> int:
    """The inferences of the model by the statistics of the connection's gateway."""
    answer = connection.ask(b"GET /v2/models/identity_FP32/stats HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer is not None
    return int(answer.document["model_stats"][0]["inference_count"])


def test_each_gateway_knows_what_killed_workers_counted(several: Server) -> None:
    first, second = processes_of(several, "gateway")
    with connect(several, first) as asking, connect(several, second) as other:
        for _ in range(5):
            assert infer(asking).status == 200
        count = count_at(asking)
        workers = processes_of(several, "worker")
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(pids := processes_of(several, "worker")) == WORKERS and not set(pids) & set(workers))
        several.wait_ready()
        wait_until(lambda: count_at(asking) == count)
        assert count_at(other) == count


def test_each_gateway_writes_its_own_trace_file(several: Server) -> None:
    pids = processes_of(several, "gateway")
    off = post("/v2/trace/setting", json.dumps({"trace_level": ["OFF"]}).encode())
    on = post("/v2/trace/setting", json.dumps({"trace_level": ["TIMESTAMPS"]}).encode())
    with connect(several, pids[0]) as first, connect(several, pids[1]) as second:
        answer = first.ask(on)
        assert answer is not None
        assert answer.document["trace_file"] == str(several.folder / "traces")
        wait_until(lambda: b"TIMESTAMPS" in second_body(second))
        for connection in (first, second):
            assert infer(connection).status == 200
        first.ask(off)  # which writes the files
        files = [several.folder / "traces", several.folder / "traces.gateway-1"]
        wait_until(lambda: all(file.exists() and file.read_text().count("model_name") == 1 for file in files))


def second_body(connection: RawConnection) -> bytes:
    answer = connection.ask(b"GET /v2/trace/setting HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer is not None
    return answer.body


def test_connections_are_spread(several: Server) -> None:
    pids = processes_of(several, "gateway")
    connections = [RawConnection(several.port) for _ in range(16)]
    try:
        for connection in connections:
            assert infer(connection).status == 200
        assert {gateway_of(connection, pids) for connection in connections} == set(pids)
    finally:
        for connection in connections:
            connection.close()


PROCESSORS = len(os.sched_getaffinity(0))


@pytest.mark.skipif(PROCESSORS < 2, reason="one processor can't be divided")
def test_workers_have_processors_that_others_do_not_use(serve: Serve, tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "identity", "FP32")
    everywhere = os.sched_getaffinity(0)
    server = serve(tmp_path / "models", f"--worker-processors={PROCESSORS // 2}")
    pids = server.pids()
    of_worker = os.sched_getaffinity(pids.pop("worker"))
    assert len(of_worker) == PROCESSORS // 2
    for role, pid in pids.items():
        assert os.sched_getaffinity(pid) == everywhere - of_worker, role
    killed = server.kill("worker")
    (restarted_pid,) = wait_until(lambda: [pid for pid in processes_of(server, "worker") if pid != killed])
    wait_until(lambda: os.sched_getaffinity(restarted_pid) == of_worker)
    server.wait_ready("identity")

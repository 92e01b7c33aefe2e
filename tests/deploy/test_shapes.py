"""The services of the compose files, as plain processes started by the commands in the files, serve a stock client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc
import tritonclient.http
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.test_monitoring import unknown_metrics
from tests.support.deploy.compose_project import PROJECTS, ComposeProject, example_environment
from tests.support.deploy.shape import Shape, monitor
from tests.support.models.zoo import write_identity
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.weir_server import segments_of
from tests.support.waiting import wait_until


@contextmanager
def running(name: str, folder: Path) -> Iterator[Shape]:
    """The project as processes, with a model to serve; all of them must end as they should."""
    (folder / "models").mkdir()
    write_identity(folder / "models", "same", "FP32", "dynamic_batching { }")
    environment = {**example_environment(), "WEIR_MODELS": str(folder / "models")}
    shape = Shape(ComposeProject(PROJECTS[name], environment), folder)
    try:
        shape.start()
        yield shape
        segments = segments_of([one.process.pid for one in shape.containers if one.process])
        statuses = shape.end()
        assert not {segment for segment in segments if Path("/dev/shm", segment).exists()}
    finally:
        shape.close()
    # nats-server says with 1 that it was told to end.
    assert {name: set(codes) for name, codes in statuses.items() if not name.startswith("nats")} == {
        name: {0} for name in statuses if not name.startswith("nats")
    }, "".join(one.log for one in shape.containers)


def ask(gateway: Endpoints, values: np.ndarray) -> None:
    """Both of the client's protocols give back what the model was sent."""
    with gateway.http() as http, gateway.grpc() as grpc:
        for module, client in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
            tensor = module.InferInput("IN", list(values.shape), "FP32")
            tensor.set_data_from_numpy(values)
            np.testing.assert_array_equal(client.infer("same", [tensor]).as_numpy("OUT"), values)


def families(gateway: Endpoints) -> dict[str, str]:
    """The kind of each family on the metrics page, which must be one that Prometheus reads."""
    page = Endpoints(gateway.metrics_place, "", "").get("/metrics")[1].decode()
    assert list(text_string_to_metric_families(page))
    return {line.split()[2]: line.split()[3] for line in page.splitlines() if line.startswith("# TYPE")}


def test_one_machine(tmp_path: Path) -> None:
    with running("one machine", tmp_path) as shape:
        (gateway,) = shape.gateways("weir")
        ask(gateway, np.arange(4, dtype=np.float32).reshape(1, 4))
        assert gateway.metrics()["nv_inference_request_success", "same"] == 2
        assert "same" in shape.run(shape.of("weir")[0], "status")
        assert unknown_metrics(families(gateway)) == {}


def test_the_machine_with_gpus_runs_the_same() -> None:
    plain, with_gpus = (
        ComposeProject(PROJECTS[name], {}).services["weir"] for name in ("one machine", "one machine with GPUs")
    )
    assert plain["command"] == with_gpus["command"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_roles_apart_on_three_nats_servers(tmp_path: Path) -> None:
    with running("roles apart", tmp_path) as shape:
        gateways = shape.gateways("gateway")
        assert len(gateways) == len(shape.of("worker")) == len(shape.of("scheduler")) == 2
        for gateway in gateways:
            wait_until(lambda gateway=gateway: gateway.is_ready("same"))
            ask(gateway, np.arange(8, dtype=np.float32).reshape(1, 8))
            ask(gateway, np.zeros((1, 200_000), np.float32))  # by reference
        for gateway in gateways:
            # What models did is the same at every gateway; what gateways did is each one's own.
            assert gateway.metrics()["nv_inference_request_success", "same"] == 8
            assert gateway.metrics()["weir_gateway_requests", ""] == 4
            assert gateway.metrics()["weir_durable_ack_is_fsync", ""] == 1  # so the alert can fire
            assert unknown_metrics(families(gateway)) == {}
        (console,) = shape.of("console")
        status = requests.get(
            f"http://{console.address}:8080/api/status", headers={"Host": "localhost"}, timeout=10
        ).json()
        assert {role["role"] for role in status["roles"]} == {"gateway", "scheduler", "worker", "console"}
        assert {problem["level"] for problem in status["problems"]} <= {"note"}
        streams = {
            stream["name"]: stream
            for account in monitor(shape.of("nats-1")[0], "/jsz?streams=true&config=true")["account_details"]
            for stream in account["stream_detail"]
        }
        assert streams["QUEUE"]["config"]["num_replicas"] == 3
        # One server of three may go.
        killed = shape.of("nats-3")[0].process
        assert killed is not None
        killed.kill()
        killed.wait()
        for gateway in gateways:
            ask(gateway, np.arange(8, dtype=np.float32).reshape(1, 8))

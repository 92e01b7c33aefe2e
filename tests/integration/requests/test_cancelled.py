"""Callers that disconnect: their requests leave the queue, and nothing of them remains."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from tests.support.clients.stock import RawConnection, grpc_inputs, http_inputs, infer_body, post
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

MODEL = "slow_alone"  # runs one request at a time


def arrays(value: int, delay_ms: float) -> dict[str, np.ndarray]:
    return {"VALUE": np.array([[value]], np.int64), "DELAY_MS": np.array([[delay_ms]], np.float32)}


def executions(server: Server) -> float:
    return server.metrics()["nv_inference_exec_count", MODEL]


@pytest.fixture
def busy(server: Server) -> Iterator[Callable[[], None]]:
    """Keeps the only instance busy for 0.7 s; the returned function waits for the right answer."""
    before = executions(server)
    with RawConnection(server.port) as connection:
        connection.send(post(f"/v2/models/{MODEL}/infer", infer_body(arrays(1, 700))))
        wait_until(lambda: server.in_flight() == 1)

        def finish() -> None:
            answer = connection.answer()
            assert answer is not None
            assert answer.document["outputs"][0]["data"] == [1]

        yield finish
    # One was running, and one may have been handed to the instance already, to follow without a pause.
    assert executions(server) - before <= 3
    assert server.in_flight() == 0
    with server.http() as client:
        assert client.infer(MODEL, http_inputs(arrays(9, 0))).as_numpy("VALUE_OUT").item() == 9


def test_disconnected_http_clients(server: Server, busy: Callable[[], None]) -> None:
    waiting = [RawConnection(server.port) for _ in range(10)]
    for number, connection in enumerate(waiting):
        connection.send(post(f"/v2/models/{MODEL}/infer", infer_body(arrays(number, 0))))
    wait_until(lambda: server.in_flight() == 11)
    for connection in waiting:
        connection.close()
    wait_until(lambda: server.in_flight() <= 1)
    busy()


def test_disconnected_http_clients_with_large_bodies(server: Server, busy: Callable[[], None]) -> None:
    # More rows than the model takes would be refused, so a large BYTES parameter makes the body large.
    waiting = [RawConnection(server.port) for _ in range(5)]
    text = json.loads(infer_body(arrays(1, 0))) | {"parameters": {"ballast": "x" * 200_000}}
    for connection in waiting:
        connection.send(post(f"/v2/models/{MODEL}/infer", json.dumps(text).encode()))
    wait_until(lambda: server.in_flight() == 6)
    for connection in waiting:
        connection.close()
    wait_until(lambda: server.in_flight() <= 1)
    busy()


def test_pipelined_requests_of_a_client_that_has_gone(server: Server, busy: Callable[[], None]) -> None:
    with RawConnection(server.port) as connection:
        connection.send(post(f"/v2/models/{MODEL}/infer", infer_body(arrays(1, 0))) * 5)
        wait_until(lambda: server.in_flight() >= 2)
    wait_until(lambda: server.in_flight() <= 1)
    busy()


def test_cancelled_grpc_calls(server: Server, busy: Callable[[], None]) -> None:
    outcomes: list[Any] = []
    with server.grpc() as client:
        calls = [
            client.async_infer(
                MODEL, grpc_inputs(arrays(number, 0)), callback=lambda result, error: outcomes.append((result, error))
            )
            for number in range(10)
        ]
        wait_until(lambda: server.in_flight() == 11)
        for call in calls:
            call.cancel()
        wait_until(lambda: len(outcomes) == 10)
        wait_until(lambda: server.in_flight() <= 1)
        busy()
    assert all(result is None for result, _ in outcomes)


def test_grpc_calls_whose_time_is_up(server: Server, busy: Callable[[], None]) -> None:
    with server.grpc() as client:
        with pytest.raises(tritonclient.utils.InferenceServerException, match="Deadline Exceeded") as late:
            client.infer(MODEL, grpc_inputs(arrays(1, 0)), client_timeout=0.1)
        assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    wait_until(lambda: server.in_flight() <= 1)
    busy()


def test_clients_that_do_not_read_their_answers(server: Server) -> None:
    array = np.zeros((1, 1_000_000), np.float32)
    row = {
        "name": "IN",
        "shape": list(array.shape),
        "datatype": "FP32",
        "parameters": {"binary_data_size": array.nbytes},
    }
    header = json.dumps({"inputs": [row], "parameters": {"binary_data_output": True}}).encode()
    request = post(
        "/v2/models/identity_FP32/infer", header + array.tobytes(), f"Inference-Header-Content-Length: {len(header)}"
    )
    connections = [RawConnection(server.port) for _ in range(8)]
    for connection in connections:
        connection.send(request)
    wait_until(lambda: server.in_flight() == 0)
    with server.http() as client:
        assert client.infer("identity_FP32", http_inputs({"IN": array[:, :5]})).as_numpy("OUT").shape == (1, 5)
    for connection in connections:
        connection.close()

"""Overload of a model through two gateways: rejections say when to retry, and cost its queue little."""

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import config_text, write_model
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import Start
from tests.support.waiting import wait_until
from weir.schemas.core.errors import MAX_RETRY_AFTER_S

MODEL = "busy"
CONTENT = np.full((1, 100_000), 7, np.uint8)
SOURCE = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.01 * len(requests))
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each[:, :1])]) for each in inputs]
"""


def write_busy(root: Path) -> None:
    inputs, outputs = {"IN": ("UINT8", [-1])}, {"OUT": ("UINT8", [1])}
    wait = 'parameters { key: "weir_max_queue_wait_us" value { string_value: "200000" } }'
    more = f"instance_group {{ kind: KIND_CPU count: 1 }} {wait}"
    folder = write_model(root, MODEL, config_text(MODEL, "python", inputs, outputs, 1, more))
    (folder / "1" / "model.py").write_text(SOURCE)


class Outcomes(Counter[str]):
    """How many requests were answered, and how many refused."""

    def refused(self, retry_after: str | None) -> None:
        assert retry_after
        # The scheduler's estimate: its value depends on how fast this machine happens to run the first requests.
        assert 1 <= int(retry_after) <= MAX_RETRY_AFTER_S
        self["refused"] += 1


def ask_over_http(served: Endpoints, over: threading.Event) -> Outcomes:
    """One request after another on one connection."""
    outcomes = Outcomes()
    body, length = tritonclient.http.InferenceServerClient.generate_request_body(http_inputs({"IN": CONTENT}))
    headers = {"Inference-Header-Content-Length": str(length)}
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.connect()
    kept = connection.sock
    while not over.is_set() or not outcomes:
        connection.request("POST", f"/v2/models/{MODEL}/infer", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status == 200:
            assert content[-1] == 7
            outcomes["answered"] += 1
        else:
            assert (answer.status, json.loads(content)) == (503, {"error": "Exceeds maximum queue size"})
            outcomes.refused(answer.headers["Retry-After"])
    assert connection.sock is kept, "the connection has gone on"
    connection.close()
    return outcomes


def ask_over_grpc(served: Endpoints, over: threading.Event) -> Outcomes:
    outcomes = Outcomes()
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="IN", datatype="UINT8", shape=CONTENT.shape)
    request = service_pb2.ModelInferRequest(model_name=MODEL, inputs=[tensor], raw_input_contents=[CONTENT.tobytes()])
    with grpc.insecure_channel(served.grpc_place) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        while not over.is_set():
            try:
                assert stub.ModelInfer(request, timeout=20).raw_output_contents[0] == b"\x07"
                outcomes["answered"] += 1
            except grpc.RpcError as error:
                _take_refusal(error, outcomes)
    return outcomes


def _take_refusal(error: grpc.RpcError, outcomes: Outcomes) -> None:
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
    trailers = dict(error.trailing_metadata())
    assert trailers["grpc-retry-pushback-ms"] == f"{trailers['retry-after']}000"
    outcomes.refused(trailers["retry-after"])


def _turned_away(served: Endpoints) -> int:
    return int(served.metrics()["weir_gateway_refused_requests", ""])


@pytest.mark.timeout(120)
def test_two_gateways_turn_away_what_a_full_queue_would_refuse(start: Start, tmp_path: Path) -> None:
    write_busy(tmp_path / "models")
    start("scheduler")
    start.worker()
    gateways = [start.gateway(), start.gateway()]
    for served in gateways:
        wait_until(lambda served=served: served.is_ready(MODEL))
    askers: list[Callable[[Endpoints, threading.Event], Outcomes]] = [ask_over_http, ask_over_grpc]
    over = threading.Event()
    with ThreadPoolExecutor(64) as pool:
        asking = [pool.submit(ask, served, over) for ask in askers for served in gateways for _ in range(14)]
        try:
            # Each learns of it by refusals of its own.
            wait_until(lambda: min(map(_turned_away, gateways)) >= 5, 30)
        finally:
            over.set()
        outcomes = [each.result() for each in asking]
    reply = sum(outcomes, Counter[str]())
    print(f"{dict(reply)}, turned away by gateways: {[_turned_away(served) for served in gateways]}")
    assert reply["answered"] > 0
    assert reply["refused"] > sum(map(_turned_away, gateways)), "the scheduler has told them"
    # Without load each gateway accepts requests again.
    for served in gateways:
        wait_until(lambda served=served: ask_over_http(served, over)["answered"])
    # The queue's owner has heard of all that came.
    for served in gateways:
        wait_until(lambda served=served: served.metrics()["weir_refused_requests", MODEL] >= reply["refused"])

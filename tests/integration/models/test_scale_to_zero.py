"""A model without workers: its requests wait, and are answered once a worker serves it."""

import asyncio
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import nats
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.clients.producers import Producer, int64_body, value_of
from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.ensembles import Step, write_ensemble
from tests.support.models.zoo import write_identity, write_python_model
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import Start
from tests.support.waiting import eventually, wait_until
from weir.commands.running_server import BrokerTarget
from weir.commands.status.watch import collect_status, exit_status

MODEL = "away"
ONE_WAITS = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
ARRAYS = {"IN": np.array([[5]], np.int64)}


@pytest.mark.timeout(120)
def test_requests_wait_for_the_first_worker_to_come_back(start: Start, tmp_path: Path) -> None:
    write_identity(tmp_path / "models", MODEL, "INT64", "dynamic_batching { }")
    write_identity(tmp_path / "models", "full", "INT64", ONE_WAITS)
    scheduler = start("scheduler", "--scale-to-zero")
    worker = start.worker()
    gateways = [start.gateway()]
    wait_until(gateways[0].is_ready)
    assert worker.end() == 0
    # What is remembered outlasts gateways and schedulers.
    gateways.append(start.gateway())
    scheduler.end(signal.SIGKILL)
    start("scheduler", "--scale-to-zero")
    for served in gateways:
        wait_until(served.is_ready)
        assert not served.is_ready(MODEL)
        assert served.get(f"/v2/models/{MODEL}")[0] == served.get(f"/v2/models/{MODEL}/config")[0] == 200
        assert served.get("/v2/models/other")[0] == 404
        with served.http() as client, pytest.raises(Exception, match="unknown model"):
            client.infer("other", http_inputs(ARRAYS))
        metrics = served.metrics()
        assert metrics["weir_workers", MODEL] == metrics["weir_desired_workers", MODEL] == 0
    status = asyncio.run(collect_status(BrokerTarget(start.nats.url)))
    assert {model.name for model in status.models if model.scaled_to_zero} == {MODEL, "full"}
    assert {problem.kind for problem in status.problems} <= {"no worker", "scaled to zero", "sync unknown"}
    assert exit_status(status) == 0
    with ThreadPoolExecutor(14) as pool:
        first = pool.submit(_ask_http, gateways[0], "full")
        wait_until(lambda: gateways[0].metrics()["weir_queue_depth", "full"] == 1)
        assert [_refusal_over_http(gateways[1], "full"), _refusal_over_grpc(gateways[1], "full")] == ["1", "1"]
        asked = [pool.submit(_ask_http, served) for served in gateways for _ in range(3)]
        asked += [pool.submit(_ask_grpc, served) for served in gateways for _ in range(3)]
        events = pool.submit(asyncio.run, _ask_events(start.nats.url, 5))
        wait_until(lambda: all(g.metrics()["weir_queue_depth", MODEL] >= 13 for g in gateways))
        assert [g.metrics()["weir_desired_workers", MODEL] for g in gateways] == [1, 1]
        assert not any(answer.done() for answer in (*asked, events))
        start.worker()
        assert [answer.result(60) for answer in asked] == [5] * 12
        assert events.result(60) == [5] * 5
        assert first.result(60) == 5
    assert [g.metrics()["weir_workers", MODEL] for g in gateways] == [1, 1]


@pytest.mark.timeout(120)
def test_those_who_ask_models_that_are_away_wait_for_them(start: Start, tmp_path: Path) -> None:
    steps: list[Step] = [(MODEL, {"IN": "IN"}, {"OUT": "M"}), (MODEL, {"IN": "M"}, {"OUT": "OUT"})]
    tensors = {"IN": ("INT64", [1])}, {"OUT": ("INT64", [1])}
    write_identity(tmp_path / "steps", MODEL, "INT64", "dynamic_batching { }")
    write_ensemble(tmp_path / "models", "pair", *tensors, steps, 8)
    write_python_model(tmp_path / "models", "forward", "forward", *tensors, 8)
    start("scheduler", "--scale-to-zero")
    of_steps = start("worker", f"--model-repository={tmp_path / 'steps'}")
    served = start.gateway()
    wait_until(served.is_ready)
    assert of_steps.end() == 0
    # It has never seen a worker with the step: that is known, and so is all that is made of it.
    start.worker()
    wait_until(lambda: served.is_ready("pair"))
    assert served.is_ready()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(_ask_http, served, "pair"), pool.submit(_ask_grpc, served, "pair")]
        asked.append(pool.submit(_ask_http, served, "forward", {"way": MODEL}))
        wait_until(lambda: served.metrics()["weir_queue_depth", MODEL] == len(asked), timeout_s=30)
        assert not any(answer.done() for answer in asked)
        assert served.metrics()["weir_desired_workers", MODEL] == 1
        start("worker", f"--model-repository={tmp_path / 'steps'}")
        assert [answer.result(60) for answer in asked] == [5] * len(asked)


def _ask_http(served: Endpoints, model: str = MODEL, parameters: dict[str, str] | None = None) -> int:
    with served.http() as client:
        return int(client.infer(model, http_inputs(ARRAYS), parameters=parameters).as_numpy("OUT").item())


def _ask_grpc(served: Endpoints, model: str = MODEL) -> int:
    with served.grpc() as client:
        return int(client.infer(model, grpc_inputs(ARRAYS), client_timeout=60).as_numpy("OUT").item())


def _refusal_over_http(served: Endpoints, model: str) -> str:
    """When the caller is told to come again."""
    request = urllib.request.Request(
        f"http://{served.http_place}/v2/models/{model}/infer", int64_body(5), method="POST"
    )
    with pytest.raises(urllib.error.HTTPError, match="503") as refused:
        urllib.request.urlopen(request, timeout=10)
    with refused.value as answer:
        return str(answer.headers["Retry-After"])


def _refusal_over_grpc(served: Endpoints, model: str) -> str:
    with grpc.insecure_channel(served.grpc_place) as channel:
        contents = service_pb2.InferTensorContents(int64_contents=[5])
        tensor = service_pb2.ModelInferRequest.InferInputTensor(
            name="IN", datatype="INT64", shape=[1, 1], contents=contents
        )
        with pytest.raises(grpc.RpcError, match="Exceeds maximum queue size") as refused:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(
                service_pb2.ModelInferRequest(model_name=model, inputs=[tensor]), timeout=10
            )
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        trailers = dict(refused.value.trailing_metadata())
        assert trailers["grpc-retry-pushback-ms"] == f"{trailers['retry-after']}000"
        return str(trailers["retry-after"])


async def _ask_events(url: str, requests: int) -> list[int]:
    client = await nats.connect(url)
    producer = Producer(client)
    inbox, came = await producer.answers()
    for _ in range(requests):
        await producer.send(f"event.{MODEL}", int64_body(5), Weir_Reply_To=inbox)
    await eventually(lambda: len(came) == requests, timeout_s=60)
    await client.close()
    return [value_of(body) for _, body in came]

"""Ensembles through Triton's stock clients; texts and behaviour are those of a Triton 2.51."""

from __future__ import annotations

import json
import os
import queue
import shutil
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.ensembles import (
    CHAIN,
    NUMBERS,
    OUT,
    ensemble_text,
    write_ensemble,
    write_ensembles,
    write_steps,
)
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from weir.repository.config_text import config_to_json, parse_config

FAIL, RAISE, LACK, MARK = 1001, 1003, 1005, 1007


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ensembles")
    (models := folder / "models").mkdir()
    write_steps(models)
    write_ensembles(models)
    with Server(folder, models, "--model-control-mode=explicit", "--load-model=*", "--allow-client-shm") as started:
        yield started
        wait_until(lambda: started.in_flight() == 0)
        wait_until(lambda: started.metrics()["weir_worker_payload_slots", ""] == 0)


@pytest.fixture
def http(server: Server) -> Iterator[tritonclient.http.InferenceServerClient]:
    with server.http() as client:
        yield client


@pytest.fixture
def grpc(server: Server) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with server.grpc() as client:
        yield client


def numbers(*values: int) -> dict[str, np.ndarray]:
    return {"X": np.array([values], np.int32)}


def counters(client: tritonclient.http.InferenceServerClient, model: str) -> dict[str, Any]:
    return dict(client.get_inference_statistics(model)["model_stats"][0])


def failures(server: Server, model: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.metrics_place}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    rows = [line for line in page.splitlines() if line.startswith(f'nv_inference_request_failure{{model="{model}"')]
    return {row.split('reason="')[1].split('"')[0]: float(row.rpartition(" ")[2]) for row in rows}


def reply(result: Any, name: str = "T") -> dict[str, Any]:
    return dict(json.loads(result.as_numpy(name).flat[0]))


# Running


def test_a_chain_over_both_protocols(http, grpc):
    for result in (http.infer("chain", http_inputs(numbers(1, 2))), grpc.infer("chain", grpc_inputs(numbers(1, 2)))):
        assert result.as_numpy("Y").tolist() == [[3, 4]]
        assert result.as_numpy("M").tolist() == [[2, 3]]


def test_replies_have_the_sequence_parameters(http, grpc):
    plain = http.infer("chain", http_inputs(numbers(1))).get_response()
    assert plain["parameters"] == {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
    of_sequence = grpc.infer("chain", grpc_inputs(numbers(1)), sequence_id=5, sequence_start=True).get_response()
    assert of_sequence.parameters["sequence_id"].ListFields()[0][1] == 5
    assert of_sequence.parameters["sequence_start"].bool_param is True
    assert of_sequence.parameters["sequence_end"].bool_param is False


def test_what_comes_with_a_request_goes_to_every_step(http):
    more = {"sequence_id": 9, "sequence_end": True, "timeout": 7_000_000, "parameters": {"color": "red", "n": 3}}
    result = http.infer("chain", http_inputs(numbers(1)), request_id="the-id", **more)
    assert result.get_response()["id"] == "the-id"
    wanted = {"id": "the-id", "sequence": [9, 2], "timeout": 7_000_000, "parameters": {"color": "red", "n": 3}}
    assert reply(result) == {**wanted, "extra": False}


def test_a_step_may_change_the_sequence_for_those_after_it(http):
    result = http.infer("chain", http_inputs(numbers(MARK)), sequence_id=9, sequence_start=True)
    assert reply(result)["sequence"] == [77, 2]
    assert result.get_response()["parameters"] == {"sequence_id": 77, "sequence_start": False, "sequence_end": True}


def test_steps_that_the_requested_outputs_do_not_need_never_run(http):
    before = counters(http, "copy_int")["execution_count"]
    wanted = [tritonclient.http.InferRequestedOutput("Y")]
    result = http.infer("fan", http_inputs(numbers(1)), outputs=wanted)
    assert result.as_numpy("Y").tolist() == [[3]]
    assert result.as_numpy("Z") is None
    assert counters(http, "copy_int")["execution_count"] == before
    assert http.infer("fan", http_inputs(numbers(1))).as_numpy("Z").tolist() == [[2]]
    assert counters(http, "copy_int")["execution_count"] == before + 1


def test_each_step_asks_the_version_it_names(http):
    result = http.infer("versions", http_inputs({"X": np.array([10], np.float32)}))
    assert [result.as_numpy(name).item() for name in ("TWO", "LAST")] == [12, 13]


def test_optional_inputs_of_steps_may_stay_unset(http):
    assert reply(http.infer("optional", http_inputs(numbers(1))))["extra"] is False
    both = {**numbers(1), "E": np.array([[2]], np.int32)}
    assert reply(http.infer("optional", http_inputs(both)))["extra"] is True


def test_outputs_inherit_the_labels_of_the_step_that_writes_them(http):
    wanted = [tritonclient.http.InferRequestedOutput("Y", class_count=2)]
    scores = {"X": np.array([[0, 3, 1, 0, 2]], np.float32)}
    result = http.infer("classified", http_inputs(scores), outputs=wanted)
    assert result.as_numpy("Y").tolist() == [[b"3.000000:1:bee", b"2.000000:4:eel"]]


def test_large_tensors_go_from_step_to_step_by_reference(http, server):
    content = np.random.default_rng(3).random((1, 150_528), np.float32)
    for _ in range(5):
        result = http.infer("large", http_inputs({"X": content}))
        assert np.array_equal(result.as_numpy("Y"), content)
        assert np.array_equal(result.as_numpy("A"), content)
    wait_until(lambda: server.metrics()["weir_worker_payload_slots", ""] == 0)


def test_inputs_and_outputs_may_lie_in_memory_of_the_client(http):
    content = np.random.default_rng(4).random((1, 50_000), np.float32)
    size = content.nbytes
    region = shared_memory.create_shared_memory_region("both", f"/ensembles-{os.getpid()}", 2 * size)
    try:
        shared_memory.set_shared_memory_region(region, [content])
        http.register_system_shared_memory("both", f"/ensembles-{os.getpid()}", 2 * size)
        given = tritonclient.http.InferInput("X", list(content.shape), "FP32")
        given.set_shared_memory("both", size)
        wanted = tritonclient.http.InferRequestedOutput("Y")
        wanted.set_shared_memory("both", size, size)
        http.infer("large", [given], outputs=[wanted])
        written = shared_memory.get_contents_as_numpy(region, np.float32, content.shape, size)
        assert np.array_equal(written, content)
        http.unregister_system_shared_memory("both")
    finally:
        shared_memory.destroy_shared_memory_region(region)


# Failing


def test_a_step_that_fails_is_named_with_its_ensemble(http, grpc, server):
    with pytest.raises(InferenceServerException, match="in ensemble 'chain', asked to fail"):
        http.infer("chain", http_inputs(numbers(FAIL)))
    before = failures(server, "chain"), failures(server, "step")
    with pytest.raises(InferenceServerException, match=r"in ensemble 'chain', .*ValueError: asked to raise") as raised:
        grpc.infer("chain", grpc_inputs(numbers(RAISE)))
    assert raised.value.status() == "StatusCode.INTERNAL"
    assert failures(server, "chain")["OTHER"] == before[0]["OTHER"] + 1
    assert failures(server, "chain")["BACKEND"] == 0
    assert failures(server, "step")["BACKEND"] == before[1]["BACKEND"] + 1


def test_a_tensor_that_a_step_left_away_is_missing_downstream(http):
    with pytest.raises(InferenceServerException) as raised:
        http.infer("chain", http_inputs(numbers(LACK)), request_id="me")
    assert raised.value.message() == (
        "in ensemble 'chain', [request id: me] expected 1 inputs but got 0 inputs for model 'step'. Got input(s) [], but "
        "missing required input(s) ['IN']. Please provide all required input(s)."
    )


def test_an_output_that_never_comes_is_a_deadlock(http):
    with pytest.raises(InferenceServerException) as raised:
        http.infer("chain", http_inputs(numbers(LACK - 1)), request_id="me")
    assert raised.value.message() == (
        "in ensemble 'chain', [request id: me] unexpected deadlock, at least one output is not set while no more "
        "ensemble steps can be made"
    )


def test_a_request_that_is_given_up_leaves_its_steps(server, grpc, http):
    before, steps = failures(server, "patient"), counters(http, "slow_step")["execution_count"]
    arrays = {"VALUE": np.array([[1]], np.int64), "DELAY_MS": np.array([[700]], np.float32)}
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    calls = [
        grpc.async_infer("patient", grpc_inputs(arrays), lambda result, error: answers.put(error)) for _ in range(3)
    ]
    wait_until(lambda: server.metrics()["weir_queue_depth", "slow_step"] >= 1)
    for call in calls:
        call.cancel()
    for _ in calls:
        assert "ancelled" in str(answers.get(timeout=20))
    wait_until(lambda: failures(server, "patient")["CANCELED"] == before["CANCELED"] + 3)
    wait_until(lambda: server.metrics()["weir_queue_depth", "slow_step"] == 0)
    wait_until(lambda: server.in_flight() == 0)
    # One was running and ends by itself; the others have never run, and no second step has.
    wait_until(lambda: counters(http, "slow_step")["execution_count"] == steps + 1)
    assert failures(server, "patient")["OTHER"] == before["OTHER"]


def test_a_deadline_goes_with_the_steps(server, http):
    failed = failures(server, "patient")
    before = counters(http, "slow_step")["execution_count"]
    arrays = {"VALUE": np.array([[1]], np.int64), "DELAY_MS": np.array([[400]], np.float32)}
    soon = f"{int(time.time() * 1000) + 200}"
    with pytest.raises(InferenceServerException) as refused:
        http.infer("patient", http_inputs(arrays), headers={"Weir-Deadline-Ms": soon})
    assert refused.value.message() == "in ensemble 'patient', Request timeout expired"
    # The first step was begun in time, and the second one too late.
    assert counters(http, "slow_step")["execution_count"] == before + 1
    assert failures(server, "patient") == {**failed, "OTHER": failed["OTHER"] + 1}


# Streams


def streamed(grpc: tritonclient.grpc.InferenceServerClient, model: str, arrays: dict[str, np.ndarray]) -> list[Any]:
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    grpc.start_stream(lambda result, error: received.put(error or result))
    try:
        grpc.async_stream_infer(model, grpc_inputs(arrays), enable_empty_final_response=True)
        outcomes: list[Any] = []
        while True:
            outcome = received.get(timeout=10)
            assert not isinstance(outcome, InferenceServerException), outcome
            if outcome.as_numpy("Y") is not None:
                outcomes.append(outcome.as_numpy("Y").item())
            if outcome.get_response().parameters["triton_final_response"].bool_param:
                return outcomes
    finally:
        grpc.stop_stream()


def test_an_ensemble_with_a_decoupled_step_is_decoupled(http, grpc):
    assert http.get_model_config("counted")["model_transaction_policy"] == {"decoupled": True}
    assert http.get_model_config("chain")["model_transaction_policy"] == {"decoupled": False}
    for count in (0, 1, 3):
        assert sorted(streamed(grpc, "counted", numbers(count))) == list(range(1, count + 1))
    with pytest.raises(InferenceServerException, match="decoupled"):
        http.infer("counted", http_inputs(numbers(1)))


def test_generate_stream(server):
    url = f"http://{server.http_place}/v2/models/counted/generate_stream"
    with urllib.request.urlopen(urllib.request.Request(url, b'{"X": [2]}'), timeout=10) as answer:
        events = [json.loads(line[6:]) for line in answer.read().decode().splitlines() if line]
    assert sorted(event["Y"] for event in events) == [1, 2]
    assert {event["sequence_id"] for event in events} == {0}


# Statistics


def test_an_ensemble_counts_one_execution_a_request_and_sums_up_its_steps(http):
    before = {model: counters(http, model) for model in ("patient", "slow_step")}
    arrays = {"VALUE": np.array([[1], [2]], np.int64), "DELAY_MS": np.array([[20], [20]], np.float32)}
    http.infer("patient", http_inputs(arrays))
    after = {model: counters(http, model) for model in before}

    def grown(model: str, *path: str) -> int:
        one, other = before[model], after[model]
        for key in path:
            one, other = one[key], other[key]
        return int(other) - int(one)  # type: ignore[call-overload]

    assert (grown("patient", "execution_count"), grown("patient", "inference_count")) == (1, 2)
    assert grown("slow_step", "execution_count") == 2
    phases = ("queue", "compute_input", "compute_infer", "compute_output", "success")
    of_steps, (queue, *computing, success) = (
        [grown(model, "inference_stats", phase, "ns") for phase in phases] for model in ("slow_step", "patient")
    )
    assert computing[:2] == of_steps[1:3]
    # A response tells its times before its batch ends, so that the packing after that is not in it.
    assert computing[2] <= of_steps[3]
    assert computing[1] > 40_000_000
    assert queue + sum(computing) <= success, "no time counts in two phases"


def test_max_inflight_requests_holds_back_what_is_beyond_it(server, http):
    arrays = {"VALUE": np.array([[1]], np.int64), "DELAY_MS": np.array([[30]], np.float32)}
    with server.http() as client:
        asked = [client.async_infer("narrow", http_inputs(arrays)) for _ in range(1)]
        assert [one.get_result().as_numpy("VALUE_OUT").item() for one in asked] == [1]
    with tritonclient.http.InferenceServerClient(server.http_place, concurrency=6) as client:
        asked = [client.async_infer("narrow", http_inputs(arrays)) for _ in range(6)]
        assert server.metrics()["weir_queue_depth", "slow_step"] <= 1
        assert [one.get_result().as_numpy("VALUE_OUT").item() for one in asked] == [1] * 6


# Loading


def refusal(client: tritonclient.http.InferenceServerClient, text: str) -> str:
    config = json.dumps(config_to_json(parse_config(text.encode(), "e/config.pbtxt")))
    with pytest.raises(InferenceServerException) as refused:
        client.load_model("chain", config=config)
    return str(refused.value.message())


STEP = ("step", {"IN": "X"}, {"OUT": "Y"})
REFUSED = [
    (
        [("nobody", {"IN": "X"}, {"OUT": "Y"})],
        {},
        "ensemble chain contains models that are not available or ambiguous: nobody",
    ),
    ([("step:3", *STEP[1:])], {}, "ensemble 'chain' depends on 'step' whose required version 3 is not loaded."),
    ([("chain", {"X": "X"}, {"Y": "Y"})], {}, "circular dependency between ensembles: chain -> ... -> chain -> chain"),
    (
        [STEP],
        {"batch": 16},
        "ensemble chain allows maximum batch size 16, but it contains model step which only allows maximum batch size to "
        "be 8",
    ),
    (
        [("step", {"OTHER": "X"}, {"OUT": "Y"})],
        {},
        "in ensemble chain, ensemble tensor X is mapping to non-existing input OTHER in model step",
    ),
    (
        [("step", {"IN": "X"}, {"OTHER": "Y"})],
        {},
        "in ensemble chain, ensemble tensor Y is mapped from non-existing output OTHER in model step",
    ),
    (
        [("slow_step", {"VALUE": "X"}, {"VALUE_OUT": "Y"})],
        {"inputs": {"X": ("INT64", [1])}, "outputs": {"Y": ("INT64", [1])}},
        "in ensemble chain, input DELAY_MS in model slow_step is not mapped to any ensemble tensors",
    ),
    (
        [STEP],
        {"inputs": {"X": ("FP32", [-1])}},
        "in ensemble chain, ensemble tensor X: inconsistent data type: TYPE_FP32 is inferred from model chain while "
        "TYPE_INT32 is inferred from model step",
    ),
    (
        [STEP],
        {"outputs": {"Y": ("INT32", [2, 2])}},
        "in ensemble chain, ensemble tensor Y: inconsistent shape: [-1,2,2] is inferred from model chain while [-1,-1] is "
        "inferred from model step",
    ),
    (
        [("repeat", {"IN": "X"}, {"OUT": "Z"}), STEP],
        {"outputs": {**OUT, "Z": ("INT32", [-1])}},
        "in ensemble chain, step of model 'chain' receives inputs originated from different decoupled models",
    ),
]


@pytest.mark.parametrize(("steps", "more", "text"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_an_ensemble_that_does_not_fit_its_models_is_refused(http, steps, more, text):
    config = ensemble_text("chain", more.get("inputs", NUMBERS), more.get("outputs", OUT), steps, more.get("batch", 8))
    assert refusal(http, config) == f"load failed for model 'chain': {text}\n"
    assert http.infer("chain", http_inputs(numbers(1))).as_numpy("Y").item() == 3, "the old one goes on"


def test_models_of_an_ensemble_come_and_go_with_it(server, http):
    repository = server.folder / "models"
    shutil.copytree(repository / "step", repository / "own_step")
    path = repository / "own_step" / "config.pbtxt"
    path.write_text(path.read_text().replace('"step"', '"own_step"'))
    own = [(model.replace("step", "own_step"), *maps) for model, *maps in CHAIN]
    write_ensemble(repository, "own_chain", NUMBERS, {**OUT, "T": ("BYTES", [1])}, own, 8)

    http.load_model("own_chain")
    assert http.infer("own_chain", http_inputs(numbers(1))).as_numpy("Y").item() == 3
    assert http.is_model_ready("own_step")

    http.unload_model("own_step")
    wait_until(lambda: not http.is_model_ready("own_chain"))
    with pytest.raises(InferenceServerException, match="'own_chain' has no available versions"):
        http.infer("own_chain", http_inputs(numbers(1)))
    http.load_model("own_step")
    wait_until(lambda: http.is_model_ready("own_chain"))
    assert http.infer("own_chain", http_inputs(numbers(1))).as_numpy("Y").item() == 3

    http.unload_model("own_step")
    wait_until(lambda: not http.is_model_ready("own_chain"))
    http.load_model("own_chain")
    assert http.infer("own_chain", http_inputs(numbers(1))).as_numpy("Y").item() == 3
    http.unload_model("own_chain", unload_dependents=False)
    assert http.is_model_ready("own_step")
    http.load_model("own_chain")
    # Nobody has asked for the step since it was unloaded, so it goes with the ensemble.
    http.unload_model("own_chain", unload_dependents=True)
    wait_until(lambda: not http.is_model_ready("own_step"))

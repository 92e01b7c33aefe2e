"""Iterative sequences: requests that the model reschedules."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import Tensors, write_python_model
from tests.support.servers.weir_server import Server

NOT_CONFIGURED = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle such a "
    "flag."
)
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
ITERATIVE = "sequence_batching { iterative_sequence: true %s }"


def write_countdown(root: Path, name: str, more: str) -> None:
    outputs: Tensors = {"LEFT": ("INT32", [1]), "RUNS": ("BYTES", [1]), "SEQUENCE": ("BYTES", [1])}
    write_python_model(root, name, "countdown", {"FROM": ("INT32", [1])}, outputs, 4, more)


@pytest.fixture(scope="module")
def iterative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("iterative")
    (models := folder / "models").mkdir()
    write_countdown(models, "single", ITERATIVE % "")
    write_countdown(models, "oldest", ITERATIVE % "oldest { max_candidate_sequences: 4 }")
    write_countdown(models, "stream", DECOUPLED + ITERATIVE % "")
    slow = 'parameters { key: "sleep_s" value { string_value: "0.3" } }'
    write_countdown(models, "hasty", slow + ITERATIVE % "max_sequence_idle_microseconds: 100000")
    write_countdown(models, "wrong", 'parameters { key: "answers_all" }' + ITERATIVE % "")
    write_countdown(models, "plain", "")
    write_countdown(models, "plain_stream", DECOUPLED)
    with Server(folder, models) as started:
        yield started


def ask(server: Server, model: str, count: int, rows: int = 1, **more: Any) -> Any:
    with server.http() as client:
        return client.infer(model, http_inputs({"FROM": np.full((rows, 1), count, np.int32)}), **more)


def stream(server: Server, model: str, count: int) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        f"http://{server.http_place}/v2/models/{model}/generate_stream", json.dumps({"FROM": count}).encode()
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        lines = response.read().decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


@pytest.mark.parametrize("model", ["single", "oldest"])
def test_a_request_runs_until_its_model_has_done_with_it(iterative: Server, model: str) -> None:
    def one(count: int) -> str:
        result = ask(iterative, model, count)
        assert result.as_numpy("LEFT").tolist() == [[0]]
        assert result.as_numpy("RUNS").tolist() == [[",".join(["1"] + ["0"] * (count - 1)).encode()]]
        return str(result.as_numpy("SEQUENCE")[0, 0])

    with ThreadPoolExecutor(8) as pool:
        sequences = list(pool.map(one, range(1, 13)))
    assert len(set(sequences)) == 12


def test_responses_come_in_between(iterative: Server) -> None:
    with ThreadPoolExecutor(6) as pool:
        streams = list(pool.map(lambda count: stream(iterative, "stream", count), range(1, 9)))
    for count, responses in enumerate(streams, 1):
        assert [response["LEFT"] for response in responses] == list(range(count - 1, -1, -1))


def test_a_caller_may_name_the_sequence(iterative: Server) -> None:
    assert ask(iterative, "single", 3, sequence_id=7, sequence_start=True).as_numpy("SEQUENCE").tolist() == [[b"7"]]
    with pytest.raises(
        InferenceServerException, match="inference request for sequence 7 to model 'single' must specify"
    ):
        ask(iterative, "single", 3, sequence_id=7)
    with pytest.raises(
        InferenceServerException, match="must specify batch-size 1 due to requirements of sequence batcher"
    ):
        ask(iterative, "single", 3, rows=2)


def test_one_that_takes_longer_than_its_slot_is_kept_has_not_started(iterative: Server) -> None:
    with pytest.raises(
        InferenceServerException, match="must specify the START flag on the first request of the sequence"
    ):
        ask(iterative, "hasty", 2)


def test_a_rescheduled_request_has_no_response(iterative: Server) -> None:
    text = "Expected a None object in the execute function return list for reschduled request, found type"
    with pytest.raises(InferenceServerException, match=text):
        ask(iterative, "wrong", 2)


def test_other_schedulers_do_not_reschedule(iterative: Server) -> None:
    with pytest.raises(InferenceServerException) as caught:
        ask(iterative, "plain", 2)
    assert (caught.value.status(), caught.value.message()) == ("400", NOT_CONFIGURED)
    reply, failed = stream(iterative, "plain_stream", 2)
    assert (reply["LEFT"], failed["error"]) == (1, NOT_CONFIGURED)

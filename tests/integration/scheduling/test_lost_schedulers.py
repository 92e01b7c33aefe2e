"""Sequences whose scheduler is killed: what follows is answered with an error that names the loss, over HTTP and gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.sequences import write_accumulator
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

SEQUENCES = range(1, 7)
UNSTARTED = 99


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("lost")
    (models := folder / "models").mkdir()
    write_accumulator(models, "plain", "oldest { max_candidate_sequences: 64 }")
    started = Server(folder, models)
    try:
        yield started
        assert started.stop() == 0
    finally:
        started.close()


@pytest.fixture(params=["http", "grpc"])
def client(stateful: Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    with stateful.http() if request.param == "http" else stateful.grpc() as client:
        client.weir_inputs = http_inputs if request.param == "http" else grpc_inputs
        client.weir_statuses = ("503", "400") if request.param == "http" else ("UNAVAILABLE", "INVALID_ARGUMENT")
        yield client


def total(client: Any, model: str, sequence: int | str, start: bool = False) -> float:
    """The sum of the sequence after a request of value 1."""
    inputs = client.weir_inputs({"IN": np.ones((1, 1), np.float32)})
    answer = client.infer(model, inputs, sequence_id=sequence, sequence_start=start)
    return float(answer.as_numpy("OUT").ravel()[0])


def has_started(client: Any, model: str, sequence: int) -> bool:
    """Starts the sequence, unless the instance that it would start on has just been lost."""
    with contextlib.suppress(InferenceServerException):
        return total(client, model, sequence, start=True) == 1
    return False


def failure(client: Any, model: str, sequence: int | str) -> tuple[str, str]:
    """Status and text of the error of a request that continues a sequence."""
    with pytest.raises(InferenceServerException) as raised:
        total(client, model, sequence)
    return str(raised.value.status()), str(raised.value.message())


def kill(server: Server, *roles: str) -> None:
    before = server.pids()
    for role in roles:
        server.kill(role)
    wait_until(lambda: all(server.pids().get(role) not in (None, before[role]) for role in roles))


def test_a_request_that_follows_names_the_loss(stateful: Server, client: Any) -> None:
    unavailable, bad_request = client.weir_statuses
    for sequence in (*SEQUENCES, "text"):
        assert total(client, "plain", sequence, start=True) == 1
        assert total(client, "plain", sequence) == 2
    kill(stateful, "scheduler")
    lost = "the state of sequence {} of model 'plain' was lost with the scheduler that had it: start the sequence again"
    for sequence in (*SEQUENCES, "text"):
        for _ in range(2):
            status, text = failure(client, "plain", sequence)
            assert (status.removeprefix("StatusCode."), text) == (unavailable, lost.format(sequence))
    status, text = failure(client, "plain", UNSTARTED)
    assert status.removeprefix("StatusCode.") == bad_request
    assert text == (
        f"inference request for sequence {UNSTARTED} to model 'plain' must specify the START flag on the first request "
        "of the sequence"
    )
    for sequence in (*SEQUENCES, "text"):
        assert total(client, "plain", sequence, start=True) == 1
        assert total(client, "plain", sequence) == 2


def test_a_loss_is_named_also_when_the_worker_is_lost_with_the_scheduler(stateful: Server, client: Any) -> None:
    """No worker knows the sequence any more: any counts as lost for as long as a sequence may be idle."""
    wait_until(lambda: has_started(client, "plain", 7))
    kill(stateful, "scheduler", "worker")
    stateful.wait_ready()
    status, text = failure(client, "plain", 7)
    assert status.removeprefix("StatusCode.") == client.weir_statuses[0]
    assert "was lost with the scheduler that had it" in text

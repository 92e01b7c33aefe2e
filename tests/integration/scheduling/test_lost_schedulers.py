"""Sequences whose scheduler is killed: those with checkpoints continue, others end with an error that names the loss."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.sequences import write_accumulator, write_checkpointed
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

SEQUENCES = range(1, 7)
UNSTARTED = 99
CHECKPOINTED = "third"
"""Has a checkpoint at every third request, so that those since the last one run again."""


@pytest.fixture
def stateful(tmp_path: Path) -> Iterator[Server]:
    """A server of each test's own, for it restarts a role only so many times."""
    (models := tmp_path / "models").mkdir()
    write_accumulator(models, "plain", "oldest { max_candidate_sequences: 64 }")
    write_checkpointed(models, CHECKPOINTED, 3, strategy="oldest { max_candidate_sequences: 64 }")
    with Server(tmp_path, models) as started:
        yield started


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


def test_a_checkpointed_sequence_continues_at_the_next_scheduler(stateful: Server, client: Any) -> None:
    """After one, two and more losses, at a checkpoint and between two."""
    for sequence in (*SEQUENCES, "text"):
        assert total(client, CHECKPOINTED, sequence, start=True) == 1
    for done in (1, 2, 3, 5):
        kill(stateful, "scheduler")
        for sequence in (*SEQUENCES, "text"):
            assert total(client, CHECKPOINTED, sequence) == done + 1
            if done == 3:
                assert total(client, CHECKPOINTED, sequence) == done + 2
    status, text = failure(client, CHECKPOINTED, UNSTARTED)
    assert status.removeprefix("StatusCode.") == client.weir_statuses[1]
    assert "must specify the START flag" in text


def test_a_checkpointed_sequence_outlives_scheduler_and_worker(stateful: Server, client: Any) -> None:
    wait_until(lambda: has_started(client, CHECKPOINTED, 8))
    assert [total(client, CHECKPOINTED, 8) for _ in range(4)] == [2, 3, 4, 5]
    kill(stateful, "scheduler", "worker")
    stateful.wait_ready()
    assert [total(client, CHECKPOINTED, 8) for _ in range(3)] == [6, 7, 8]


def test_sequences_go_on_while_schedulers_are_killed(stateful: Server) -> None:
    """Requests wait and run when the scheduler is killed: each is counted once, in order."""
    over, steps, losses = threading.Event(), dict.fromkeys(range(100, 112), 0), list[str]()

    def one(sequence: int) -> None:
        with stateful.http() as client:
            client.weir_inputs = http_inputs
            while not over.is_set():
                try:
                    answer = total(client, CHECKPOINTED, sequence, start=steps[sequence] == 0)
                except InferenceServerException as error:
                    losses.append(str(error))
                    return
                steps[sequence] += 1
                if answer != steps[sequence]:
                    losses.append(f"sequence {sequence}: {answer} after {steps[sequence]} requests")

    def wait_for_progress() -> None:
        before = dict(steps)
        wait_until(lambda: losses or all(steps[sequence] >= before[sequence] + 20 for sequence in steps))

    with ThreadPoolExecutor(len(steps)) as pool:
        running = [pool.submit(one, sequence) for sequence in steps]
        try:
            wait_for_progress()
            for _ in range(3):
                kill(stateful, "scheduler")
                wait_for_progress()
        finally:
            over.set()
        for future in running:
            future.result(60)
    print(f"{sum(steps.values())} requests of {len(steps)} sequences, three schedulers lost: {losses}")
    assert losses == []

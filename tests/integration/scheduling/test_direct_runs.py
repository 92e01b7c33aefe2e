"""Ensembles whose models are on the worker of the ensemble: most steps start there without the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest

from tests.support.clients.stock import grpc_inputs
from tests.support.models.ensembles import write_ensemble
from tests.support.models.zoo import write_identity
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

STEPS = ("first", "second", "third")
IN_FLIGHT = 16
MODELS = ("chain", *STEPS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("direct")
    models = folder / "models"
    for step in STEPS:
        write_identity(models, step, "FP32")
    tensors = ("IN", "A", "B", "OUT")
    steps = [(step, {"IN": tensors[at]}, {"OUT": tensors[at + 1]}) for at, step in enumerate(STEPS)]
    write_ensemble(models, "chain", {"IN": ("FP32", [-1])}, {"OUT": ("FP32", [-1])}, steps, 8)
    with Server(folder, models, "--log-verbose=1") as started:
        yield started
        assert started.in_flight() == 0


def responses(
    server: Server, models: Sequence[str], meanwhile: Callable[[], None] = lambda: None, rows: int = 4
) -> list[str]:
    """The errors among the responses to a request for each of `models`; `meanwhile` is called half-way."""
    errors: list[str] = []
    free, done = threading.Semaphore(IN_FLIGHT), threading.Semaphore(0)

    def responded(sent: np.ndarray, result: object, error: object) -> None:
        if error is not None:
            errors.append(str(error))
        elif not np.array_equal(result.as_numpy("OUT"), sent):  # type: ignore[attr-defined]
            errors.append("another's content")
        free.release()
        done.release()

    with server.grpc() as client:
        for number, model in enumerate(models):
            assert free.acquire(timeout=30)
            sent = np.full((1, rows), number, np.float32)
            client.async_infer(model, grpc_inputs({"IN": sent}), partial(responded, sent), client_timeout=30)
            if number == len(models) // 2:
                meanwhile()
        for _ in models:
            assert done.acquire(timeout=30)
    return errors


def counted(server: Server) -> dict[str, tuple[int, int, int]]:
    """For each model: requests, executions, and requests that the scheduler knows to be in batches."""
    metrics = server.metrics()
    names = ("nv_inference_request_success", "nv_inference_exec_count", "weir_batch_requests_sum")
    requests, executions, batched = ({model: int(metrics[name, model]) for model in MODELS} for name in names)
    return {model: (requests[model], executions[model], batched[model]) for model in MODELS}


def test_steps_are_counted_as_ever_though_most_do_not_come_to_the_scheduler(server: Server) -> None:
    before, sent = counted(server), 600
    assert responses(server, ["chain"] * sent) == []
    wait_until(
        lambda: all(counted(server)[model][2] - before[model][2] == sent for model in MODELS)
    )  # reports are late
    after = counted(server)
    for model in MODELS:
        assert after[model][0] - before[model][0] == sent
        assert 0 < after[model][1] - before[model][1] <= sent
    assert server.batches("chain").total() == sent
    assert 0 < server.batches("third").total() < sent // 2


def test_steps_share_their_models_with_other_callers(server: Server) -> None:
    before = counted(server)
    assert responses(server, ["chain", "second", "chain", "second"] * 100) == []
    wait_until(lambda: counted(server)["second"][2] - before["second"][2] == 400)
    after = counted(server)
    assert [after[model][0] - before[model][0] for model in MODELS] == [200, 200, 400, 200]


def test_large_tensors_between_steps_stay_in_shared_memory_and_are_released(server: Server) -> None:
    assert responses(server, ["chain"] * 50, rows=100_000) == []
    wait_until(lambda: server.metrics()["weir_worker_payload_slots", ""] == 0)


def test_requests_of_a_worker_that_dies_run_again(server: Server) -> None:
    assert responses(server, ["chain"] * 400, lambda: server.kill("worker") and None) == []
    server.wait_ready()

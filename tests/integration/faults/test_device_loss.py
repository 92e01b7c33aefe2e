"""A GPU fault under load: the worker exits and is restarted, and every request gets its response."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.support.servers.weir_server import Server, alive
from tests.support.waiting import wait_until
from weir.runtime.process_memory import available_memory_bytes
from weir.worker.cuda.pinned import default_pool_bytes

TESTS = Path(__file__).parents[2]

ENDS = "the worker exits, so that another one can take its place"

CONFIG = """
backend: "made_up"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [1] }
instance_group { kind: KIND_GPU count: 2 }
dynamic_batching { }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("device_loss")
    (folder / "models" / "double" / "1").mkdir(parents=True)
    (folder / "models" / "double" / "config.pbtxt").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        here = [str(TESTS / "support" / "fakes" / "gpu_worker"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, here)))
        patch.setenv("MADE_UP_GPU_FAULT", str(folder / "fault"))
        started = Server(folder, folder / "models")
    yield started
    started.stop()


def ask(client: tritonclient.http.InferenceServerClient, value: float) -> float:
    tensor = tritonclient.http.InferInput("IN", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[value]], np.float32))
    return float(client.infer("double", [tensor]).as_numpy("OUT").item())


def test_models_run_on_the_gpu_and_pinned_memory_is_told(server: Server) -> None:
    with server.http() as client:
        assert [ask(client, value) for value in (1, 2.5)] == [3, 6]
    metrics = server.metrics()
    assert metrics["nv_pinned_memory_pool_total_bytes", ""] == default_pool_bytes(available_memory_bytes())
    assert 2 * 65536 <= metrics["nv_pinned_memory_pool_used_bytes", ""] <= 8 * 65536


def test_a_fault_costs_no_request(server: Server) -> None:
    worker = server.pids()["worker"]
    done = threading.Semaphore(0)

    def client_s(number: int) -> list[float]:
        answers = []
        with server.http() as client:
            for at in range(60):
                answers.append(ask(client, number * 1000 + at))
                done.release()
        return answers

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(client_s, number) for number in range(8)]
        for _ in range(80):
            assert done.acquire(timeout=20)
        (server.folder / "fault").touch()
        answers = [each.result(60) for each in running]
    assert answers == [[2 * (number * 1000 + at) + 1 for at in range(60)] for number in range(8)]
    assert not alive(worker)
    assert wait_until(lambda: server.pids().get("worker")) != worker
    assert f"{ENDS}: CUDA error cudaErrorIllegalAddress" in server.log()


@pytest.mark.slow
def test_a_request_that_faults_again_and_again_is_given_up(server: Server) -> None:
    deaths = server.log().count(ENDS)
    with server.http() as client:
        with pytest.raises(
            InferenceServerException, match="the model's worker or process died 4 times while running this request"
        ):
            ask(client, 666)
        server.wait_ready()
        assert [ask(client, value) for value in (1, 2)] == [3, 5]
    # Each death counts once: what was lost didn't come back to the worker that was about to end.
    assert server.log().count(ENDS) - deaths == 4

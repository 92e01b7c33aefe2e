"""A model is reloaded repeatedly under load: no request fails, and none is answered by an unloaded version."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.zoo import config_text, write_graph, write_model, write_slow
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

Serve = Callable[..., Server]

SMALL, LARGE = 8, 40_000  # the outputs of a large one lie in shared memory, which a reload must not take away early


def write_plus(root: Path, number: float, instances: int) -> None:
    """Model `plus`, which adds `number`, as so many instances."""
    tensors = {"IN": ("FP32", [-1])}, {"OUT": ("FP32", [-1])}
    group = f"instance_group [{{ count: {instances} kind: KIND_CPU }}]\ndynamic_batching {{ }}"
    if not (root / "plus").exists():
        write_model(root, "plus", None)
    write_graph(
        root / "plus" / "1" / "model.onnx",
        [helper.make_node("Add", ["IN", "NUMBER"], ["OUT"])],
        {"IN": ("FP32", [-1, -1])},
        {"OUT": ("FP32", [-1, -1])},
        NUMBER=number,
    )
    (root / "plus" / "config.pbtxt").write_text(config_text("plus", "onnxruntime", *tensors, 8, group))


class Askers:
    """Threads with stock clients that ask without a pause until they are told to stop."""

    def __init__(self, server: Server, threads: int) -> None:
        self._server = server
        self._stopped = threading.Event()
        self.answers = itertools.count()
        self.answered = 0
        self.failures: list[str] = []
        self.oldest, self.newest = 0.0, 0.0  # numbers that may be added at this moment
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, thread: int) -> None:
        is_http = thread % 2 == 0
        with self._server.http() if is_http else self._server.grpc() as client:
            for request in itertools.count():
                if self._stopped.is_set():
                    return
                array = np.full((1, LARGE if request % 50 == thread else SMALL), request, np.float32)
                inputs = (http_inputs if is_http else grpc_inputs)({"IN": array})
                oldest = self.oldest
                try:
                    added = client.infer("plus", inputs).as_numpy("OUT") - array
                    if added.shape != array.shape or not (oldest <= added.min() == added.max() <= self.newest):
                        self.failures.append(f"{oldest}..{self.newest}: got {added.min()}, {added.shape}")
                except Exception as error:
                    self.failures.append(repr(error))
                self.answered = next(self.answers) + 1


def reload_under_load(server: Server, root: Path, requests: int, reloads: int, threads: int = 6) -> Askers:
    with server.http() as control:
        control.load_model("plus")
        askers = Askers(server, threads)
        try:
            done = 0
            while not askers.failures and (done < reloads or askers.answered < requests):
                enough = askers.answered + requests // (reloads + 1)
                done += 1
                write_plus(root, float(done), 1 + done % 3)
                askers.newest = float(done)
                control.load_model("plus")
                askers.oldest = float(done)
                wait_until(lambda enough=enough: askers.answered >= enough or askers.failures, 60)
        finally:
            askers.stop()
    assert askers.failures == []
    assert askers.answered >= requests
    assert done >= reloads
    return askers


def test_no_request_is_lost_by_reloads(serve: Serve, tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_plus(root, 0.0, 2)
    reload_under_load(serve(root, "--model-control-mode=explicit"), root, requests=1_500, reloads=4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_of_many_is_lost_by_many_reloads(serve: Serve, tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_plus(root, 0.0, 2)
    began_s = time.monotonic()
    askers = reload_under_load(serve(root, "--model-control-mode=explicit"), root, requests=20_000, reloads=40)
    print(f"{askers.answered} requests, 40 reloads or more, {time.monotonic() - began_s:.0f} s, none failed")


def test_what_is_queued_when_a_model_is_unloaded_is_answered(serve: Serve, tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_slow(root, "slow", "")
    server = serve(root, "--model-control-mode=explicit", "--load-model=slow")
    outcomes: list[object] = []
    with server.grpc() as client:
        for value in range(8):
            inputs = grpc_inputs({"VALUE": np.full((1, 1), value), "DELAY_MS": np.full((1, 1), 100, np.float32)})
            client.async_infer("slow", inputs, lambda result, error: outcomes.append(error or result))
        wait_until(lambda: server.in_flight() == 8)
        client.unload_model("slow")
        assert len(outcomes) < 8
        assert not client.is_model_ready("slow")
        rows = client.get_model_repository_index(as_json=True)["models"]
        assert rows == [{"name": "slow", "version": "1", "state": "UNLOADING"}]
        wait_until(lambda: len(outcomes) == 8)
        values = {int(outcome.as_numpy("VALUE_OUT")[0, 0]) for outcome in outcomes}
        assert values == set(range(8))
        wait_until(lambda: "UNAVAILABLE" in str(client.get_model_repository_index()))
    assert server.python_children() == []

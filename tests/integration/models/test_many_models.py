"""A repository of many models: start, requests, stop."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_identity, write_python_model
from tests.support.servers.weir_server import Server

MODELS = 10
"""Of each kind."""


@pytest.mark.timeout(180)
def test_many_models(serve: Callable[..., Server], tmp_path: Path) -> None:
    models = tmp_path / "models"
    for number in range(MODELS):
        write_identity(models, f"onnx_{number}", "FP32")
        tensors = {"IN": ("FP32", [-1])}, {"IN_OUT": ("FP32", [-1])}
        write_python_model(models, f"python_{number}", "identity", *tensors, 8)
    started = time.monotonic()
    server = serve(models)
    ready = time.monotonic()
    assert server.is_ready()
    assert len(server.python_children()) == MODELS

    def ask(number: int) -> None:
        with server.http() as client:
            for name, output in ((f"onnx_{number}", "OUT"), (f"python_{number}", "IN_OUT")):
                value = np.full((2, 3), number, np.float32)
                np.testing.assert_array_equal(client.infer(name, http_inputs({"IN": value})).as_numpy(output), value)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(MODELS)))
    answered = time.monotonic()
    assert server.stop() == 0
    stopped = time.monotonic()
    print(
        f"{2 * MODELS} models: started in {ready - started:.1f} s, each answered in {answered - ready:.1f} s, "
        f"stopped in {stopped - answered:.1f} s"
    )

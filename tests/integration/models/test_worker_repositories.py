"""Several workers with separate repositories follow one repository API."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.integration.models.test_reload import reload_under_load, write_plus
from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_python_model
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import Start
from tests.support.waiting import wait_until

SLOW_TO_LOAD = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(0.8)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


def write_slow_to_load(root: Path, name: str) -> None:
    folder = write_python_model(root, name, "identity", {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1])})
    (folder / "1" / "model.py").write_text(SLOW_TO_LOAD)


def test_models_are_loaded_by_the_workers_that_have_them(start: Start, tmp_path: Path) -> None:
    both, one = tmp_path / "both", tmp_path / "one"
    write_plus(both, 0.0, 1)
    write_slow_to_load(both, "slow_to_load")
    write_slow_to_load(one, "of_one")
    explicit = "--model-control-mode=explicit"
    start("scheduler")
    first = start("worker", f"--model-repository={both}", f"--model-repository={one}", explicit)
    second = start("worker", f"--model-repository={both}", explicit)
    ports = start("gateway", "--http-port=0", "--grpc-port=0", "--metrics-port=0").facts
    endpoints = Endpoints(*(f"127.0.0.1:{ports[f'{door}_port']}" for door in ("http", "grpc", "metrics")))
    with endpoints.http() as client:
        assert [row["name"] for row in client.get_model_repository_index()] == ["of_one", "plus", "slow_to_load"]
        client.load_model("of_one")
        array = np.ones(1, np.float32)
        assert client.infer("of_one", http_inputs({"IN": array})).as_numpy("OUT") == array
        assert "successfully loaded 'of_one'" in first.log()
        assert "loading: of_one" not in second.log()
        with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
            client.load_model("nobody")

        reload_under_load(endpoints, both, requests=200, reloads=2, threads=4)

        # One of the workers dies while it loads: the other is what counts.
        outcomes: list[object] = []
        loading = threading.Thread(target=lambda: outcomes.append(load(endpoints, "slow_to_load")))
        loading.start()
        wait_until(lambda: "loading: slow_to_load" in second.log() and "loading: slow_to_load" in first.log())
        second.end(signal.SIGKILL)
        loading.join()
        assert outcomes == ["loaded"]
        client.infer("slow_to_load", http_inputs({"IN": array}))

        # And one that comes later has what is wanted.
        third = start("worker", f"--model-repository={both}", explicit)
        assert "successfully loaded 'plus'" in third.log()
        assert "successfully loaded 'slow_to_load'" in third.log()
        client.unload_model("slow_to_load")
        wait_until(lambda: "successfully unloaded 'slow_to_load' version 1" in third.log())
        assert not client.is_model_ready("slow_to_load")


def load(endpoints: Endpoints, name: str) -> str:
    with endpoints.http() as client:
        client.load_model(name)
    return "loaded"

"""`Repository`: a running server whose repository changes, and the clients that request loads and unloads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import config_text
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

ADDS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() + NUMBER)]) for r in requests
        ]
"""
ADDS_CONFIG = {
    "backend": "python",
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}],
}
NOT_POLLED = "failed to load '{}', failed to poll from model repository"


def write_adds(root: Path, name: str, number: float, version: int = 1, more: str = "") -> None:
    (root / name / str(version)).mkdir(parents=True, exist_ok=True)
    config = config_text(name, "python", {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1])}, 0, more)
    (root / name / "config.pbtxt").write_text(config)
    (root / name / str(version) / "model.py").write_text(ADDS.replace("NUMBER", str(number)))


class Repository:
    """A running server, the folder of its models, and clients for it."""

    def __init__(self, server: Server, root: Path) -> None:
        self.server = server
        self.root = root
        self.http = server.http()
        self.grpc = server.grpc()
        self.raw = httpx.Client(base_url=f"http://{server.http_place}", timeout=40)
        self._channel = grpc.insecure_channel(server.grpc_place)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        self.http.close()
        self.grpc.close()
        self.raw.close()
        self._channel.close()

    def added(self, name: str, version: str = "") -> float:
        """What the model adds."""
        answer = self.http.infer(name, http_inputs({"IN": np.ones(1, np.float32)}), model_version=version)
        return float(answer.as_numpy("OUT")[0]) - 1

    def rows(self, name: str) -> list[dict[str, str]]:
        """The rows of one model in the index."""
        return [row for row in self.http.get_model_repository_index() if row["name"] == name]

    def post(self, path: str, body: Any = b"") -> tuple[int, str]:
        """(status, error text) of a POST."""
        answer = self.raw.post(path, content=body if isinstance(body, bytes) else json.dumps(body))
        return answer.status_code, answer.json()["error"] if answer.content else ""

    def load(self, name: str, body: Any = b"") -> tuple[int, str]:
        return self.post(f"/v2/repository/models/{name}/load", body)

    def unload(self, name: str, body: Any = b"") -> tuple[int, str]:
        """Unloads, and waits until it is done."""
        answer = self.post(f"/v2/repository/models/{name}/unload", body)
        if answer[0] == 200:
            wait_until(lambda: all(row.get("state") in (None, "UNAVAILABLE") for row in self.rows(name)))
        return answer

    def infer(self, name: str, version: str = "") -> tuple[int, str]:
        where = f"/v2/models/{name}/versions/{version}" if version else f"/v2/models/{name}"
        inputs = [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1.0]}]
        return self.post(f"{where}/infer", {"inputs": inputs})

    def refusal(self, method: str, request: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as refused:
            getattr(self.stub, method)(request)
        return refused.value.code(), refused.value.details()


def serving(folder: Path, *options: str) -> Iterator[Repository]:
    with Server(folder, folder / "models", *options) as server:
        repository = Repository(server, folder / "models")
        yield repository
        repository.close()


def folders(repository: Repository) -> list[Path]:
    return list((repository.server.folder / "tmp").glob("weir-model-*"))


INDEX = "/v2/repository/index"
NOT_ALLOWED = (503, "explicit model load / unload is not allowed if polling is enabled")
NOT_ALLOWED_HERE = (
    503,
    f"{NOT_ALLOWED[1]}, nor with --model-control-mode=none, as here: start the server with --model-control-mode=explicit",
)

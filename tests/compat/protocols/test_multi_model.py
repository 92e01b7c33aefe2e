"""SageMaker's multi-model endpoints, as a running Triton 2.51 answers them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from tests.support.models.zoo import write_identity
from tests.support.servers.weir_server import Server

TARGET = "X-Amzn-SageMaker-Target-Model"
ENSEMBLE = """
name: "whole" platform: "ensemble" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step {
  model_name: "step" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } }
"""
FAILING = """
class TritonPythonModel:
    def initialize(self, args):
        raise MemoryError("Out of memory at load")
    def execute(self, requests):
        return []
"""


class Endpoint:
    """A server for a multi-model endpoint, and the folder of its models."""

    def __init__(self, server: Server, root: Path, http: httpx.Client) -> None:
        self.server = server
        self.root = root
        self.http = http

    def archive(self, name: str) -> Path:
        folder = self.root / name / "model"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def load(self, name: str, url: Path, target: str = "") -> httpx.Response:
        headers = {TARGET: target} if target else {}
        return self.http.post("/models", json={"model_name": name, "url": str(url)}, headers=headers)

    def invoke(self, name: str, tensor: str = "IN", **headers: str) -> httpx.Response:
        value = triton.InferInput(tensor, [1, 2], "FP32")
        value.set_data_from_numpy(np.ones((1, 2), np.float32), binary_data=False)
        wanted = [triton.InferRequestedOutput("OUT", binary_data=False)]
        body, _ = triton.InferenceServerClient.generate_request_body([value], outputs=wanted)
        return self.http.post(f"/models/{name}/invoke", content=body, headers=headers)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("multi")
    (models := folder / "models").mkdir()
    (root := folder / "root").mkdir()
    options = ("--model-control-mode=explicit", "--allow-sagemaker", "--sagemaker-port=0")
    with (
        Server(folder, models, *options, environment={"WEIR_SAGEMAKER_ROOT": str(root)}) as started,
        httpx.Client(base_url=started.printed_value("SageMaker"), timeout=30) as http,
    ):
        yield Endpoint(started, root, http)


def test_the_life_of_a_model(endpoint: Endpoint) -> None:
    url = write_identity(endpoint.archive("aa").parent, "model", "FP32")
    assert endpoint.http.get("/models").json() == {"models": []}
    assert endpoint.http.get("/models/aa").status_code == 404
    assert endpoint.invoke("aa").status_code == 404
    assert (endpoint.load("aa", url).status_code, endpoint.load("aa", url).status_code) == (200, 409)
    row = {"modelName": "aa", "modelUrl": str(url.parent)}
    assert endpoint.http.get("/models").json() == {"models": [row]}
    assert endpoint.http.get("/models/aa").json() == row
    answered = endpoint.invoke("aa")
    assert (answered.status_code, answered.json()["model_name"]) == (200, "aa")
    assert answered.json()["outputs"][0]["data"] == [1.0, 1.0]
    assert endpoint.http.delete("/models/aa").status_code == 200
    assert endpoint.http.get("/models").json() == {"models": []}
    assert endpoint.http.delete("/models/aa").status_code == 404
    assert endpoint.load("aa", url).status_code == 200
    assert endpoint.invoke("aa").status_code == 200
    assert endpoint.http.delete("/models/aa").status_code == 200


def test_a_removed_model_is_registered_again_by_a_rollback(endpoint: Endpoint) -> None:
    address = f"http://{endpoint.server.http_place}/v2"

    def names() -> set[str]:
        return {row["name"] for row in httpx.post(f"{address}/repository/index", timeout=30).json()}

    before, url = names(), write_identity(endpoint.archive("back").parent, "model", "FP32")
    assert endpoint.load("back", url).status_code == 200
    (name,) = names() - before
    assert endpoint.http.delete("/models/back").status_code == 200
    assert endpoint.invoke("back").status_code == 404
    undone = httpx.post(f"{address}/models/{name}/rollback", timeout=30)
    assert (undone.status_code, undone.json().get("undone", {}).get("kind")) == (200, "unload"), undone.text
    assert endpoint.invoke("back").status_code == 200
    assert endpoint.http.delete("/models/back").status_code == 200


def test_the_header_names_the_model(endpoint: Endpoint) -> None:
    url = endpoint.archive("bb")
    write_identity(url, "any", "FP32")
    assert endpoint.load("bb", url, "bb.tar.gz").status_code == 200
    assert endpoint.http.get("/models/bb").json() == {"modelName": "bb", "modelUrl": str(url)}
    assert endpoint.invoke("bb", **{TARGET: "bb.tar.gz"}).json()["model_name"] == "bb.tar.gz"
    assert endpoint.invoke("bb").json()["model_name"] == "bb.tar.gz"
    unknown = endpoint.invoke("bb", **{TARGET: "other"})
    assert (unknown.status_code, unknown.json()) == (
        400,
        {"error": "Request for unknown model: 'other' is not found"},
    )
    second = endpoint.archive("bc")
    write_identity(second, "any", "FP32")
    conflict = endpoint.load("bc", second, "bb.tar.gz")
    assert (conflict.status_code, conflict.json()) == (
        409,
        {"error": "failed to register 'bb.tar.gz', there is a conflicting mapping for 'bb.tar.gz'"},
    )
    wrong = endpoint.invoke("bb", tensor="X")
    assert wrong.status_code == 400
    assert endpoint.http.delete("/models/bb").status_code == 200


def test_an_ensemble_comes_and_goes_with_its_models(endpoint: Endpoint) -> None:
    url = endpoint.archive("ee")
    write_identity(url, "step", "FP32")
    (url / "whole" / "1").mkdir(parents=True)
    (url / "whole" / "config.pbtxt").write_text(ENSEMBLE)
    assert endpoint.load("ee", url, "both").status_code == 200
    assert endpoint.invoke("ee").json()["model_name"] == "both"
    assert endpoint.server.is_ready("step")
    assert [row["modelName"] for row in endpoint.http.get("/models").json()["models"]] == ["ee"]
    assert endpoint.http.delete("/models/ee").status_code == 200
    assert not endpoint.server.is_ready("step")


def test_a_model_that_finds_no_memory(endpoint: Endpoint) -> None:
    url = write_identity(endpoint.archive("oo").parent, "model", "FP32")
    (url / "config.pbtxt").write_text(
        'backend: "python" input { name: "IN" data_type: TYPE_FP32 dims: [1] } '
        'output { name: "OUT" data_type: TYPE_FP32 dims: [1] }'
    )
    (url / "1" / "model.py").write_text(FAILING)
    failed = endpoint.load("oo", url)
    assert failed.status_code == 507
    assert "Out of memory at load" in failed.json()["error"]
    assert endpoint.http.get("/models/oo").status_code == 404


def test_requests_that_are_refused(endpoint: Endpoint) -> None:
    outside = endpoint.load("pp", Path("/proc/self"))
    assert outside.status_code == 400
    for content in (b"nojson", b"", b"[]", b'{"model_name": 3}', b'{"url": "/x"}'):
        assert endpoint.http.post("/models", content=content).status_code == 400
    for method, path in (
        ("PUT", "/models/aa"),
        ("DELETE", "/models"),
        ("GET", "/models/aa/invoke"),
        ("POST", "/models/x"),
    ):
        assert endpoint.http.request(method, path).status_code == 400


def test_a_model_survives_the_death_of_its_worker(endpoint: Endpoint) -> None:
    url = write_identity(endpoint.archive("ss").parent, "model", "FP32")
    assert endpoint.load("ss", url).status_code == 200
    endpoint.server.kill("worker")
    endpoint.server.wait_ready("ss")
    assert endpoint.invoke("ss").status_code == 200
    assert endpoint.http.delete("/models/ss").status_code == 200

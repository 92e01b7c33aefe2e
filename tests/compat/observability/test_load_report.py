"""ORCA load reports: the header of responses, as Triton forms it from the metrics of a KV cache."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.models.zoo import config_text, write_identity, write_model
from tests.support.servers.weir_server import Server

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("nv_trt_llm_kv_cache_block_metrics", "blocks", pb_utils.MetricFamily.GAUGE)
        self.metrics = []
        for kind, value in (("used", 3), ("max", 12), ("tokens_per", 64)):
            labels = {"kv_cache_block_type": kind, "model": "language", "version": "1"}
            metric = self.family.Metric(labels=labels)
            metric.set(value)
            self.metrics.append(metric)

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "text").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("out", tensor)]) for tensor in tensors]
"""


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("orca")
    (models := folder / "models").mkdir()
    write_identity(models, "identity", "FP32")
    config = config_text("language", "python", {"text": ("BYTES", [1])}, {"out": ("BYTES", [1])}, 0)
    (write_model(models, "language", config) / "1" / "model.py").write_text(MODEL)
    with Server(folder, models) as started:
        started.wait_ready()
        with httpx.Client(base_url=f"http://{started.http_place}", timeout=20) as client:
            yield client


def generated(http: httpx.Client, wanted: str, name: str = "generate") -> httpx.Response:
    response = http.post(
        f"/v2/models/language/{name}", json={"text": "hi"}, headers={"endpoint-load-metrics-format": wanted}
    )
    assert response.status_code == 200, response.text
    return response


def test_text(http: httpx.Client) -> None:
    report = generated(http, "text").headers["endpoint-load-metrics"]
    assert report.startswith("TEXT ")
    rows = dict(row.split("=") for row in report.removeprefix("TEXT ").split(", "))
    assert rows["named_metrics.kv_cache_utilization"] == "0.250000"
    assert rows["named_metrics.max_token_capacity"] == "768"
    assert 0 <= float(rows["application_utilization"]) <= 1


@pytest.mark.parametrize("name", ["generate", "generate_stream"])
def test_json(http: httpx.Client, name: str) -> None:
    report = generated(http, "json", name).headers["endpoint-load-metrics"]
    named = json.loads(report.removeprefix("JSON "))["named_metrics"]
    assert (named["kv_cache_utilization"], named["max_token_capacity"]) == (0.25, 768)
    assert {"weir_cluster_utilization", "weir_queue_depth", "weir_queue_expected_wait_us"} <= named.keys()


def test_a_model_without_a_kv_cache_reports_its_utilization(http: httpx.Client) -> None:
    document = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
    for _ in range(3):
        response = http.post(
            "/v2/models/identity/infer", json=document, headers={"endpoint-load-metrics-format": "json"}
        )
        report = json.loads(response.headers["endpoint-load-metrics"].removeprefix("JSON "))
        assert 0 <= report["application_utilization"] <= 1
        assert "kv_cache_utilization" not in report["named_metrics"]
        assert response.json()["outputs"][0]["data"] == [1.0]


def test_no_report_without_a_known_format(http: httpx.Client) -> None:
    assert "endpoint-load-metrics" not in generated(http, "xml").headers
    assert "endpoint-load-metrics" not in http.post("/v2/models/language/generate", json={"text": "hi"}).headers

"""Health, metadata, configurations and counters of the server."""

import json
import urllib.request

import numpy as np
import tritonclient.grpc
import tritonclient.http

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.servers.weir_server import Server
from weir.bus.streams.durability import EMBEDDED

Http = tritonclient.http.InferenceServerClient
Grpc = tritonclient.grpc.InferenceServerClient


def test_health(http: Http, grpc: Grpc) -> None:
    for client in (http, grpc):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("add_sub")
        assert client.is_model_ready("all_versions", "2")
        assert not client.is_model_ready("all_versions", "4")
        assert not client.is_model_ready("nowhere")


def test_health_has_no_body(server: Server) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/add_sub/ready"):
        assert server.get(path) == (200, b"")


def test_server_metadata(http: Http, grpc: Grpc) -> None:
    reply = http.get_server_metadata()
    assert reply["name"] == "triton"
    assert "binary_tensor_data" in reply["extensions"]
    assert reply["durability"] == {"ack_is_fsync": True, "reason": EMBEDDED.reason}
    over_grpc = grpc.get_server_metadata()
    assert (over_grpc.name, list(over_grpc.extensions)) == (reply["name"], reply["extensions"])


def test_model_metadata(http: Http, grpc: Grpc) -> None:
    reply = http.get_model_metadata("add_sub")
    assert reply == {
        "name": "add_sub",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": name, "datatype": "INT32", "shape": [-1, 4]} for name in ("A", "B")],
        "outputs": [{"name": name, "datatype": "INT32", "shape": [-1, 4]} for name in ("SUM", "DIFFERENCE")],
    }
    over_grpc = grpc.get_model_metadata("add_sub", as_json=True)
    assert over_grpc["platform"] == reply["platform"]
    assert [tensor["name"] for tensor in over_grpc["outputs"]] == ["SUM", "DIFFERENCE"]
    assert http.get_model_metadata("all_versions")["versions"] == ["1", "2", "3"]
    assert http.get_model_metadata("all_versions", "2")["versions"] == ["2"]
    assert http.get_model_metadata("slow")["platform"] == "python"


def test_model_config(http: Http, grpc: Grpc) -> None:
    config = http.get_model_config("classes")
    assert config["max_batch_size"] == 8
    assert config["output"][0]["label_filename"] == "labels.txt"
    over_grpc = grpc.get_model_config("classes").config
    assert (over_grpc.name, over_grpc.max_batch_size) == ("classes", 8)
    assert over_grpc.output[0].label_filename == "labels.txt"


def test_what_is_not_there_is_not_found(server: Server) -> None:
    for path in ("/v2/models/nowhere", "/v2/models/nowhere/config", "/v2/models/add_sub/versions/7"):
        status, body = server.get(path)
        assert status == 404
        assert json.loads(body)["error"].startswith("Request for unknown model: ")
    for path in ("/v2/", "/v2/nothing", "/v2/models/add_sub/versions/x", "/v2/models/add_sub/infer/"):
        assert server.get(path) == (404, b'{"error":"Not Found"}')


def test_counters_are_right_as_soon_as_the_answer_is_there(server: Server, http: Http, grpc: Grpc) -> None:
    arrays = {"A": np.ones((3, 4), np.int32), "B": np.ones((3, 4), np.int32)}
    for number in range(10):
        before = server.metrics()
        if number % 2:
            http.infer("add_sub", http_inputs(arrays))
        else:
            grpc.infer("add_sub", grpc_inputs(arrays))
        after = server.metrics()
        assert after["nv_inference_request_success", "add_sub"] - before["nv_inference_request_success", "add_sub"] == 1
        assert after["nv_inference_count", "add_sub"] - before["nv_inference_count", "add_sub"] == 3
        assert after["nv_inference_exec_count", "add_sub"] - before["nv_inference_exec_count", "add_sub"] == 1
        assert after["nv_inference_compute_infer_duration_us", "add_sub"] > 0


def test_failures_are_counted_by_reason(server: Server, http: Http) -> None:
    def raising() -> None:
        try:
            http.infer("faulty", http_inputs({"WHAT": np.array([["raise"]], np.object_)}))
        except tritonclient.utils.InferenceServerException:
            pass

    before = server.metrics()
    raising()
    after = server.metrics()
    name = "nv_inference_request_failure"
    assert after[name, "faulty"] - before[name, "faulty"] == 1
    successes = "nv_inference_request_success"
    assert after[successes, "faulty"] == before[successes, "faulty"]


def test_other_paths_of_the_metrics_port_are_empty_pages(server: Server) -> None:
    with urllib.request.urlopen(f"http://{server.metrics_place}/anything", timeout=10) as page:
        assert (page.status, page.read()) == (200, b"")

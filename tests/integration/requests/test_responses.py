"""Correct responses to stock clients for every way to write a request."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc as grpcio
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.clients.stock import RawConnection, grpc_inputs, http_inputs, post
from tests.support.models.zoo import LABELS, ONNX_TYPES
from tests.support.servers.weir_server import Server

Http = tritonclient.http.InferenceServerClient
Grpc = tritonclient.grpc.InferenceServerClient

SAMPLES: dict[str, np.ndarray] = {
    "BOOL": np.array([[True, False, True]]),
    "UINT8": np.array([[0, 1, 255]], np.uint8),
    "UINT16": np.array([[0, 1, 65535]], np.uint16),
    "UINT32": np.array([[0, 1, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 1, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 0, 127]], np.int8),
    "INT16": np.array([[-(2**15), 0, 2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31), 0, 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 0, 2**63 - 1]], np.int64),
    "FP16": np.array([[-1.5, 0.0, 65504.0]], np.float16),
    "BF16": np.array([[-1.5, 0.0, 3.0]], ml_dtypes.bfloat16),
    "FP32": np.array([[-1.5, 0.1, 3.4e38]], np.float32),
    "FP64": np.array([[-1.5, 0.1, 1.7e308]], np.float64),
    "BYTES": np.array([[b"", "naïve ☃".encode(), b"a\0b"]], np.object_),
}
JSON_TYPES = sorted(SAMPLES.keys() - {"FP16", "BF16"})


def sample(datatype: str, as_json: bool = False) -> np.ndarray:
    if datatype == "BYTES" and as_json:
        return np.array([["", "naïve ☃", '"quoted"\n']], np.object_)
    return SAMPLES[datatype]


def output_of(datatype: str) -> str:
    return "IN_OUT" if datatype == "BF16" else "OUT"


def text(array: np.ndarray) -> np.ndarray:
    return np.array([e.encode() if isinstance(e, str) else e for e in array.ravel()], np.object_).reshape(array.shape)


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpcio.insecure_channel(server.grpc_place) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.mark.parametrize("datatype", SAMPLES)
def test_http_binary(http: Http, datatype: str) -> None:
    array, output = sample(datatype), output_of(datatype)
    wanted = [tritonclient.http.InferRequestedOutput(output, binary_data=True)]
    result = http.infer(f"identity_{datatype}", http_inputs({"IN": (array, datatype)}), outputs=wanted)
    assert result.get_output(output)["datatype"] == datatype
    np.testing.assert_array_equal(result.as_numpy(output), array)


@pytest.mark.parametrize("datatype", JSON_TYPES)
def test_http_json(http: Http, datatype: str) -> None:
    array = sample(datatype, as_json=True)
    wanted = [tritonclient.http.InferRequestedOutput("OUT", binary_data=False)]
    inputs = http_inputs({"IN": (array, datatype)}, binary=False)
    result = http.infer(f"identity_{datatype}", inputs, outputs=wanted, request_id="a1")
    answer = result.get_response()
    assert answer["id"] == "a1"
    assert answer["outputs"][0]["data"] == array.ravel().tolist()
    given = text(array) if datatype == "BYTES" else array
    got = result.as_numpy("OUT")
    np.testing.assert_array_equal(text(got) if datatype == "BYTES" else got, given)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_http_has_no_json_for_half_precision(server: Server, datatype: str) -> None:
    body = json.dumps({"inputs": [{"name": "IN", "shape": [1, 1], "datatype": datatype, "data": [1]}]}).encode()
    with RawConnection(server.port) as connection:
        answer = connection.ask(post(f"/v2/models/identity_{datatype}/infer", body))
    assert answer is not None
    assert answer.status == 400
    assert f"{datatype} data via JSON is not supported" in answer.error


@pytest.mark.parametrize(("inputs_binary", "outputs_binary"), [(True, False), (False, True)])
def test_http_mixed(http: Http, inputs_binary: bool, outputs_binary: bool) -> None:
    a, b = np.arange(8, dtype=np.int32).reshape(2, 4), np.full((2, 4), 3, np.int32)
    inputs = [*http_inputs({"A": a}, binary=inputs_binary), *http_inputs({"B": b}, binary=not inputs_binary)]
    outputs = [
        tritonclient.http.InferRequestedOutput("SUM", binary_data=outputs_binary),
        tritonclient.http.InferRequestedOutput("DIFFERENCE", binary_data=not outputs_binary),
    ]
    result = http.infer("add_sub", inputs, outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("SUM"), a + b)
    np.testing.assert_array_equal(result.as_numpy("DIFFERENCE"), a - b)


def test_http_raw_body(server: Server) -> None:
    array = np.arange(5, dtype=np.float32)
    request = post("/v2/models/identity_FP32/infer", array.tobytes(), "Inference-Header-Content-Length: 0")
    with RawConnection(server.port) as connection:
        answer = connection.ask(request)
    assert answer is not None
    assert answer.status == 200
    header = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.body[:header])["outputs"][0]["shape"] == [1, 5]
    np.testing.assert_array_equal(np.frombuffer(answer.body[header:], np.float32), array)


def test_without_a_list_of_outputs_all_of_them_come(http: Http, grpc: Grpc) -> None:
    a, b = np.array([[1, 2, 3, 4]], np.int32), np.array([[4, 3, 2, 1]], np.int32)
    for result in (
        http.infer("add_sub", http_inputs({"A": a, "B": b})),
        grpc.infer("add_sub", grpc_inputs({"B": b, "A": a})),
    ):
        np.testing.assert_array_equal(result.as_numpy("SUM"), a + b)
        np.testing.assert_array_equal(result.as_numpy("DIFFERENCE"), a - b)


def test_only_the_outputs_that_were_asked_for_come(http: Http, grpc: Grpc) -> None:
    arrays = {"A": np.ones((1, 4), np.int32), "B": np.ones((1, 4), np.int32)}
    over_http = http.infer(
        "add_sub", http_inputs(arrays), outputs=[tritonclient.http.InferRequestedOutput("DIFFERENCE")]
    )
    assert [output["name"] for output in over_http.get_response()["outputs"]] == ["DIFFERENCE"]
    over_grpc = grpc.infer("add_sub", grpc_inputs(arrays), outputs=[tritonclient.grpc.InferRequestedOutput("SUM")])
    assert [output.name for output in over_grpc.get_response().outputs] == ["SUM"]


@pytest.mark.parametrize("datatype", SAMPLES)
def test_grpc_raw(grpc: Grpc, datatype: str) -> None:
    array, output = sample(datatype), output_of(datatype)
    result = grpc.infer(f"identity_{datatype}", grpc_inputs({"IN": (array, datatype)}), request_id="g1")
    assert result.get_response().id == "g1"
    assert result.get_output(output).datatype == datatype
    np.testing.assert_array_equal(result.as_numpy(output), array)


TYPED_FIELDS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@pytest.mark.parametrize("datatype", TYPED_FIELDS)
def test_grpc_typed(stub: Any, datatype: str) -> None:
    array = sample(datatype)
    request = service_pb2.ModelInferRequest(model_name=f"identity_{datatype}")
    given = request.inputs.add(name="IN", datatype=datatype, shape=list(array.shape))
    getattr(given.contents, TYPED_FIELDS[datatype]).extend(array.ravel().tolist())
    result = tritonclient.grpc.InferResult(stub.ModelInfer(request, timeout=10))
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


def test_every_onnx_type_and_bf16_has_a_sample() -> None:
    assert SAMPLES.keys() == ONNX_TYPES.keys() | {"BF16"}


def test_nan_and_infinity_survive_json(http: Http) -> None:
    array = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    result = http.infer(
        "identity_FP32", http_inputs({"IN": array}), outputs=[tritonclient.http.InferRequestedOutput("OUT", False)]
    )
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (1, 7), (5, 2)])
def test_variable_dims(http: Http, grpc: Grpc, shape: tuple[int, int]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for result in (http.infer("grid", http_inputs({"IN": array})), grpc.infer("grid", grpc_inputs({"IN": array}))):
        np.testing.assert_array_equal(result.as_numpy("OUT"), -array)


def test_a_reshape_is_between_client_and_model(http: Http) -> None:
    array = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    result = http.infer("reshaped", http_inputs({"IN": array}))
    np.testing.assert_array_equal(result.as_numpy("OUT"), -array.reshape(2, 3, 2))


def test_a_model_without_a_configuration(http: Http, grpc: Grpc) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(http.infer("bare", http_inputs({"IN": array})).as_numpy("OUT"), -array)
    np.testing.assert_array_equal(grpc.infer("bare", grpc_inputs({"IN": array})).as_numpy("OUT"), -array)
    config = http.get_model_config("bare")
    assert (config["backend"], config["platform"]) == ("onnxruntime", "onnxruntime_onnx")
    assert config["input"][0]["data_type"] == "TYPE_FP32"


def test_classification_with_labels(http: Http, grpc: Grpc) -> None:
    array = np.array([[0.1, 0.5, 0.2, 0.9, 0.3], [5, 4, 3, 2, 1]], np.float32)
    over_http = http.infer(
        "classes", http_inputs({"IN": array}), outputs=[tritonclient.http.InferRequestedOutput("OUT", class_count=2)]
    )
    over_grpc = grpc.infer(
        "classes", grpc_inputs({"IN": array}), outputs=[tritonclient.grpc.InferRequestedOutput("OUT", class_count=2)]
    )
    for result in (over_http, over_grpc):
        rows = [[entry.decode().split(":") for entry in row] for row in result.as_numpy("OUT")]
        assert [[(int(index), label) for _, index, label in row] for row in rows] == [
            [(3, LABELS[3]), (1, LABELS[1])],
            [(0, LABELS[0]), (1, LABELS[1])],
        ]
        assert float(rows[0][0][0]) == pytest.approx(0.9, abs=1e-5)


def test_parameters_reach_a_python_model_and_come_back(http: Http, grpc: Grpc) -> None:
    given = {"text": "ünï", "number": -7, "flag": True}
    arrays = {"ANY": np.zeros((1, 1), np.float32)}
    reply = [
        http.infer("echo", http_inputs(arrays), request_id="p", parameters=given),
        grpc.infer("echo", grpc_inputs(arrays), request_id="p", parameters=given),
    ]
    for result in reply:
        document = json.loads(result.as_numpy("TOLD")[0, 0])
        assert document == {"id": "p", "parameters": given, "outputs": ["TOLD"]}
    assert reply[0].get_response()["parameters"] == given
    parameters = reply[1].get_response().parameters
    assert parameters["text"].string_param == "ünï"
    assert parameters["number"].int64_param == -7
    assert parameters["flag"].bool_param is True


def test_a_python_model_s_errors_are_answers(http: Http) -> None:
    def say(word: str) -> Any:
        return http.infer("faulty", http_inputs({"WHAT": np.array([[word]], np.object_)}))

    with pytest.raises(tritonclient.utils.InferenceServerException, match="as you asked") as refused:
        say("error")
    assert refused.value.status() == "404"
    with pytest.raises(
        tritonclient.utils.InferenceServerException,
        match=r"Failed to process the request\(s\) for model 'faulty_0', message: ValueError: asked to raise",
    ) as failed:
        say("raise")
    assert failed.value.status() == "500"
    assert say("fine").as_numpy("SAID").tolist() == [[b"fine"]]


@pytest.mark.parametrize(
    ("model", "version", "answered", "sums"),
    [
        ("all_versions", "", "3", 4.0),
        ("all_versions", "1", "1", 2.0),
        ("all_versions", "2", "2", 3.0),
        ("some_versions", "", "3", 4.0),
        ("some_versions", "1", "1", 2.0),
        ("latest_version", "", "3", 4.0),
        ("latest_version", "3", "3", 4.0),
    ],
)
def test_versions(http: Http, grpc: Grpc, model: str, version: str, answered: str, sums: float) -> None:
    array = np.ones(1, np.float32)
    over_http = http.infer(model, http_inputs({"IN": array}), model_version=version)
    assert over_http.get_response()["model_version"] == answered
    over_grpc = grpc.infer(model, grpc_inputs({"IN": array}), model_version=version)
    assert over_grpc.get_response().model_version == answered
    assert over_http.as_numpy("OUT").item() == over_grpc.as_numpy("OUT").item() == sums


def test_versions_outside_the_policy_are_not_there(http: Http, grpc: Grpc) -> None:
    array = np.ones(1, np.float32)
    for model, version in (("some_versions", "2"), ("latest_version", "1")):
        text = f"Request for unknown model: '{model}' version {version} is not found"
        with pytest.raises(tritonclient.utils.InferenceServerException, match=text) as over_http:
            http.infer(model, http_inputs({"IN": array}), model_version=version)
        assert over_http.value.status() == "404"
        with pytest.raises(tritonclient.utils.InferenceServerException, match=text) as over_grpc:
            grpc.infer(model, grpc_inputs({"IN": array}), model_version=version)
        assert over_grpc.value.status() == "StatusCode.NOT_FOUND"


def test_requests_that_come_together_share_batches(server: Server) -> None:
    before = server.metrics()
    together = threading.Barrier(32)

    def ask(value: int) -> tuple[int, int]:
        arrays = {"VALUE": np.array([[value]], np.int64), "DELAY_MS": np.array([[5]], np.float32)}
        if value % 2:
            with server.http() as client:
                together.wait(20)
                over_http = client.infer("slow", http_inputs(arrays))
                return over_http.as_numpy("VALUE_OUT").item(), over_http.as_numpy("BATCH").item()
        with server.grpc() as client:
            together.wait(20)
            over_grpc = client.infer("slow", grpc_inputs(arrays))
            return over_grpc.as_numpy("VALUE_OUT").item(), over_grpc.as_numpy("BATCH").item()

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(64)))
    assert [value for value, _ in answers] == list(range(64))
    assert max(batch for _, batch in answers) > 1
    after = server.metrics()
    counted = {name: after[name, "slow"] - before[name, "slow"] for name, _ in after if name.startswith("nv_inference")}
    assert counted["nv_inference_request_success"] == counted["nv_inference_count"] == 64
    assert counted["nv_inference_exec_count"] < 48

"""ModelInfer and related calls as Triton's gRPC clients see them: contents of all datatypes, and all errors.

Codes and texts are those of a Triton 2.51 for the same requests.
"""

import asyncio
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import grpc_inputs
from tests.support.models.zoo import (
    ONNX_TYPES,
    config_text,
    write_faulty,
    write_identity,
    write_model,
    write_python_model,
    write_versions,
)
from tests.support.rejections.grpc import REFUSED, UNKNOWN_ID, two
from tests.support.servers.weir_server import Server

DTYPES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": np.object_,
}
FIELDS = {
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
STRINGS = ["", "a\0b", "\0", "naïve ☃", "日本語", "𝄞", "x" * 1000]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("grpc_infer")
    models = folder / "models"
    for datatype in ONNX_TYPES:
        write_identity(models, f"identity_{datatype}", datatype)
    write_python_model(models, "identity_BF16", "identity", {"IN": ("BF16", [-1])}, {"IN_OUT": ("BF16", [-1])}, 8)
    write_python_model(models, "string_BYTES", "identity", {"IN": ("BYTES", [-1])}, {"IN_OUT": ("BYTES", [-1])}, 8)
    write_versions(models, "versions", "version_policy { all { } }")
    write_faulty(models)
    _write_two_inputs(models)
    with Server(folder, models, "--strict-readiness=false") as started:
        yield started
        assert started.in_flight() == 0


def _write_two_inputs(root: Path) -> None:
    more = 'input [{ name: "MORE" data_type: TYPE_FP32 dims: [2] optional: true }]'
    inputs = {"A": ("FP32", [2]), "B": ("FP32", [2])}
    outputs = {"A_OUT": ("FP32", [2]), "B_OUT": ("FP32", [2])}
    write_python_model(root, "two", "identity", inputs, outputs, 4)
    write_python_model(root, "some_optional", "identity", inputs, outputs, 4, more)
    unloadable = write_model(root, "unloadable", config_text("unloadable", "python", inputs, outputs, 4))
    (unloadable / "1" / "model.py").write_text("raise RuntimeError('not today')\n")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with server.grpc() as opened:
        yield opened


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc_place) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


# Tensors


def sample(datatype: str, columns: int = 3) -> np.ndarray:
    if datatype == "BYTES":
        texts = [text.encode() for text in STRINGS]
        return np.array([(texts * columns)[:columns]] * 2, np.object_).reshape(2, columns)
    if datatype == "BOOL":
        return np.arange(2 * columns).reshape(2, columns) % 2 == 1
    info = np.iinfo(DTYPES[datatype]) if np.dtype(DTYPES[datatype]).kind in "iu" else None
    values = [info.min, info.max, 1] if info else [-1.5, 0.25, float("inf")]
    return np.resize(np.array(values, DTYPES[datatype]), (2, columns))


def model_of(datatype: str) -> tuple[str, str]:
    return f"identity_{datatype}", "IN_OUT" if datatype == "BF16" else "OUT"


@pytest.mark.parametrize("columns", [3, 0])
@pytest.mark.parametrize("datatype", DTYPES)
def test_raw_contents(client: triton.InferenceServerClient, datatype: str, columns: int) -> None:
    name, output = model_of(datatype)
    array = sample(datatype, columns)
    result = client.infer(name, grpc_inputs({"IN": (array, datatype)}), request_id="r")
    assert result.get_response().id == "r"
    assert result.get_output(output).datatype == datatype
    assert result.as_numpy(output).shape == (2, columns)
    np.testing.assert_array_equal(result.as_numpy(output), array)


@pytest.mark.parametrize("columns", [3, 0])
@pytest.mark.parametrize("datatype", FIELDS)
def test_typed_contents(stub: Any, datatype: str, columns: int) -> None:
    name, output = model_of(datatype)
    array = sample(datatype, columns)
    request = service_pb2.ModelInferRequest(model_name=name)
    given = request.inputs.add(name="IN", datatype=datatype, shape=array.shape)
    given.contents.SetInParent()
    getattr(given.contents, FIELDS[datatype]).extend(array.ravel().tolist())
    response = stub.ModelInfer(request, timeout=10)
    assert len(response.raw_output_contents) == 1
    assert not response.outputs[0].HasField("contents")
    np.testing.assert_array_equal(triton.InferResult(response).as_numpy(output), array)


@pytest.mark.parametrize("model,output", [("identity_BYTES", "OUT"), ("string_BYTES", "IN_OUT")])
def test_strings_of_all_kinds(client: triton.InferenceServerClient, model: str, output: str) -> None:
    array = np.array([STRINGS], np.object_)
    result = client.infer(model, grpc_inputs({"IN": (array, "BYTES")}))
    assert [element.decode() for element in result.as_numpy(output)[0]] == STRINGS


def test_wide_integers_are_narrowed(stub: Any) -> None:
    request = service_pb2.ModelInferRequest(model_name="identity_UINT8")
    request.inputs.add(name="IN", datatype="UINT8", shape=[1, 2], contents={"uint_contents": [300, 2]})
    assert stub.ModelInfer(request, timeout=10).raw_output_contents == [b",\x02"]


def test_inputs_may_be_reused(client: triton.InferenceServerClient) -> None:
    inputs = grpc_inputs({"IN": np.ones((1, 2), np.float32)})
    for value in (1, 2, 3):
        inputs[0].set_data_from_numpy(np.full((1, 2), value, np.float32))
        assert client.infer("identity_FP32", inputs).as_numpy("OUT").tolist() == [[value, value]]


def test_a_large_tensor_passes_both_ways(client: triton.InferenceServerClient) -> None:
    array = np.arange(5_000_000, dtype=np.float32).reshape(1, -1)
    for compression in (None, "gzip"):
        inputs = grpc_inputs({"IN": array[:, : 200_000 if compression else None]})
        result = client.infer("identity_FP32", inputs, compression_algorithm=compression)
        np.testing.assert_array_equal(result.as_numpy("OUT"), array[:, : result.as_numpy("OUT").shape[1]])


def test_asynchronous_calls(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    for number in range(50):
        inputs = grpc_inputs({"IN": np.array([[number]])})
        client.async_infer("identity_INT64", inputs, lambda result, error: answers.put((result, error)))
    reply = [answers.get(timeout=10) for _ in range(50)]
    assert {error for _, error in reply} == {None}
    assert sorted(result.as_numpy("OUT").item() for result, _ in reply) == list(range(50))


async def test_the_aio_client(server: Server) -> None:
    async with triton_aio.InferenceServerClient(server.grpc_place) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("identity_FP32")
        assert not await client.is_model_ready("unknown")
        assert (await client.get_model_metadata("identity_FP32")).name == "identity_FP32"
        assert (await client.get_model_config("identity_FP32")).config.max_batch_size == 8
        results = await asyncio.gather(
            *(client.infer("identity_INT64", grpc_inputs({"IN": np.array([[i]])})) for i in range(20))
        )
        assert [result.as_numpy("OUT").item() for result in results] == list(range(20))
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("unknown", grpc_inputs({"IN": np.zeros((1, 1), np.float32)}))
        assert caught.value.status() == "StatusCode.NOT_FOUND"
        assert caught.value.message() == "Request for unknown model: 'unknown' is not found"


# Versions


@pytest.mark.parametrize("version,answered", [("", "3"), ("1", "1"), ("02", "2"), (" 3", "3"), ("1x", "1")])
def test_versions(client: triton.InferenceServerClient, version: str, answered: str) -> None:
    inputs = grpc_inputs({"IN": np.zeros(1, np.float32)})
    result = client.infer("versions", inputs, model_version=version)
    assert (result.get_response().model_version, result.as_numpy("OUT").item()) == (answered, float(answered))


NO_VERSION = (
    "INVALID_ARGUMENT",
    "failed to get model version from specified version string '{}' (details: stol), version should be an integral "
    "value > 0",
)
BAD_VERSIONS = {
    "9": ("NOT_FOUND", "Request for unknown model: 'versions' version 9 is not found"),
    "0": ("NOT_FOUND", "Request for unknown model: 'versions' version 0 is not found"),
    "x": NO_VERSION,
    "99999999999999999999": NO_VERSION,
    "-1": ("INVALID_ARGUMENT", "invalid model version specified '{}' , version should be an integral value > 0"),
}


@pytest.mark.parametrize("version", BAD_VERSIONS)
def test_bad_versions(client: triton.InferenceServerClient, version: str) -> None:
    code, text = BAD_VERSIONS[version]
    inputs = grpc_inputs({"IN": np.zeros(1, np.float32)})
    calls: list[Callable[[], Any]] = [
        lambda: client.infer("versions", inputs, model_version=version),
        lambda: client.get_model_metadata("versions", version),
        lambda: client.get_model_config("versions", version),
    ]
    if code == "INVALID_ARGUMENT":
        calls.append(lambda: client.is_model_ready("versions", version))
    else:
        assert not client.is_model_ready("versions", version)
    for call in calls:
        with pytest.raises(InferenceServerException) as caught:
            call()
        assert caught.value.status() == f"StatusCode.{code}"
        assert caught.value.message() == text.format(version)


# Refusals


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(stub: Any, case: str) -> None:
    fields, code, text = REFUSED[case]
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(service_pb2.ModelInferRequest(**fields), timeout=10)
    assert (caught.value.code().name, caught.value.details()) == (code, text)


def test_refusals_on_a_stream_are_the_same_texts(stub: Any) -> None:
    requests = [service_pb2.ModelInferRequest(**fields) for fields, _, _ in REFUSED.values()]
    messages = list(stub.ModelStreamInfer(iter(requests), timeout=20))
    assert [message.error_message for message in messages] == [text for _, _, text in REFUSED.values()]


def test_a_wrong_shape_is_told_with_the_one_that_was_expected(stub: Any) -> None:
    fields = {**two("two", "A", "B", A={"shape": [1, 3]})}
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(service_pb2.ModelInferRequest(**fields), timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(
        f"{UNKNOWN_ID}unexpected shape for input 'A' for model 'two'. Expected [-1,2], got [1,3]. NOTE: Setting a "
        "non-zero max_batch_size in the model config requires a batch dimension to be prepended to each input shape."
    )


def test_what_a_model_raises_is_an_internal_error(client: triton.InferenceServerClient) -> None:
    inputs = grpc_inputs({"WHAT": np.array([[b"raise"]], np.object_)})
    with pytest.raises(InferenceServerException) as caught:
        client.infer("faulty", inputs)
    assert caught.value.status() == "StatusCode.INTERNAL"
    assert caught.value.message().startswith("Failed to process the request(s) for model 'faulty")
    assert "asked to raise" in caught.value.message()


def test_a_model_may_answer_that_it_was_cancelled(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("faulty", grpc_inputs({"WHAT": np.array([[b"cancelled"]], np.object_)}))
    assert (caught.value.status(), caught.value.message()) == ("StatusCode.CANCELLED", "given up")


def test_health_and_what_is_not_served(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_place) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10) == b"\x08\x01"
        for method in ("/grpc.health.v1.Health/Watch", "/inference.GRPCInferenceService/Nothing"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

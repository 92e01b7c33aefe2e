"""The requests of Triton's published examples with raw gRPC stubs, and of its image classification examples."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor

from tests.support.clients.triton_examples import GRPC, HTTP, connect, given
from tests.support.models.triton_examples import COLOURS, IMAGE_SIDE
from tests.support.servers.weir_server import Server

WAIT_S = 20


# grpc_explicit_int_content_client, grpc_explicit_int8_content_client, grpc_explicit_byte_content_client


@pytest.fixture
def stub(examples: Server) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(examples.grpc_place) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def _explicit(model: str, datatype: str, field: str, *contents: list[Any]) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model, model_version="")
    for number, content in enumerate(contents):
        tensor = request.inputs.add(name=f"INPUT{number}", datatype=datatype, shape=[1, 16])
        getattr(tensor.contents, field)[:] = content
        request.outputs.add(name=f"OUTPUT{number}")
    return request


def _refusal(stub: service_pb2_grpc.GRPCInferenceServiceStub, request: service_pb2.ModelInferRequest) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request)
    return caught.value


@pytest.mark.parametrize(
    ("model", "datatype", "dtype"), [("simple", "INT32", np.int32), ("simple_int8", "INT8", np.int8)]
)
def test_explicit_integers(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str, datatype: str, dtype: Any
) -> None:
    request = _explicit(model, datatype, "int_contents", list(range(16)), [1] * 16)
    response = stub.ModelInfer(request)
    assert [list(output.shape) for output in response.outputs] == [[1, 16], [1, 16]]
    sums, differences = (np.frombuffer(content, dtype) for content in response.raw_output_contents)
    np.testing.assert_array_equal(sums, np.arange(1, 17))
    np.testing.assert_array_equal(differences, np.arange(-1, 15))

    wrong_version = service_pb2.ModelInferRequest()
    wrong_version.CopyFrom(request)
    wrong_version.model_version = "wrong_specification"
    error = _refusal(stub, wrong_version)
    assert "failed to get model version from specified version string 'wrong_specification'" in error.details()

    request.raw_input_contents.append(np.arange(8).tobytes())
    request.inputs[0].contents.int_contents[:] = range(8, 16)
    error = _refusal(stub, request)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (
        "contents field must not be specified when using raw_input_contents "
        f"for 'INPUT0' for model '{model}'" in error.details()
    )


def test_explicit_bytes(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    digits = [str(number).encode() for number in range(16)]
    response = stub.ModelInfer(_explicit("simple_string", "BYTES", "bytes_contents", digits, [b"1"] * 16))
    sums, differences = (deserialize_bytes_tensor(content) for content in response.raw_output_contents)
    assert [int(item) for item in sums] == list(range(1, 17))
    assert [int(item) for item in differences] == list(range(-1, 15))


# grpc_client

IMAGE_MODEL, SCORES = "densenet_onnx", "InceptionV3/Predictions/Softmax"


def test_raw_stub(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    named = {"name": IMAGE_MODEL, "version": ""}
    assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
    assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready
    assert stub.ModelReady(service_pb2.ModelReadyRequest(**named)).ready
    assert stub.ServerMetadata(service_pb2.ServerMetadataRequest()).name == "triton"
    assert stub.ModelMetadata(service_pb2.ModelMetadataRequest(**named)).inputs[0].name == "input"
    assert stub.ModelConfig(service_pb2.ModelConfigRequest(**named)).config.name == IMAGE_MODEL

    request = service_pb2.ModelInferRequest(model_name=IMAGE_MODEL, model_version="", id="my request id")
    request.inputs.add(name="input", datatype="FP32", shape=[1, IMAGE_SIDE, IMAGE_SIDE, 3])
    request.outputs.add(name=SCORES)
    request.raw_input_contents.append(b"a" * (IMAGE_SIDE * IMAGE_SIDE * 3 * 4))
    response = stub.ModelInfer(request)
    assert response.id == "my request id"
    assert [output.name for output in response.outputs] == [SCORES]
    assert len(response.raw_output_contents[0]) == 3 * 4


# image_client


def _described(client: Any, protocol: ModuleType) -> tuple[Any, str, str, str]:
    """(max_batch_size, name of the input, name of the output, the input's format) as the image clients look them up."""
    metadata, config = client.get_model_metadata(IMAGE_MODEL), client.get_model_config(IMAGE_MODEL)
    if protocol is GRPC:
        config = config.config
        form = type(config.input[0]).Format.Name(config.input[0].format)
        size, name, output = config.max_batch_size, metadata.inputs[0].name, metadata.outputs[0].name
        shape = list(metadata.inputs[0].shape)
    else:
        form, size = config["input"][0]["format"], config["max_batch_size"]
        name, output, shape = (
            metadata["inputs"][0]["name"],
            metadata["outputs"][0]["name"],
            metadata["inputs"][0]["shape"],
        )
    assert shape == [-1, IMAGE_SIDE, IMAGE_SIDE, 3]
    return size, name, output, form


def _image(strongest: int) -> np.ndarray:
    """One colour stronger than the other two, which differ."""
    image = np.zeros((IMAGE_SIDE, IMAGE_SIDE, 3), np.float32)
    image[..., strongest] = 0.5
    image[..., (strongest + 1) % 3] = 0.25
    return image


@pytest.mark.parametrize(
    ("protocol", "way"), [(HTTP, "sync"), (HTTP, "async"), (GRPC, "sync"), (GRPC, "async"), (GRPC, "stream")]
)
def test_image_classification(examples: Server, protocol: ModuleType, way: str) -> None:
    options = {"concurrency": 20} if protocol is HTTP else {}
    with connect(protocol, examples, **options) as client:
        size, name, output, form = _described(client, protocol)
        assert (size, form) == (8, "FORMAT_NHWC")
        inputs = [given(protocol, name, np.stack([_image(2), _image(0)]), "FP32")]
        outputs = [protocol.InferRequestedOutput(output, class_count=2)]
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        done = partial(lambda answers, result, error: answers.put((result, error)), answers)
        ask = partial(client.infer, IMAGE_MODEL, inputs, request_id="1", model_version="", outputs=outputs)
        if way == "sync":
            result = ask()
        elif protocol is HTTP:
            result = client.async_infer(IMAGE_MODEL, inputs, request_id="1", outputs=outputs).get_result()
        else:
            if way == "stream":
                client.start_stream(done)
                client.async_stream_infer(IMAGE_MODEL, inputs, request_id="1", outputs=outputs)
            else:
                client.async_infer(IMAGE_MODEL, inputs, done, request_id="1", outputs=outputs)
            result, error = answers.get(timeout=WAIT_S)
            assert error is None
    rows = [[item.decode().split(":") for item in row] for row in result.as_numpy(output)]
    assert [[(int(index), label) for _, index, label in row] for row in rows] == [
        [(2, COLOURS[2]), (0, COLOURS[0])],
        [(0, COLOURS[0]), (1, COLOURS[1])],
    ]
    assert [float(score) for score, _, _ in rows[0]] == [0.5, 0.25]

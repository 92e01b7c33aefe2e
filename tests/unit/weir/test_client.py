"""`Client` against a small gRPC server: its requests, and its handling of responses and errors."""

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from weir.client import Client
from weir.schemas.core.errors import ErrorCode, WeirError


class Service(GRPCInferenceServiceServicer):
    """Keeps what it was asked; model "count" streams as many answers as its input says."""

    def __init__(self) -> None:
        self.asked: list = []
        self.shown: list = []

    def ModelInfer(self, request, context):
        self.asked.append(request)
        if request.model_name != "echo":
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.model_name}' is not found")
        response = messages.ModelInferResponse(model_name="echo", model_version="1", id=request.id)
        response.parameters["sequence_id"].int64_param = 7
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            response.raw_output_contents.append(content)
        return response

    def ModelStreamInfer(self, requests, context):
        for request in requests:
            self.asked.append(request)
            count = int(np.frombuffer(request.raw_input_contents[0], np.int32)[0])
            if count < 0:
                assert ("triton_grpc_error", "true") in context.invocation_metadata()
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "negative")
            if count == 99:
                yield messages.ModelStreamInferResponse(error_message="no")
            for number in range(count):
                answer = messages.ModelInferResponse(model_name="count", model_version="1")
                answer.outputs.add(name="I", datatype="INT32", shape=[1])
                answer.raw_output_contents.append(np.int32(number).tobytes())
                yield messages.ModelStreamInferResponse(infer_response=answer)
            last = messages.ModelInferResponse(model_name="count", model_version="1")
            last.parameters["triton_final_response"].bool_param = True
            yield messages.ModelStreamInferResponse(infer_response=last)

    def ModelReady(self, request, context):
        if request.name == "gone":
            context.abort(grpc.StatusCode.UNAVAILABLE, "no such version")
        if request.name == "broken":
            context.abort(grpc.StatusCode.INTERNAL, "broken")
        return messages.ModelReadyResponse(ready=request.name == "echo")

    def ServerReady(self, request, context):
        return messages.ServerReadyResponse(ready=True)

    def ModelStatistics(self, request, context):
        self.asked.append(request)
        response = messages.ModelStatisticsResponse()
        one = response.model_stats.add(name="echo", version="1", inference_count=2**40)
        one.inference_stats.success.count = 3
        one.response_stats["0"].success.count = 4
        return response

    def ModelConfig(self, request, context):
        response = messages.ModelConfigResponse()
        response.config.name = request.name
        response.config.input.add(name="X", data_type="TYPE_FP32", dims=[-1, 2])
        response.config.dynamic_batching.max_queue_delay_microseconds = 5
        response.config.parameters["k"].string_value = "v"
        return response

    def RepositoryModelLoad(self, request, context):
        self.asked.append(request)
        return messages.RepositoryModelLoadResponse()

    def RepositoryModelUnload(self, request, context):
        self.asked.append(request)
        return messages.RepositoryModelUnloadResponse()


class Shown(grpc.ServerInterceptor):
    """Keeps what each call shows."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def intercept_service(self, continuation, handler_call_details):
        self._service.shown.append(dict(handler_call_details.invocation_metadata).get("authorization"))
        return continuation(handler_call_details)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Client, Service]]:
    service = Service()
    server = grpc.server(futures.ThreadPoolExecutor(2), interceptors=[Shown(service)])
    add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = Client(f"127.0.0.1:{port}")
    yield client, service
    client.close()
    server.stop(None).wait()


@pytest.fixture
def client(served: tuple[Client, Service]) -> Client:
    return served[0]


@pytest.fixture
def service(served: tuple[Client, Service]) -> Service:
    served[1].asked.clear()
    served[1].shown.clear()
    return served[1]


def count(number: int) -> dict:
    return {"N": ([number], "INT32")}


def test_infer_is_a_mapping_of_names_to_arrays(client: Client, service: Service) -> None:
    result = client.infer("echo", {"A": np.ones((2, 2), np.float32), "B": ["x"]}, ["A"], request_id="r")
    assert list(result) == ["A", "B"]
    np.testing.assert_array_equal(result["A"], np.ones((2, 2)))
    assert result["B"].tolist() == [b"x"]
    assert (result.model_name, result.model_version, result.id) == ("echo", "1", "r")
    assert result.parameters == {"sequence_id": 7}
    assert repr(result) == "InferResult('echo', A: float32[2, 2], B: object[1])"
    assert [output.name for output in service.asked[0].outputs] == ["A"]


def test_errors_have_the_server_s_code_and_words(client: Client) -> None:
    with pytest.raises(WeirError, match=r"^NOT_FOUND: Request for unknown model: 'x' is not found$") as refused:
        client.infer("x", {})
    assert refused.value.code is ErrorCode.NOT_FOUND


def test_a_stream_ends_after_its_last_answer(client: Client, service: Service) -> None:
    assert [int(answer["I"][0]) for answer in client.stream("count", count(3))] == [0, 1, 2]
    assert service.asked[0].parameters["triton_enable_empty_final_response"].bool_param
    assert list(client.stream("count", count(0))) == []


def test_a_stream_may_be_left(client: Client) -> None:
    answers = client.stream("count", count(1000))
    assert next(answers)["I"].tolist() == [0]
    answers.close()  # type: ignore[attr-defined]


def test_errors_of_a_stream(client: Client) -> None:
    with pytest.raises(WeirError, match=r"^INVALID_ARG: negative$") as refused:
        list(client.stream("count", count(-1)))
    assert refused.value.code is ErrorCode.INVALID_ARG
    with pytest.raises(WeirError, match=r"^UNKNOWN: no$") as refused:
        list(client.stream("count", count(99)))
    assert refused.value.code is ErrorCode.UNKNOWN


async def test_the_same_from_an_event_loop(client: Client) -> None:
    result = await client.ainfer("echo", {"A": np.ones(2, np.float32)})
    assert result["A"].tolist() == [1, 1]
    assert [int(answer["I"][0]) async for answer in client.astream("count", count(2))] == [0, 1]
    with pytest.raises(WeirError, match="unknown model"):
        await client.ainfer("x", {})
    await client.aclose()


def test_readiness(client: Client) -> None:
    assert client.ready()
    assert client.ready("echo")
    assert not client.ready("other")
    assert not client.ready("gone")
    with pytest.raises(WeirError, match="broken"):
        client.ready("broken")


def test_statistics_are_plain_numbers(client: Client, service: Service) -> None:
    (one,) = client.statistics("echo", 1)
    assert (service.asked[0].name, service.asked[0].version) == ("echo", "1")
    assert one["inference_count"] == 2**40
    assert one["inference_stats"]["success"] == {"count": 3, "ns": 0}
    assert one["response_stats"]["0"]["success"]["count"] == 4
    assert one["batch_stats"] == []


def test_a_configuration_is_plain(client: Client) -> None:
    config = client.config("echo")
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["input"][0]["dims"] == [-1, 2]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 5
    assert config["parameters"] == {"k": {"string_value": "v"}}
    assert "ensemble_scheduling" not in config


def test_load_and_unload(client: Client, service: Service) -> None:
    client.load("m")
    client.load("m", config={"backend": "python"}, files={"1/model.py": b"code", "file:labels.txt": b"a"})
    client.unload("m")
    client.unload("m", unload_dependents=True)
    plain, overridden, unload, with_dependents = service.asked
    assert not plain.parameters
    assert overridden.parameters["config"].string_param == '{"backend": "python"}'
    assert overridden.parameters["file:1/model.py"].bytes_param == b"code"
    assert overridden.parameters["file:labels.txt"].bytes_param == b"a"
    assert not unload.parameters
    assert with_dependents.parameters["unload_dependents"].bool_param


def test_a_server_that_is_gone_is_unavailable() -> None:
    client = Client("127.0.0.1:9")
    with pytest.raises(WeirError) as refused:
        client.metadata()
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert not client.ready()
    client.close()


async def test_each_call_shows_the_key(tmp_path: Path, client: Client, service: Service) -> None:
    (tmp_path / "key").write_text("weir_abc_secret\n")
    inputs = {"N": np.array([1], np.int32)}
    client.infer("echo", inputs)
    assert service.shown == [None]
    for key in ("weir_abc_secret", f"@{tmp_path}/key"):
        service.shown.clear()
        with_key = Client(client.grpc_url, api_key=key)
        assert with_key.ready()
        with_key.infer("echo", inputs)
        assert list(with_key.stream("count", inputs))
        await with_key.ainfer("echo", inputs)
        assert [part async for part in with_key.astream("count", inputs)]
        assert service.shown == ["Bearer weir_abc_secret"] * 5
        assert "secret" not in repr(vars(with_key))
        await with_key.aclose()


@pytest.mark.parametrize("text", ["quiet quiet", "quiet\nX: quiet", "quiét", "@/nowhere"])
def test_what_is_no_key_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ValueError, match=r"^api_key") as error:
        Client("127.0.0.1:1", api_key=text)
    assert "qui" not in str(error.value)

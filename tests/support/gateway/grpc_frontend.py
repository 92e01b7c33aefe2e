"""A gRPC frontend for tests: a real server on a free port, and models that compute."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import uvloop
from tritonclient.grpc import service_pb2, service_pb2_grpc

from weir.calls.catalog import ServedModel
from weir.calls.in_flight import OnResponse
from weir.calls.tracing import Tracing
from weir.gateway.admin.shared_memory import RegionPermission, SharedMemoryRegions
from weir.gateway.context import GatewayContext
from weir.gateway.grpc.codec import MAX_MESSAGE_BYTES
from weir.gateway.grpc.options import GrpcOptions
from weir.gateway.grpc.server import GrpcServer
from weir.schemas.config.model_config import ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from weir.schemas.core.errors import WeirError, invalid, not_found
from weir.schemas.core.request_limits import DEFAULT_LIMITS
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import DATATYPES, Tensor
from weir.schemas.wire.calls import ANYBODY, Caller
from weir.schemas.wire.request_body import unpack_body

TIMEOUT_S = 10.0


def model(name: str, datatype: str, inputs: list[str], outputs: list[str], **changes: Any) -> ServedModel:
    config = ModelConfig(
        name=name,
        backend="python",
        max_batch_size=8,
        input=[ModelInput(name=n, data_type=DATATYPES[datatype].config_name, dims=[-1]) for n in inputs],
        output=[ModelOutput(name=n, data_type=DATATYPES[datatype].config_name, dims=[-1]) for n in outputs],
    ).replace(**changes)
    return ServedModel(name, config, [1, 2], {"OUT": ["cat", "dog", "cow"]})


MODELS = {
    served.name: served
    for served in [
        model("add_sub", "FP32", ["A", "B"], ["SUM", "DIFFERENCE"]),
        model("silent", "FP32", ["IN"], ["OUT"]),
        model("failing", "FP32", ["IN"], ["OUT"]),
        model("stream", "FP32", ["IN"], ["OUT"], model_transaction_policy=TransactionPolicy(decoupled=True)),
        model("repeat", "INT32", ["IN"], ["OUT"], model_transaction_policy=TransactionPolicy(decoupled=True)),
        *(model(f"same_{datatype}", datatype, ["IN"], ["OUT"]) for datatype in DATATYPES),
    ]
}


class Models:
    """The models above as a catalog."""

    ready = True

    def resolve(self, name: str, version: str) -> ServedModel:
        served = MODELS.get(name)
        if served is None:
            raise not_found(f"Request for unknown model: '{name}' is not found")
        if version and int(version) not in served.versions:
            raise not_found(f"Request for unknown model: '{name}' version {version} is not found")
        return served

    def is_ready(self, name: str, version: str) -> bool:
        return name in MODELS and (not version or int(version) in MODELS[name].versions)

    def server_ready(self) -> bool:
        return self.ready


class Ready:
    """Readiness of these models."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def is_ready(self, name: str, version: str) -> bool:
        return self._models.is_ready(name, version)

    async def is_server_ready(self) -> bool:
        return self._models.server_ready()


BARE_END, END_WITH_LAST, ERROR_AMID, ERROR_AS_END = range(4)
"""How `repeat` ends its responses."""


class Calculator:
    """Answers requests in the next turn of the event loop; `silent` never answers, `failing` fails with `failure`.

    `repeat` is decoupled: it takes [how many answers, how they end, bytes of each], and numbers its answers.
    """

    def __init__(self) -> None:
        self.tracing = Tracing()
        self.reset()

    def reset(self) -> None:
        self.failure: BaseException = invalid("unset")
        self.requests: list[InferRequest] = []
        self.cancelled: list[InferRequest] = []
        self.held: list[Callable[[], None]] = []

    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse,
        slot: None = None,
        sampling: int | None = None,
        traffic_key: str = "",
        served: ServedModel | None = None,
        caller: Caller = ANYBODY,
    ) -> InferRequest:
        if request.model_name == "failing" and not isinstance(self.failure, WeirError):
            raise self.failure
        MODELS[request.model_name].normalizer.normalize(request)
        self.requests.append(request)
        if request.model_name == "repeat":
            asyncio.get_running_loop().call_soon(self._repeat, request, on_response)
            return request
        answer = self._answer(request)
        if request.model_name == "silent":
            self.held.append(lambda: on_response(answer, True))
        else:
            asyncio.get_running_loop().call_soon(on_response, answer, True)
        return request

    def caches(self, _served: ServedModel) -> bool:
        return False

    def submit_packed(
        self,
        model: ServedModel,
        shared: InferRequest,
        body: bytes,
        on_response: OnResponse,
        deadline_ms: int = 0,
        traffic_key: str = "",
        caller: Caller = ANYBODY,
    ) -> InferRequest:
        request = unpack_body(body, model.name, shared.model_version)
        request.deadline_ms = deadline_ms
        return self.submit(request, on_response)

    def cancel(self, pending: InferRequest) -> None:
        self.cancelled.append(pending)

    def _repeat(self, request: InferRequest, on_response: OnResponse) -> None:
        times, ending, *more = request.inputs[0].to_numpy().ravel().tolist()
        version = request.model_version or "2"
        for number in range(times):
            is_last = number == times - 1
            values = np.full((1, more[0] // 4 if more else 1), number, np.int32)
            outputs = [Tensor.from_numpy("OUT", values, "INT32")]
            answer: InferResponse | WeirError = InferResponse("repeat", version, request.id, outputs)
            if (ending == ERROR_AMID and number == 1) or (ending == ERROR_AS_END and is_last):
                answer = not_found("told to fail")
            on_response(answer, is_last and ending in (END_WITH_LAST, ERROR_AS_END))
        if not times or ending in (BARE_END, ERROR_AMID):
            on_response(None, True)

    def _answer(self, request: InferRequest) -> InferResponse | WeirError:
        if request.model_name == "failing":
            assert isinstance(self.failure, WeirError)
            return self.failure
        if request.model_name == "add_sub":
            a, b = (tensor.to_numpy() for tensor in request.inputs)
            outputs = [Tensor.from_numpy("SUM", a + b, "FP32"), Tensor.from_numpy("DIFFERENCE", a - b, "FP32")]
        else:
            tensor = request.inputs[0]
            outputs = [Tensor("OUT", tensor.datatype, tensor.shape, tensor.data)]
        version = request.model_version or "2"
        return InferResponse(request.model_name, version, request.id, outputs, request.parameters)


def repeat_request(times: int, ending: int = BARE_END, *more: int, **fields: Any) -> service_pb2.ModelInferRequest:
    """A request for the decoupled model."""
    values = np.array([[times, ending, *more]], np.int32)
    inputs = [{"name": "IN", "datatype": "INT32", "shape": values.shape}]
    return service_pb2.ModelInferRequest(
        **{"model_name": "repeat", "inputs": inputs, "raw_input_contents": [values.tobytes()], **fields}
    )


def make_context(catalog: Models, inference: Calculator) -> GatewayContext:
    """The context of a frontend, without what these tests don't use."""
    return GatewayContext(
        catalog=catalog,  # type: ignore[arg-type]
        readiness=Ready(catalog),  # type: ignore[arg-type]
        inference=inference,  # type: ignore[arg-type]
        payloads=None,  # type: ignore[arg-type]
        limits=DEFAULT_LIMITS,
        server_id="test-server",
        statistics=None,  # type: ignore[arg-type]
        settings=None,  # type: ignore[arg-type]
        durable=None,  # type: ignore[arg-type]
        repository=None,  # type: ignore[arg-type]
        regions=SharedMemoryRegions(None, "gateway", None, RegionPermission()),  # type: ignore[arg-type]
    )


class Loop:
    """An event loop in a thread of its own, as the gateway's is in its process."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()


class GrpcFrontend:
    """A running server, with its models and clients."""

    def __init__(self, loop: Loop, options: GrpcOptions | None = None) -> None:
        self.loop = loop
        self.catalog = Models()
        self.inference = Calculator()
        self.context = make_context(self.catalog, self.inference)
        self.server: GrpcServer = loop.run(self._make(options))
        self.port: int = loop.run(self.server.start("127.0.0.1", 0))
        self.client = triton.InferenceServerClient(f"127.0.0.1:{self.port}")
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{self.port}", options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        )
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    async def _make(self, options: GrpcOptions | None) -> GrpcServer:
        return GrpcServer(self.context, options)

    def close(self) -> None:
        self.client.close()
        self.channel.close()
        self.loop.run(self.server.stop(0))


def tensor(name: str, array: np.ndarray, datatype: str) -> triton.InferInput:
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def raw_request(name: str, **fields: Any) -> service_pb2.ModelInferRequest:
    """A request for a model with the one FP32 input IN, of shape [1, 2]."""
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [1, 2]}]
    return service_pb2.ModelInferRequest(
        **{"model_name": name, "inputs": inputs, "raw_input_contents": [b"\0" * 8], **fields}
    )


def failure_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()

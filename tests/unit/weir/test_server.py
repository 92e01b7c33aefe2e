"""`weir.Server` while no server runs."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from weir import Server, StartError, WeirError
from weir import server as server_module


class Service(GRPCInferenceServiceServicer):
    def ModelInfer(self, request, context):
        if request.model_name == "nowhere":
            context.abort(grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'nowhere' is not found")
        return messages.ModelInferResponse(model_name=request.model_name, model_version="1")

    def ServerReady(self, request, context):
        return messages.ServerReadyResponse(ready=True)


class FakeProcess:
    """In the place of `weir serve`: a gRPC server in this process."""

    def __init__(self, words: list[str], exit_timeout_s: float, environment: dict[str, str]) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        add_GRPCInferenceServiceServicer_to_server(Service(), self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self.pid = 1

    def wait_ready(self, timeout_s: float) -> dict[str, str]:
        self._server.start()
        return {"grpc": f"127.0.0.1:{self._port}"}

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(server_module, "ServerProcess", FakeProcess)
    server = Server("models")
    yield server
    server.stop()


def test_calls_before_the_start_are_errors_and_the_start_works_afterwards(server: Server) -> None:
    for call in (
        lambda: server.infer("m", {}),
        lambda: list(server.stream("m", {})),
        lambda: asyncio.run(server.ainfer("m", {})),
        server.ready,
        server.index,
    ):
        with pytest.raises(StartError, match=r"not running: call its start\(\), or use it in a with statement"):
            call()
    server.start()
    assert server.infer("m", {}).model_name == "m"
    assert asyncio.run(server.ainfer("m", {})).model_name == "m"


def test_a_server_may_be_started_again(server: Server) -> None:
    for _ in range(2):
        with server:
            assert server.ready()
            assert server.infer("m", {}).model_name == "m"
        with pytest.raises(StartError, match="not running"):
            server.infer("m", {})


def test_an_error_shows_its_code_and_no_text_of_grpc(server: Server) -> None:
    with pytest.raises(WeirError) as refused:
        server.start().infer("nowhere", {})
    text = "".join(traceback.format_exception(refused.value))
    assert text.endswith("weir.WeirError: NOT_FOUND: Request for unknown model: 'nowhere' is not found\n")
    assert "debug_error_string" not in text
    assert "RpcError" not in text

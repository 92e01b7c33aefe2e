"""Streams of ModelInferRequests for tests, by hand and as bytes, and typed contents of every datatype."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from tests.support.gateway.grpc_frontend import TIMEOUT_S, GrpcFrontend
from tests.support.gateway.http2_peer import REQUEST

STREAM_HEAD = [*REQUEST[:2], (b":path", b"/inference.GRPCInferenceService/ModelStreamInfer"), *REQUEST[3:]]


def framed(*requests: service_pb2.ModelInferRequest) -> bytes:
    contents = [request.SerializeToString() for request in requests]
    return b"".join(b"\0" + len(content).to_bytes(4, "big") + content for content in contents)


def unframed(body: bytes) -> list[Any]:
    messages = []
    while body:
        end = 5 + int.from_bytes(body[1:5], "big")
        messages.append(service_pb2.ModelStreamInferResponse.FromString(body[5:end]))
        body = body[end:]
    return messages


class StreamClient:
    """A stream that is written to and read from by hand."""

    def __init__(self, frontend: GrpcFrontend, metadata: tuple = (), timeout: float = TIMEOUT_S) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        self.call = frontend.stub.ModelStreamInfer(iter(self._requests.get, None), metadata=metadata, timeout=timeout)

    def send(self, *requests: service_pb2.ModelInferRequest) -> None:
        for request in requests:
            self._requests.put(request)

    def close(self) -> None:
        self._requests.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.call)

    def ending(self) -> tuple[grpc.StatusCode, str]:
        """The status, once everything is read."""
        with contextlib.suppress(grpc.RpcError):
            for _ in self.call:
                pass
        return self.call.code(), self.call.details()


def responses(frontend: GrpcFrontend, *requests: service_pb2.ModelInferRequest) -> list[Any]:
    return list(frontend.stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_S))


def summary(message: Any) -> tuple[str, str, str, bool | None, int]:
    """(id, error, version, whether it is the final one, outputs) of a message."""
    response = message.infer_response
    ending = response.parameters.get("triton_final_response")
    is_final = ending.bool_param if ending is not None else None
    return response.id, message.error_message, response.model_version, is_final, len(response.outputs)


def release(frontend: GrpcFrontend) -> None:
    for answer in frontend.inference.held:
        frontend.loop.call(answer)


TYPED = {
    "BOOL": ("bool_contents", [True, False, True]),
    "INT8": ("int_contents", [-128, 127, 0]),
    "INT16": ("int_contents", [-32768, 32767, 0]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1, 0]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1, 0]),
    "UINT8": ("uint_contents", [0, 255, 7]),
    "UINT16": ("uint_contents", [0, 65535, 7]),
    "UINT32": ("uint_contents", [0, 2**32 - 1, 7]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1, 7]),
    "FP32": ("fp32_contents", [0.5, -2.0, float("inf")]),
    "FP64": ("fp64_contents", [0.1, -2.0, float("-inf")]),
    "BYTES": ("bytes_contents", [b"", b"\x00\xff", "ä".encode()]),
}

"""Streams of ModelInferRequests for tests: written and read by hand, and as bytes."""

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_door import TIMEOUT_S, Door
from http2_peer import REQUEST
from tritonclient.grpc import service_pb2

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


class Conversation:
    """A stream that is written to and read from by hand."""

    def __init__(self, door: Door, metadata: tuple = (), timeout: float = TIMEOUT_S) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        self.call = door.stub.ModelStreamInfer(iter(self._requests.get, None), metadata=metadata, timeout=timeout)

    def ask(self, *requests: service_pb2.ModelInferRequest) -> None:
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


def answers(door: Door, *requests: service_pb2.ModelInferRequest) -> list[Any]:
    return list(door.stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_S))


def told(message: Any) -> tuple[str, str, str, bool | None, int]:
    """(id, error, version, whether it is the final one, outputs) of a message."""
    response = message.infer_response
    ending = response.parameters.get("triton_final_response")
    is_final = ending.bool_param if ending is not None else None
    return response.id, message.error_message, response.model_version, is_final, len(response.outputs)


def release(door: Door) -> None:
    for answer in door.inference.held:
        door.loop.call(answer)

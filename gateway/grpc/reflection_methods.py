"""Server reflection (`grpc.reflection.v1alpha`), by which tools like grpcurl learn what can be called.

Triton has none. The answers are made by grpcio-reflection.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from gateway.grpc.codec import parse_message
from gateway.grpc.messages import Message
from gateway.grpc.rpc import Methods, Streaming
from gateway.grpc.stream_call import StreamCall


def reflection_methods() -> Methods:
    """The one method, by the name of its service and its own."""
    return {"grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Streaming(_Reflection)}


class _Reflection:
    """The conversation of one call: each question is answered at once."""

    def __init__(self, call: StreamCall) -> None:
        self._call = call

    def take(self, message: Message) -> None:
        """See Conversation."""
        request_type, servicer = _servicer()
        for answer in servicer.ServerReflectionInfo(iter([parse_message(request_type, message)]), None):
            self._call.send(answer.SerializeToString())
        self.drained()

    def end(self) -> None:
        """See Conversation."""
        self._call.finish()

    def drain(self) -> None:
        """See Conversation."""
        self._call.finish()

    def drained(self) -> None:
        """See Conversation."""
        # One answer is not taken before the next is asked for.
        is_behind = self._call.unsent_bytes > 0
        if is_behind and not self._call.is_on_hold:
            self._call.hold()
        elif self._call.is_on_hold and not is_behind:
            self._call.go_on()

    def closed(self) -> None:
        """See Conversation."""


@cache
def _servicer() -> tuple[Any, Any]:
    """(type of requests, what answers them); loaded when somebody asks."""
    from grpc_reflection.v1alpha import reflection, reflection_pb2

    services = ["inference.GRPCInferenceService", reflection.SERVICE_NAME]
    return reflection_pb2.ServerReflectionRequest, reflection.ReflectionServicer(services)

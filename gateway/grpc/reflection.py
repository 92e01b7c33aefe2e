"""Server reflection (`grpc.reflection.v1alpha`), by which tools like grpcurl discover methods.

Triton has none. grpcio-reflection makes the responses.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from weir.access.policy.actions import Action
from weir.gateway.grpc.codec import parse_message
from weir.gateway.grpc.handlers import Methods, Streaming
from weir.gateway.grpc.messages import Message
from weir.gateway.grpc.stream_call import StreamCall
from weir.gateway.grpc.weir_service import SERVICE, message_type
from weir.schemas.kserve.triton_messages import POOL


def reflection_methods() -> Methods:
    """The reflection method, by service and name."""
    return {"grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Streaming(_Reflection, Action.METADATA)}


class _Reflection:
    """The handler of one call; it answers each request at once."""

    def __init__(self, call: StreamCall) -> None:
        self._call = call

    def on_message(self, message: Message) -> None:
        """Implements `StreamHandler.on_message`."""
        request_type, servicer = _servicer()
        for response in servicer.ServerReflectionInfo(iter([parse_message(request_type, message)]), None):
            self._call.send(response.SerializeToString())
        self.drained()

    def end(self) -> None:
        """Implements `StreamHandler.end`."""
        self._call.finish()

    def drain(self) -> None:
        """Implements `StreamHandler.drain`."""
        self._call.finish()

    def drained(self) -> None:
        """Implements `StreamHandler.drained`."""
        # The servicer returns a response only when the next one is requested.
        is_behind = self._call.unsent_bytes > 0
        if is_behind and not self._call.is_on_hold:
            self._call.hold()
        elif self._call.is_on_hold and not is_behind:
            self._call.resume()

    def closed(self) -> None:
        """Implements `StreamHandler.closed`."""


@cache
def _servicer() -> tuple[Any, Any]:
    """(type of requests, servicer); imported at the first call."""
    from grpc_reflection.v1alpha import reflection, reflection_pb2

    message_type("TrafficRequest")  # adds the service's description to the pool that the servicer reads
    POOL.AddSerializedFile(reflection_pb2.DESCRIPTOR.serialized_pb)  # it describes itself too
    services = ["inference.GRPCInferenceService", SERVICE, reflection.SERVICE_NAME]
    return reflection_pb2.ServerReflectionRequest, reflection.ReflectionServicer(services, POOL)

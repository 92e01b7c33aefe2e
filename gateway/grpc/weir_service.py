"""What the gRPC port serves beside Triton's `GRPCInferenceService`: `weir.v1.TrafficService`, and server reflection.

The messages are described here, and compiled by the protobuf runtime when the server starts; clients get the description
by server reflection (`grpc.reflection.v1alpha`), by which tools like grpcurl discover methods, or from docs/traffic.md.
Triton has neither. grpcio-reflection makes the responses.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, message_factory

from weir.access.policy.actions import Action
from weir.gateway.admin.traffic import TrafficControl, checked
from weir.gateway.grpc.codec import parse_message
from weir.gateway.grpc.handlers import Methods, Streaming, unary, unary_async
from weir.gateway.grpc.messages import Message
from weir.gateway.grpc.stream_call import StreamCall
from weir.schemas.config.traffic import TrafficRule
from weir.schemas.kserve.triton_messages import POOL

PACKAGE = "weir.v1"
SERVICE = f"{PACKAGE}.TrafficService"
"""The full name of the service."""

_Field = descriptor_pb2.FieldDescriptorProto
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "TrafficRequest": [("model", _Field.TYPE_STRING, "")],
    "SetTrafficRequest": [
        ("model", _Field.TYPE_STRING, ""),
        ("weights", _Field.TYPE_MESSAGE, "map"),
        ("sticky", _Field.TYPE_STRING, ""),
    ],
    "VersionTraffic": [
        ("version", _Field.TYPE_INT64, ""),
        ("weight", _Field.TYPE_DOUBLE, ""),
        ("share", _Field.TYPE_DOUBLE, ""),
        ("ready", _Field.TYPE_BOOL, ""),
    ],
    "TrafficResponse": [
        ("model", _Field.TYPE_STRING, ""),
        ("source", _Field.TYPE_STRING, ""),
        ("sticky", _Field.TYPE_STRING, ""),
        ("versions", _Field.TYPE_MESSAGE, "VersionTraffic"),
    ],
}
_METHODS = {"GetTraffic": "TrafficRequest", "SetTraffic": "SetTrafficRequest", "ClearTraffic": "TrafficRequest"}


def traffic_methods(traffic: TrafficControl) -> Methods:
    """The methods of the service, by path."""

    def show(request: Any) -> Any:
        return _response(traffic.show(request.model))

    async def change(request: Any) -> Any:
        rule = checked(TrafficRule, dict(request.weights), request.sticky)
        return _response(await traffic.set(request.model, rule, "grpc"))

    async def clear(request: Any) -> Any:
        return _response(await traffic.clear(request.model, "grpc"))

    return {
        f"/{SERVICE}/GetTraffic": unary(message_type("TrafficRequest"), show, Action.TRAFFIC, "model"),
        f"/{SERVICE}/SetTraffic": unary_async(message_type("SetTrafficRequest"), change, Action.TRAFFIC, "model"),
        f"/{SERVICE}/ClearTraffic": unary_async(message_type("TrafficRequest"), clear, Action.TRAFFIC, "model"),
    }


def _response(shown: dict[str, Any]) -> Any:
    versions = [{**row, "version": int(row["version"])} for row in shown["versions"]]
    fields = {name: shown[name] for name in ("model", "source", "sticky")}
    return message_type("TrafficResponse")(**fields, versions=versions)


@cache
def message_type(name: str) -> Any:
    """The class of the messages called `name` in the package."""
    try:
        POOL.FindFileByName("weir/v1/traffic.proto")
    except KeyError:
        POOL.Add(_file())
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="weir/v1/traffic.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, of) in enumerate(fields, start=1):
            added = message.field.add(name=field, number=number, type=kind, label=_Field.LABEL_OPTIONAL)
            if of == "map":
                entry = message.nested_type.add(name=f"{field.title()}Entry")
                entry.field.add(name="key", number=1, type=_Field.TYPE_INT64, label=_Field.LABEL_OPTIONAL)
                entry.field.add(name="value", number=2, type=_Field.TYPE_DOUBLE, label=_Field.LABEL_OPTIONAL)
                entry.options.map_entry = True
                added.label, added.type_name = _Field.LABEL_REPEATED, f".{PACKAGE}.{name}.{entry.name}"
            elif of:
                added.label, added.type_name = _Field.LABEL_REPEATED, f".{PACKAGE}.{of}"
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for method, request in _METHODS.items():
        service.method.add(name=method, input_type=f".{PACKAGE}.{request}", output_type=f".{PACKAGE}.TrafficResponse")
    return file


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

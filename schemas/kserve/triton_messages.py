"""Triton's protobuf messages: `messages` of `grpc_service.proto`, `model_config` of `model_config.proto`; `service_stub`.

`triton.binpb` describes both files, as protoc wrote them (`python -m tests.support.wire.triton_description` makes it from
the installed tritonclient). The messages have a pool of their own: the pool that all generated modules share takes a file
of one name once, and a program may use a tritonclient of any version beside Weir.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool

DESCRIPTION = Path(__file__).with_name("triton.binpb")
"""A `FileDescriptorSet`, in the order in which the files import each other."""

POOL = DescriptorPool()
"""The pool of these messages, and of those of Weir's own gRPC services."""


def _load() -> tuple[Any, ...]:
    """The message classes of each file, as attributes by their names."""
    files = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTION.read_bytes()).file
    for file in files:
        POOL.Add(file)
    return tuple(
        SimpleNamespace(
            **{
                name: message_factory.GetMessageClass(message)
                for name, message in POOL.FindFileByName(file.name).message_types_by_name.items()
            }
        )
        for file in files
    )


model_config, messages = _load()

SERVICE = POOL.FindServiceByName("inference.GRPCInferenceService")
"""The description of Triton's service."""


def service_stub(channel: Any) -> Any:
    """The methods of Triton's service at `channel`, a blocking or an asynchronous one of grpcio, as attributes."""
    methods = {}
    for method in SERVICE.methods:
        kind = "stream_stream" if method.server_streaming else "unary_unary"
        methods[method.name] = getattr(channel, kind)(
            f"/{SERVICE.full_name}/{method.name}",
            request_serializer=message_factory.GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
    return SimpleNamespace(**methods)

"""What the server and its models say of themselves, over gRPC."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2

from gateway.doors import Doors
from gateway.grpc.rpc import Methods, unary, unary_async
from gateway.grpc.versions import read_version
from gateway.server_info import model_metadata, server_metadata


def metadata_methods(doors: Doors) -> Methods:
    """Health, metadata and configuration."""
    catalog = doors.catalog
    metadata = service_pb2.ServerMetadataResponse(**server_metadata(doors.server_id))

    def server_live(_request: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    async def server_ready(_request: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=await doors.readiness.is_server_ready())

    async def model_ready(request: Any) -> Any:
        is_ready = await doors.readiness.is_ready(request.name, read_version(request.version))
        return service_pb2.ModelReadyResponse(ready=is_ready)

    def server_info(_request: Any) -> Any:
        return metadata

    def model_info(request: Any) -> Any:
        version = read_version(request.version)
        served = catalog.resolve(request.name, version)
        return service_pb2.ModelMetadataResponse(**model_metadata(served, version))

    def model_config(request: Any) -> Any:
        served = catalog.resolve(request.name, read_version(request.version))
        return service_pb2.ModelConfigResponse(config=served.config_message)

    return {
        "ServerLive": unary(service_pb2.ServerLiveRequest, server_live),
        "ServerReady": unary_async(service_pb2.ServerReadyRequest, server_ready),
        "ModelReady": unary_async(service_pb2.ModelReadyRequest, model_ready),
        "ServerMetadata": unary(service_pb2.ServerMetadataRequest, server_info),
        "ModelMetadata": unary(service_pb2.ModelMetadataRequest, model_info),
        "ModelConfig": unary(service_pb2.ModelConfigRequest, model_config),
    }

"""Clients' shared memory over gRPC: system and CUDA regions, each with status, register and unregister."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2

from gateway.doors import Doors
from gateway.grpc.rpc import Methods, unary, unary_async
from schemas.regions import CUDA, SYSTEM


def shared_memory_methods(doors: Doors) -> Methods:
    """The methods of Triton's two shared-memory extensions."""
    regions = doors.regions

    def system_status(request: Any) -> Any:
        rows = regions.status(SYSTEM, request.name)
        return service_pb2.SystemSharedMemoryStatusResponse(regions={row["name"]: row for row in rows})

    def cuda_status(request: Any) -> Any:
        rows = regions.status(CUDA, request.name)
        return service_pb2.CudaSharedMemoryStatusResponse(regions={row["name"]: row for row in rows})

    async def register_system(request: Any) -> Any:
        await regions.register_system(request.name, request.key, request.offset, request.byte_size)
        return service_pb2.SystemSharedMemoryRegisterResponse()

    async def register_cuda(request: Any) -> Any:
        await regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return service_pb2.CudaSharedMemoryRegisterResponse()

    async def unregister_system(request: Any) -> Any:
        await regions.unregister(SYSTEM, request.name)
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    async def unregister_cuda(request: Any) -> Any:
        await regions.unregister(CUDA, request.name)
        return service_pb2.CudaSharedMemoryUnregisterResponse()

    return {
        "SystemSharedMemoryStatus": unary(service_pb2.SystemSharedMemoryStatusRequest, system_status),
        "SystemSharedMemoryRegister": unary_async(service_pb2.SystemSharedMemoryRegisterRequest, register_system),
        "SystemSharedMemoryUnregister": unary_async(service_pb2.SystemSharedMemoryUnregisterRequest, unregister_system),
        "CudaSharedMemoryStatus": unary(service_pb2.CudaSharedMemoryStatusRequest, cuda_status),
        "CudaSharedMemoryRegister": unary_async(service_pb2.CudaSharedMemoryRegisterRequest, register_cuda),
        "CudaSharedMemoryUnregister": unary_async(service_pb2.CudaSharedMemoryUnregisterRequest, unregister_cuda),
    }

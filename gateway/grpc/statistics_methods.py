"""Statistics of models, over gRPC."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2

from gateway.doors import Doors
from gateway.grpc.rpc import Methods, unary_async
from gateway.grpc.versions import read_version
from gateway.model_statistics import model_statistics


def statistics_methods(doors: Doors) -> Methods:
    """Triton's statistics extension."""

    async def of_models(request: Any) -> Any:
        answer = await model_statistics(doors.catalog, doors.statistics, request.name, read_version(request.version))
        return service_pb2.ModelStatisticsResponse(**answer)

    return {"ModelStatistics": unary_async(service_pb2.ModelStatisticsRequest, of_models)}

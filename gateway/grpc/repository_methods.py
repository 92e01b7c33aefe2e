"""The model repository over gRPC: index, load, unload. Texts are those of Triton's server."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2

from gateway.doors import Doors
from gateway.grpc.rpc import Methods, unary_async
from gateway.repository_control import UNLOAD_DEPENDENTS
from schemas.errors import ErrorCode, WeirError, invalid

_FILE = "file:"


def repository_methods(doors: Doors) -> Methods:
    """The methods of the repository extension."""
    repository = doors.repository

    async def index(request: Any) -> Any:
        _check_repository(request.repository_name)
        rows = await repository.index(request.ready)
        return service_pb2.RepositoryIndexResponse(models=rows)

    async def load(request: Any) -> Any:
        _check_repository(request.repository_name)
        name = request.model_name
        config, files = _load_parameters(request.parameters)
        request.Clear()  # files are copies: while the model loads they are held, and charged, once
        await repository.load(name, config, files)
        return service_pb2.RepositoryModelLoadResponse()

    async def unload(request: Any) -> Any:
        _check_repository(request.repository_name)
        await repository.unload(request.model_name, _unload_dependents(request.parameters))
        return service_pb2.RepositoryModelUnloadResponse()

    return {
        "RepositoryIndex": unary_async(service_pb2.RepositoryIndexRequest, index),
        "RepositoryModelLoad": unary_async(service_pb2.RepositoryModelLoadRequest, load),
        "RepositoryModelUnload": unary_async(service_pb2.RepositoryModelUnloadRequest, unload),
    }


def _check_repository(name: str) -> None:
    if name:
        raise WeirError(ErrorCode.UNSUPPORTED, "'repository_name' specification is not supported")


def _load_parameters(parameters: Any) -> tuple[str | None, dict[str, bytes]]:
    """(configuration in JSON, files by path). Raises WeirError for parameters that are unknown or of another kind."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            config = _value(key, value, "string_param")
        elif key.startswith(_FILE):
            files[key.removeprefix(_FILE)] = _value(key, value, "bytes_param")
        else:
            raise invalid(f"unrecognized load parameter '{key}'.")
    return config, files


def _value(key: str, value: Any, kind: str) -> Any:
    if value.WhichOneof("parameter_choice") != kind:
        raise invalid(f"invalid value type for load parameter '{key}', expected {kind}.")
    return getattr(value, kind)


def _unload_dependents(parameters: Any) -> bool:
    if UNLOAD_DEPENDENTS not in parameters:
        return False
    value = parameters[UNLOAD_DEPENDENTS]
    if value.WhichOneof("parameter_choice") != "bool_param":
        raise invalid(f"invalid value type for '{UNLOAD_DEPENDENTS}' parameter, expected bool_param.")
    return bool(value.bool_param)

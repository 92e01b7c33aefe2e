"""Administration over gRPC: metadata and health, repository, settings, shared memory and statistics."""

from __future__ import annotations

from typing import Any

from weir.access.policy.actions import Action
from weir.access.principal import Principal
from weir.gateway.admin.metadata import model_metadata, server_metadata
from weir.gateway.admin.repository import UNLOAD_DEPENDENTS
from weir.gateway.admin.shared_memory import RegionOwner
from weir.gateway.admin.statistics import model_statistics
from weir.gateway.context import GatewayContext
from weir.gateway.grpc.codec import read_version
from weir.gateway.grpc.handlers import Methods, Rows, unary, unary_async, unary_of
from weir.schemas.core.errors import ErrorCode, WeirError, invalid
from weir.schemas.kserve.regions import CUDA, SYSTEM
from weir.schemas.kserve.triton_messages import messages
from weir.telemetry import log_settings
from weir.telemetry.tracing import settings as trace_settings


def metadata_methods(context: GatewayContext) -> Methods:
    """Health, metadata and configuration."""
    catalog = context.catalog
    metadata = messages.ServerMetadataResponse(**server_metadata(context.server_id))

    def server_live(_request: Any) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def server_ready(_request: Any) -> Any:
        return messages.ServerReadyResponse(ready=await context.readiness.is_server_ready())

    async def model_ready(request: Any) -> Any:
        is_ready = await context.readiness.is_ready(request.name, read_version(request.version))
        return messages.ModelReadyResponse(ready=is_ready)

    def server_info(_request: Any) -> Any:
        return metadata

    def model_info(request: Any) -> Any:
        version = read_version(request.version)
        served = catalog.resolve(request.name, version)
        return messages.ModelMetadataResponse(**model_metadata(served, version))

    def model_config(request: Any) -> Any:
        served = catalog.resolve(request.name, read_version(request.version))
        return messages.ModelConfigResponse(config=served.config_message)

    return {
        "ServerLive": unary(messages.ServerLiveRequest, server_live, Action.HEALTH),
        "ServerReady": unary_async(messages.ServerReadyRequest, server_ready, Action.HEALTH),
        "ModelReady": unary_async(messages.ModelReadyRequest, model_ready, Action.HEALTH, "name"),
        "ServerMetadata": unary(messages.ServerMetadataRequest, server_info, Action.METADATA, lists=True),
        "ModelMetadata": unary(messages.ModelMetadataRequest, model_info, Action.METADATA, "name"),
        "ModelConfig": unary(messages.ModelConfigRequest, model_config, Action.METADATA, "name"),
    }


_FILE = "file:"


def repository_methods(context: GatewayContext) -> Methods:
    """The methods of the repository extension."""
    repository = context.repository

    async def index(request: Any) -> Any:
        _check_repository(request.repository_name)
        rows = await repository.index(request.ready)
        return messages.RepositoryIndexResponse(models=rows)

    async def load(request: Any) -> Any:
        _check_repository(request.repository_name)
        name = request.model_name
        config, files = _load_parameters(request.parameters)
        request.Clear()  # files are copies: they are held, and charged, once while the model loads
        await repository.load(name, config, files, "grpc")
        return messages.RepositoryModelLoadResponse()

    async def unload(request: Any) -> Any:
        _check_repository(request.repository_name)
        await repository.unload(request.model_name, _unload_dependents(request.parameters), "grpc")
        return messages.RepositoryModelUnloadResponse()

    return {
        "RepositoryIndex": unary_async(messages.RepositoryIndexRequest, index, Action.METADATA, rows=Rows("models")),
        "RepositoryModelLoad": unary_async(messages.RepositoryModelLoadRequest, load, Action.LOAD, "model_name"),
        "RepositoryModelUnload": unary_async(messages.RepositoryModelUnloadRequest, unload, Action.LOAD, "model_name"),
    }


def _check_repository(name: str) -> None:
    if name:
        raise WeirError(ErrorCode.UNSUPPORTED, "'repository_name' specification is not supported")


def _load_parameters(parameters: Any) -> tuple[str | None, dict[str, bytes]]:
    """(configuration in JSON, files by path). Raises WeirError for parameters that are unknown or of a wrong kind."""
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


_LOG_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}


def settings_methods(context: GatewayContext) -> Methods:
    """Trace settings, global and of a model, and log settings: each call changes the given ones, and returns all."""
    settings = context.settings

    async def trace(request: Any) -> Any:
        model = request.model_name
        if model and model not in context.catalog.names():
            raise context.catalog.warmup_error(model) or invalid(f"Request for unknown model : {model}")
        changes = trace_settings.changes_of_lists({name: list(s.value) for name, s in request.settings.items()})
        response = messages.TraceSettingResponse()
        for name, value in (await settings.change_trace(model, changes)).items():
            response.settings[name].value.extend([value] if isinstance(value, str) else value)
        return response

    async def log(request: Any) -> Any:
        choices = {name: _choice(setting) for name, setting in request.settings.items()}
        response = messages.LogSettingsResponse()
        for name, value in (await settings.change_log(log_settings.changes_of_values(choices))).items():
            setattr(response.settings[name], _LOG_FIELDS[type(value)], value)
        return response

    return {
        "TraceSetting": unary_async(messages.TraceSettingRequest, trace, Action.TRACE, "model_name"),
        "LogSettings": unary_async(messages.LogSettingsRequest, log, Action.LOGS),
    }


def _choice(setting: Any) -> tuple[str | None, Any]:
    field = setting.WhichOneof("parameter_choice")
    return field, None if field is None else getattr(setting, field)


def shared_memory_methods(context: GatewayContext) -> Methods:
    """The methods of Triton's two shared-memory extensions."""
    regions = context.regions

    def holder(who: Principal) -> RegionOwner:
        return RegionOwner.of(context.gate, who)

    async def system_status(request: Any, who: Principal) -> Any:
        rows = regions.status(SYSTEM, request.name, holder(who).owner)
        return messages.SystemSharedMemoryStatusResponse(regions={row["name"]: row for row in rows})

    async def cuda_status(request: Any, who: Principal) -> Any:
        rows = regions.status(CUDA, request.name, holder(who).owner)
        return messages.CudaSharedMemoryStatusResponse(regions={row["name"]: row for row in rows})

    async def register_system(request: Any, who: Principal) -> Any:
        await regions.register_system(request.name, request.key, request.offset, request.byte_size, holder(who))
        return messages.SystemSharedMemoryRegisterResponse()

    async def register_cuda(request: Any, who: Principal) -> Any:
        await regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size, holder(who))
        return messages.CudaSharedMemoryRegisterResponse()

    async def unregister_system(request: Any, who: Principal) -> Any:
        await regions.unregister(SYSTEM, request.name, holder(who).owner)
        return messages.SystemSharedMemoryUnregisterResponse()

    async def unregister_cuda(request: Any, who: Principal) -> Any:
        await regions.unregister(CUDA, request.name, holder(who).owner)
        return messages.CudaSharedMemoryUnregisterResponse()

    return {
        "SystemSharedMemoryStatus": unary_of(
            messages.SystemSharedMemoryStatusRequest, system_status, Action.SHARED_MEMORY
        ),
        "SystemSharedMemoryRegister": unary_of(
            messages.SystemSharedMemoryRegisterRequest, register_system, Action.SHARED_MEMORY
        ),
        "SystemSharedMemoryUnregister": unary_of(
            messages.SystemSharedMemoryUnregisterRequest, unregister_system, Action.SHARED_MEMORY
        ),
        "CudaSharedMemoryStatus": unary_of(messages.CudaSharedMemoryStatusRequest, cuda_status, Action.SHARED_MEMORY),
        "CudaSharedMemoryRegister": unary_of(
            messages.CudaSharedMemoryRegisterRequest, register_cuda, Action.SHARED_MEMORY
        ),
        "CudaSharedMemoryUnregister": unary_of(
            messages.CudaSharedMemoryUnregisterRequest, unregister_cuda, Action.SHARED_MEMORY
        ),
    }


def statistics_methods(context: GatewayContext) -> Methods:
    """Triton's statistics extension."""

    async def of_models(request: Any) -> Any:
        response = await model_statistics(
            context.catalog, context.statistics, request.name, read_version(request.version)
        )
        return messages.ModelStatisticsResponse(**response)

    return {
        "ModelStatistics": unary_async(
            messages.ModelStatisticsRequest, of_models, Action.STATISTICS, "name", Rows("model_stats")
        )
    }

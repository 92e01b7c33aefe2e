"""Triton's trace and logging extensions over gRPC: settings that clients read, and change while the server runs."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2

from gateway.doors import Doors
from gateway.grpc.rpc import Methods, unary_async
from schemas.errors import invalid
from telemetry import log_settings, trace_settings

_LOG_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}


def settings_methods(doors: Doors) -> Methods:
    """Trace settings, global and of a model, and log settings: each call changes what it names, and tells them all."""
    settings = doors.settings

    async def trace(request: Any) -> Any:
        model = request.model_name
        if model and model not in doors.catalog.names():
            raise doors.catalog.not_known_yet(model) or invalid(f"Request for unknown model : {model}")
        changes = trace_settings.changes_of_lists({name: list(s.value) for name, s in request.settings.items()})
        response = service_pb2.TraceSettingResponse()
        for name, value in (await settings.change_trace(model, changes)).items():
            response.settings[name].value.extend([value] if isinstance(value, str) else value)
        return response

    async def log(request: Any) -> Any:
        asked = {name: _choice(setting) for name, setting in request.settings.items()}
        response = service_pb2.LogSettingsResponse()
        for name, value in (await settings.change_log(log_settings.changes_of_values(asked))).items():
            setattr(response.settings[name], _LOG_FIELDS[type(value)], value)
        return response

    return {
        "TraceSetting": unary_async(service_pb2.TraceSettingRequest, trace),
        "LogSettings": unary_async(service_pb2.LogSettingsRequest, log),
    }


def _choice(setting: Any) -> tuple[str | None, Any]:
    field = setting.WhichOneof("parameter_choice")
    return field, None if field is None else getattr(setting, field)

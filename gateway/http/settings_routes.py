"""Triton's trace and logging extensions over HTTP: settings that clients read, and change while the server runs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.doors import Doors
from gateway.http.routing import get, json_answer, post, short_body
from schemas.errors import WeirError, invalid
from schemas.json_text import load_json
from telemetry import log_settings, trace_settings


def settings_routes(doors: Doors) -> list[Route]:
    """Trace settings, global and of a model (of no version: that URL is unknown), and log settings."""
    settings = doors.settings

    def model_of(request: Request) -> str:
        model = str(request.path_params.get("model", ""))
        if model and model not in doors.catalog.names():
            raise doors.catalog.not_known_yet(model) or unknown_model(model)
        return model

    async def trace(request: Request) -> Response:
        return json_answer(settings.trace(model_of(request)))

    async def change_trace(request: Request) -> Response:
        model = model_of(request)
        changes = trace_settings.changes_of_json(load_json(await short_body(request)))
        return json_answer(await settings.change_trace(model, changes))

    async def log(_request: Request) -> Response:
        return json_answer(settings.log())

    async def change_log(request: Request) -> Response:
        return json_answer(
            await settings.change_log(log_settings.changes_of_json(load_json(await short_body(request))))
        )

    routes = [get("/v2/logging", log), post("/v2/logging", change_log)]
    for path in ("/v2/trace/setting", "/v2/models/{model}/trace/setting"):
        routes += [get(path, trace), post(path, change_trace)]
    return routes


def unknown_model(model: str) -> WeirError:
    """Triton's refusal of trace settings for a model it has never heard of."""
    return invalid(f"Request for unknown model : {model}")

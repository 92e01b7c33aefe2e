"""What the server and its models say of themselves, over HTTP."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.doors import Doors
from gateway.http.routing import MODEL_PATHS, error_answer, get, json_answer, named
from gateway.server_info import model_metadata, server_metadata
from repository.config_text import config_to_json


def metadata_routes(doors: Doors) -> list[Route]:
    """Health, metadata and configuration; health and readiness answer with an empty body."""
    catalog = doors.catalog

    async def server(_request: Request) -> Response:
        durability = doors.durable.durability.told._asdict()
        return json_answer({**server_metadata(doors.server_id), "durability": durability})

    async def live(_request: Request) -> Response:
        return Response(status_code=200)

    async def ready(_request: Request) -> Response:
        return Response(status_code=200 if await doors.readiness.is_server_ready() else 400)

    async def model(request: Request) -> Response:
        name, version = named(request)
        return json_answer(model_metadata(catalog.resolve(name, version), version))

    async def model_config(request: Request) -> Response:
        return json_answer(config_to_json(catalog.resolve(*named(request)).config))

    async def model_ready(request: Request) -> Response:
        if await doors.readiness.is_ready(*named(request)):
            return Response(status_code=200)
        return error_answer(400, "Model version not ready")

    routes = [get("/v2", server), get("/v2/health/live", live), get("/v2/health/ready", ready)]
    for prefix in MODEL_PATHS:
        routes += [get(prefix, model), get(f"{prefix}/ready", model_ready), get(f"{prefix}/config", model_config)]
    return routes

"""Administration over HTTP: metadata and health, repository, settings, shared memory and statistics.

Source: KServe v2 and Triton's extensions, and its server's responses to malformed bodies; texts compared with a running
Triton 2.51.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.gateway.admin.metadata import model_metadata, server_metadata
from weir.gateway.admin.repository import UNLOAD_DEPENDENTS
from weir.gateway.admin.shared_memory import RegionOwner
from weir.gateway.admin.statistics import model_statistics
from weir.gateway.context import GatewayContext
from weir.gateway.http.load_request import READ_LOAD, load_parameters, read_parameters
from weir.gateway.http.routing import (
    MODEL_PATHS,
    author_of,
    get,
    json_response,
    model_and_version,
    post,
    read_body,
    read_short_body,
)
from weir.http_server.door import allows, gate_of, principal_of
from weir.http_server.responses import error_response
from weir.http_server.routing import Route
from weir.repository.config_text import config_to_json
from weir.runtime.offload import OFF_LOOP_BYTES
from weir.schemas.core.errors import ErrorCode, WeirError, internal, invalid
from weir.schemas.kserve.json_documents import load_json, members_of
from weir.schemas.kserve.regions import CUDA, SYSTEM
from weir.telemetry import log_settings
from weir.telemetry.tracing import settings as trace_settings


def metadata_routes(context: GatewayContext) -> list[Route]:
    """Health, metadata and configuration; health and readiness answer with an empty body."""
    catalog = context.catalog

    async def server(_request: Request) -> Response:
        durability = context.durable.durability.result._asdict()
        return json_response({**server_metadata(context.server_id), "durability": durability})

    async def live(_request: Request) -> Response:
        return Response(status_code=200)

    async def ready(_request: Request) -> Response:
        return Response(status_code=200 if await context.readiness.is_server_ready() else 400)

    async def model(request: Request) -> Response:
        name, version = model_and_version(request)
        return json_response(model_metadata(catalog.resolve(name, version), version))

    async def model_config(request: Request) -> Response:
        return json_response(config_to_json(catalog.resolve(*model_and_version(request)).config))

    async def model_ready(request: Request) -> Response:
        if await context.readiness.is_ready(*model_and_version(request)):
            return Response(status_code=200)
        return error_response(400, "Model version not ready")

    routes = [get("/v2", server, Action.METADATA, lists=True)]
    routes += [get("/v2/health/live", live, Action.HEALTH), get("/v2/health/ready", ready, Action.HEALTH)]
    for prefix in MODEL_PATHS:
        routes.append(get(prefix, model, Action.METADATA))
        routes.append(get(f"{prefix}/ready", model_ready, Action.HEALTH))
        routes.append(get(f"{prefix}/config", model_config, Action.METADATA))
    return routes


def repository_routes(context: GatewayContext) -> list[Route]:
    """The routes of the repository extension; all bodies are optional."""
    repository = context.repository
    limit_bytes = context.limits.input_size

    async def index(request: Request) -> Response:
        body = await read_short_body(request)
        rows = await repository.index(_ready(load_json(body)) if body else False)
        return json_response([row for row in rows if allows(request, row["name"])])

    async def load(request: Request) -> Response:
        body = await read_body(request, limit_bytes)
        config: str | None = None
        files: dict[str, bytes] = {}
        if len(body) > OFF_LOOP_BYTES:
            config, files = read_parameters(await context.offload.run(READ_LOAD, [body]))
        elif body:
            config, files = load_parameters(body)
        del body  # its charge now covers the decoded files, which are smaller
        await repository.load(request.path_params["model"], config, files, author_of(request))
        return Response(media_type="application/json")

    async def unload(request: Request) -> Response:
        body = await read_short_body(request)
        await repository.unload(request.path_params["model"], _unload_dependents(body), author_of(request))
        return Response(media_type="application/json")

    async def unsupported(_request: Request) -> Response:
        raise WeirError(ErrorCode.UNSUPPORTED, "'repository_name' specification is not supported")

    paths = ("/v2/repository/index", "/v2/repository/{repository}/index")
    routes = [post(path, index, Action.METADATA, lists=True) for path in paths]
    for verb, handler in (("load", load), ("unload", unload)):
        routes.append(post(f"/v2/repository/models/{{model}}/{verb}", handler, Action.LOAD))
        routes.append(post(f"/v2/repository/{{repository}}/models/{{model}}/{verb}", unsupported, Action.LOAD))
    return routes


def _ready(document: Any) -> bool:
    ready = document.get("ready", False) if isinstance(document, dict) else False
    if type(ready) is not bool:
        raise internal("attempt to access JSON non-boolean as boolean")
    return ready


def _unload_dependents(body: memoryview) -> bool:
    """Whether the body requests that dependents are unloaded too. As in Triton, a malformed body does not."""
    if not body:
        return False
    try:
        document = load_json(body)
    except WeirError:
        return False
    parameters = document.get("parameters") if isinstance(document, dict) else None
    return isinstance(parameters, dict) and parameters.get(UNLOAD_DEPENDENTS) is True


def settings_routes(context: GatewayContext) -> list[Route]:
    """Trace settings, global and of a model (of no version: that URL is unknown), and log settings."""
    settings = context.settings

    def model_of(request: Request) -> str:
        model = str(request.path_params.get("model", ""))
        if model and model not in context.catalog.names():
            raise context.catalog.warmup_error(model) or unknown_model(model)
        return model

    async def trace(request: Request) -> Response:
        return json_response(settings.trace(model_of(request)))

    async def change_trace(request: Request) -> Response:
        model = model_of(request)
        changes = trace_settings.changes_of_json(load_json(await read_short_body(request)))
        return json_response(await settings.change_trace(model, changes))

    async def log(_request: Request) -> Response:
        return json_response(settings.log())

    async def change_log(request: Request) -> Response:
        return json_response(
            await settings.change_log(log_settings.changes_of_json(load_json(await read_short_body(request))))
        )

    routes = [get("/v2/logging", log, Action.LOGS), post("/v2/logging", change_log, Action.LOGS)]
    for path in ("/v2/trace/setting", "/v2/models/{model}/trace/setting"):
        routes += [get(path, trace, Action.TRACE), post(path, change_trace, Action.TRACE)]
    return routes


def unknown_model(model: str) -> WeirError:
    """Triton's error for trace settings of an unknown model."""
    return invalid(f"Request for unknown model : {model}")


MAX_BODY_BYTES = 64 * 1024
"""The largest body of a registration, which is a few names and numbers."""


def shared_memory_routes(context: GatewayContext) -> list[Route]:
    """The routes below `/v2/systemsharedmemory` and `/v2/cudasharedmemory`."""
    regions = context.regions

    async def register_system(request: Request) -> Response:
        regions.check_allowed()
        body = await _document(request)
        for field in ("key", "byte_size"):
            if field not in body:
                raise _missing(field)
        key = _text(body["key"])
        offset = _number(body.get("offset", 0))
        await regions.register_system(
            request.path_params["region"], key, offset, _number(body["byte_size"]), _holder(request)
        )
        return _done()

    async def register_cuda(request: Request) -> Response:
        regions.check_allowed()
        body = await _document(request)
        if "raw_handle" not in body:
            raise _missing("raw_handle")
        encoded = _text(_member(members_of(body["raw_handle"]), "b64"))
        byte_size = _number(_member(body, "byte_size"))
        device_id = _number(_member(body, "device_id"))
        try:
            handle = b64decode(encoded, validate=True)
        except ValueError as error:
            raise invalid("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t") from error
        await regions.register_cuda(request.path_params["region"], handle, device_id, byte_size, _holder(request))
        return _done()

    routes: list[Route] = []
    for kind, register in ((SYSTEM, register_system), (CUDA, register_cuda)):
        routes += _region_routes(context, kind)
        routes.append(post(f"/v2/{kind}sharedmemory/region/{{region}}/register", register, Action.SHARED_MEMORY))
    return routes


def _holder(request: Request) -> RegionOwner:
    return RegionOwner.of(gate_of(request), principal_of(request))


def _region_routes(context: GatewayContext, kind: str) -> list[Route]:
    async def status(request: Request) -> Response:
        return json_response(
            context.regions.status(kind, request.path_params.get("region", ""), _holder(request).owner)
        )

    async def unregister(request: Request) -> Response:
        await context.regions.unregister(kind, request.path_params.get("region", ""), _holder(request).owner)
        return _done()

    root = f"/v2/{kind}sharedmemory"
    return [
        *(get(f"{path}/status", status, Action.SHARED_MEMORY) for path in (root, f"{root}/region/{{region}}")),
        *(post(f"{path}/unregister", unregister, Action.SHARED_MEMORY) for path in (root, f"{root}/region/{{region}}")),
    ]


def _done() -> Response:
    return Response(media_type="application/json")


async def _document(request: Request) -> Mapping[str, Any]:
    """The members of the JSON object in the request's body; none for any other JSON value."""
    too_long = f"Shared memory register request is longer than {MAX_BODY_BYTES} bytes"
    return members_of(load_json(await read_body(request, MAX_BODY_BYTES, too_long)))


def _missing(field: str) -> Exception:
    return invalid(f"Shared memory register request has no '{field}' field")


def _member(members: Mapping[str, Any], field: str) -> Any:
    if field in members:
        return members[field]
    raise internal(f"attempt to access non-existing object member '{field}'")


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    raise internal("attempt to access JSON non-string as string")


def _number(value: Any) -> int:
    if type(value) is int and value >= 0:
        return value
    raise internal("attempt to access JSON non-unsigned-integer as unsigned-integer")


def statistics_routes(context: GatewayContext) -> list[Route]:
    """Triton's statistics extension. These routes precede those of models: a model named `stats` is shadowed."""

    async def of_all(request: Request) -> Response:
        found = await model_statistics(context.catalog, context.statistics, "", "")
        return json_response(
            {name: [row for row in rows if allows(request, row["name"])] for name, rows in found.items()}
        )

    async def of_model(request: Request) -> Response:
        return json_response(await model_statistics(context.catalog, context.statistics, *model_and_version(request)))

    of_models = [get(f"{prefix}/stats", of_model, Action.STATISTICS) for prefix in MODEL_PATHS]
    return [get("/v2/models/stats", of_all, Action.STATISTICS, lists=True), *of_models]

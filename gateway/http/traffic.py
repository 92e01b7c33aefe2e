"""Traffic rules over HTTP: `GET`, `PUT` and `DELETE /v2/models/{model}/traffic`. The bodies are JSON (docs/traffic.md)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.traffic import checked
from gateway.context import GatewayContext
from gateway.http.routing import get, json_response, read_short_body
from schemas.config.traffic import read_rule
from schemas.kserve.json_documents import load_json

_PATH = "/v2/models/{model}/traffic"
AUTHOR_HEADER = "weir-by"
"""The header in which a client says who makes a change. Nothing proves it."""
MAX_AUTHOR_LENGTH = 200


def traffic_routes(context: GatewayContext) -> list[Route]:
    """The routes; none if the gateway splits no traffic."""
    traffic = context.traffic
    if traffic is None:
        return []

    async def show(request: Request) -> Response:
        return json_response(traffic.show(request.path_params["model"]))

    async def change(request: Request) -> Response:
        rule = checked(read_rule, load_json(await read_short_body(request)))
        return json_response(await traffic.set(request.path_params["model"], rule, author_of(request)))

    async def clear(request: Request) -> Response:
        return json_response(await traffic.clear(request.path_params["model"], author_of(request)))

    return [get(_PATH, show), Route(_PATH, change, methods=["PUT"]), Route(_PATH, clear, methods=["DELETE"])]


def author_of(request: Request) -> str:
    """Who makes a change: what the client says, and the address of its connection."""
    said = request.headers.get(AUTHOR_HEADER, "").strip()[:MAX_AUTHOR_LENGTH]
    address = f"http {request.client.host}" if request.client is not None else "http"
    return f"{said} ({address})" if said else address

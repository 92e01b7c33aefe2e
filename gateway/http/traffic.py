"""Traffic rules and the history of models over HTTP. The bodies are JSON (docs/traffic.md)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.gateway.admin.traffic import TrafficControl, checked, read_ramp, read_shadow
from weir.gateway.context import GatewayContext
from weir.gateway.http.routing import author_of, get, json_response, post, read_short_body
from weir.http_server.routing import Route
from weir.schemas.config.traffic import read_rule
from weir.schemas.core.errors import invalid
from weir.schemas.kserve.json_documents import load_json

_PATH = "/v2/models/{model}/traffic"
_RAMP_PATH = f"{_PATH}/ramp"
_SHADOW_PATH = f"{_PATH}/shadow"
_HISTORY_PATH = "/v2/models/{model}/history"
_ROLLBACK_PATH = "/v2/models/{model}/rollback"


def traffic_routes(traffic: TrafficControl) -> list[Route]:
    """The routes of traffic rules."""

    async def show(request: Request) -> Response:
        return json_response(traffic.show(request.path_params["model"]))

    async def change(request: Request) -> Response:
        rule = checked(read_rule, load_json(await read_short_body(request)))
        return json_response(await traffic.set(request.path_params["model"], rule, author_of(request)))

    async def clear(request: Request) -> Response:
        return json_response(await traffic.clear(request.path_params["model"], author_of(request)))

    async def ramp(request: Request) -> Response:
        wanted = read_ramp(load_json(await read_short_body(request)))
        return json_response(await traffic.ramp(request.path_params["model"], wanted, author_of(request)))

    async def shadow(request: Request) -> Response:
        wanted = read_shadow(load_json(await read_short_body(request)))
        return json_response(await traffic.shadow(request.path_params["model"], wanted, author_of(request)))

    async def no_shadow(request: Request) -> Response:
        return json_response(await traffic.shadow(request.path_params["model"], None, author_of(request)))

    async def report(request: Request) -> Response:
        return json_response(await traffic.report(request.path_params["model"]))

    async def sample(request: Request) -> Response:
        return json_response(await traffic.sample(request.path_params["model"], request.path_params["sample"]))

    return [
        post(_RAMP_PATH, ramp, Action.TRAFFIC),
        get(_SHADOW_PATH, report, Action.TRAFFIC),
        get(f"{_SHADOW_PATH}/{{sample}}", sample, Action.TRAFFIC),
        Route(_SHADOW_PATH, shadow, Action.TRAFFIC, methods=["PUT"]),
        Route(_SHADOW_PATH, no_shadow, Action.TRAFFIC, methods=["DELETE"]),
        get(_PATH, show, Action.TRAFFIC),
        Route(_PATH, change, Action.TRAFFIC, methods=["PUT"]),
        Route(_PATH, clear, Action.TRAFFIC, methods=["DELETE"]),
    ]


def history_routes(context: GatewayContext) -> list[Route]:
    """The routes of the history of models; none if the gateway records no changes."""
    history = context.history
    if history is None:
        return []

    async def show(request: Request) -> Response:
        limit = request.query_params.get("limit", "50")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 10):
            raise invalid(f"limit must be a whole number, got '{limit[:100]}'")
        return json_response(await history.show(request.path_params["model"], int(limit)))

    async def roll_back(request: Request) -> Response:
        return json_response(await history.roll_back(request.path_params["model"], author_of(request)))

    return [get(_HISTORY_PATH, show, Action.LOAD), post(_ROLLBACK_PATH, roll_back, Action.LOAD)]

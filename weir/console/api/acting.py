"""Routes that act on the cluster: models, traffic, jobs, dead letters. They pass requests on to a gateway's HTTP API.

All but inference are rejected unless the console allows changes (`--console-allow-changes`). A request of another web page
is rejected: each needs a header that a browser sends to a foreign server only with that server's consent, which the console
never gives.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.calls.gateway_api import Response as ApiResponse
from weir.console.api.context import ConsoleContext
from weir.console.api.responses import error_response
from weir.http_server.routing import Route
from weir.schemas.core.errors import WeirError
from weir.schemas.core.names import model_path

CONSOLE_HEADER = "x-weir-console"
"""The header of every request of the page that acts. Its value is "1"."""

MAX_BODY_BYTES = 8 << 20
"""The largest body of a request. What is larger is sent to a gateway directly."""

_PASSED_HEADERS = ("content-type", "accept", "inference-header-content-length")

_Handler = Callable[[Request], Awaitable[Response]]
_Path = Callable[[Request], str]


def guarded(handler: _Handler, allows_changes: bool = True) -> _Handler:
    """`handler` for requests of the console's own page; without `allows_changes` every request is rejected."""

    async def check(request: Request) -> Response:
        if request.headers.get(CONSOLE_HEADER) != "1":
            return error_response(
                403, f"the request lacks the header {CONSOLE_HEADER}: 1, which the console's page sends"
            )
        if not allows_changes:
            return error_response(
                403, "this console is read-only: start it with --console-allow-changes to change the cluster from here"
            )
        try:
            return await handler(request)
        except WeirError as error:
            return error_response(503, error.message)

    return check


async def read_body(request: Request) -> bytes | None:
    """The body of a request; None if it is larger than `MAX_BODY_BYTES`."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def acting_routes(context: ConsoleContext) -> list[Route]:
    """The routes of `/api` that pass a request on to a gateway."""
    return [*_model_routes(context), *_job_routes(context)]


def _model_routes(context: ConsoleContext) -> list[Route]:
    def of_model(suffix: str) -> _Path:
        return lambda request: model_path(request.path_params["name"]) + suffix

    def of_repository(action: str) -> _Path:
        return lambda request: f"/v2/repository/models/{_quoted(request, 'name')}/{action}"

    traffic, shadow = of_model("/traffic"), of_model("/traffic/shadow")
    return [
        *(
            Route(
                f"/api/models/{{name:path}}/{action}",
                _changing(context, "POST", of_repository(sent)),
                Action.CONSOLE_CHANGE,
                methods=["POST"],
            )
            for action, sent in (("load", "load"), ("reload", "load"), ("unload", "unload"))
        ),
        Route(
            "/api/models/{name:path}/traffic",
            _changing(context, "PUT", traffic),
            Action.CONSOLE_CHANGE,
            methods=["PUT"],
        ),
        Route(
            "/api/models/{name:path}/traffic",
            _changing(context, "DELETE", traffic),
            Action.CONSOLE_CHANGE,
            methods=["DELETE"],
        ),
        Route(
            "/api/models/{name:path}/traffic/ramp",
            _changing(context, "POST", of_model("/traffic/ramp")),
            Action.CONSOLE_CHANGE,
            methods=["POST"],
        ),
        Route(
            "/api/models/{name:path}/traffic/shadow",
            _changing(context, "PUT", shadow),
            Action.CONSOLE_CHANGE,
            methods=["PUT"],
        ),
        Route(
            "/api/models/{name:path}/traffic/shadow",
            _changing(context, "DELETE", shadow),
            Action.CONSOLE_CHANGE,
            methods=["DELETE"],
        ),
        Route(
            "/api/models/{name:path}/rollback",
            _changing(context, "POST", of_model("/rollback")),
            Action.CONSOLE_CHANGE,
            methods=["POST"],
        ),
    ]


def _job_routes(context: ConsoleContext) -> list[Route]:
    def jobs(request: Request) -> str:
        query = urlencode(list(request.query_params.multi_items()))
        return f"/v2/jobs?{query}" if query else "/v2/jobs"

    def of_job(suffix: str = "") -> _Path:
        return lambda request: f"/v2/jobs/{_quoted(request, 'id')}{suffix}"

    return [
        Route("/api/jobs", _reading(context, jobs), Action.CONSOLE_READ),
        Route("/api/jobs", _changing(context, "POST", jobs), Action.CONSOLE_CHANGE, methods=["POST"]),
        Route("/api/jobs/{id}", _reading(context, of_job()), Action.CONSOLE_READ),
        Route("/api/jobs/{id}", _changing(context, "DELETE", of_job()), Action.CONSOLE_CHANGE, methods=["DELETE"]),
        Route("/api/jobs/{id}/result", _reading(context, of_job("/result")), Action.CONSOLE_READ),
        *(
            Route(
                f"/api/jobs/{{id}}/{action}",
                _changing(context, "POST", of_job(f"/{action}")),
                Action.CONSOLE_CHANGE,
                methods=["POST"],
            )
            for action in ("pause", "resume", "cancel", "retry")
        ),
    ]


def _changing(context: ConsoleContext, method: str, path: _Path) -> _Handler:
    """Passes the request on to `path` of a gateway, if the console allows changes."""

    async def handle(request: Request) -> Response:
        body = await read_body(request)
        if body is None:
            return error_response(
                413, f"the body is larger than {MAX_BODY_BYTES} bytes: send it to a gateway's HTTP port instead"
            )
        headers = {name: request.headers[name] for name in _PASSED_HEADERS if name in request.headers}
        return _relayed(await context.ask_gateway(method, path(request), body, headers))

    return guarded(handle, context.allows_changes)


def _reading(context: ConsoleContext, path: _Path) -> _Handler:
    """Answers with what a gateway has at `path`; with 503 if no gateway responds."""

    async def handle(request: Request) -> Response:
        try:
            return _relayed(await context.ask_gateway("GET", path(request)))
        except WeirError as error:
            return error_response(503, error.message)

    return handle


def _relayed(response: ApiResponse) -> Response:
    kept = {name: value for name, value in response.headers.items() if name.lower() in ("content-type", "retry-after")}
    return Response(response.body, response.status, kept)


def _quoted(request: Request, parameter: str) -> str:
    return quote(request.path_params[parameter], safe="")

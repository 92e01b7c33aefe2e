"""`HttpDoor`: asks the gate about each request of an ASGI application, and says who sends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp, Scope

from weir.access.gate import TENANT_HEADER, Asked, Gate, Shown
from weir.access.limits.refusals import TokensPending
from weir.access.policy.actions import Action
from weir.access.principal import NOBODY, Principal
from weir.http_server.asgi import CERTIFICATE_KEY, EXCHANGE_KEY, AsgiExchange
from weir.http_server.routing import Route
from weir.schemas.core.errors import WeirError

_LONGEST_LENGTH = 20  # digits
_READING = ("GET", "HEAD")
_PRINCIPAL_KEY = "weir.principal"


class HttpDoor:
    """The door of one application. `respond` makes what answers with an error; `name` is its name in the audit log."""

    def __init__(self, gate: Gate, respond: Callable[[WeirError], ASGIApp], name: str = "http") -> None:
        self.gate = gate
        self._name = name
        self._respond = respond

    async def rejection(self, scope: Scope, route: Route) -> ASGIApp | None:
        """Implements `Door.rejection`. A request that is let in has its principal in its scope (`principal_of`)."""
        gate = self.gate
        if not gate.is_on:
            return None
        try:
            principal = gate.admit(shown_in(scope), self._asked(scope, route))
        except TokensPending as pending:
            refusal = await pending.wait()
            if refusal is not None:
                return self._respond(refusal)
            principal = pending.principal
        except WeirError as error:
            return self._respond(error)
        scope[_PRINCIPAL_KEY] = principal
        if EXCHANGE_KEY in scope:  # else it came over the bus
            exchange: AsgiExchange = scope[EXCHANGE_KEY]
            exchange.principal = principal
            counts = route.submits or route.action is Action.INFER
            if counts and gate.limits_requests and not announced_bytes(scope["headers"]):
                return self._count_body(exchange, principal)
        return None

    def _count_body(self, exchange: AsgiExchange, principal: Principal) -> ASGIApp | None:
        """Has a body counted that was not announced. Returns what answers if it is too large already."""
        exchange.on_body = partial(self.gate.count_body, principal)
        try:
            exchange.on_body(exchange.received_bytes, not exchange.more_body)
        except WeirError as error:
            return self._respond(error)
        return None

    def _asked(self, scope: Scope, route: Route) -> Asked:
        parameters, method, client = scope["path_params"], scope["method"], scope.get("client")
        model = "" if route.lists else parameters.get(route.model_parameter, "")
        return Asked(
            self._name,
            f"{method} {route.path}",
            route.action,
            model,
            parameters.get("version", ""),
            client[0] if client else "",
            route.lists,
            method in _READING,
            announced_bytes(scope["headers"]),
            route.submits,
        )


def shown_in(scope: Scope) -> Shown:
    """What the request with this ASGI scope shows."""
    headers = scope["headers"]
    tenant = first_header(headers, TENANT_HEADER)
    return Shown(first_header(headers, b"authorization"), scope.get(CERTIFICATE_KEY), tenant)


def announced_bytes(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """The size of the body as the head announces it; 0 where it does not."""
    length = first_header(headers, b"content-length")
    return int(length) if length.isdigit() and len(length) < _LONGEST_LENGTH else 0


def first_header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    """The first header of this name, among names in lower case; b"" without one."""
    return next((value for name, value in headers if name == wanted), b"")


def principal_of(request: Request) -> Principal:
    """Who sends this request, which the door has let in."""
    principal: Principal = request.scope.get(_PRINCIPAL_KEY, NOBODY)
    return principal


def proved_principal(request: Request) -> Principal | None:
    """As `principal_of`; None without an access policy, where nobody has to prove anything."""
    return principal_of(request) if gate_of(request).is_on else None


def check_model(request: Request, model: str, version: str = "") -> None:
    """For a route that `lists`: raises WeirError where its sender may not do the route's action to this model."""
    door, route = _asked(request)
    door.gate.check(principal_of(request), route.action, model, version)


def gate_of(request: Request) -> Gate:
    """The gate that has let this request in."""
    door: HttpDoor = request.app.state.door
    return door.gate


def allows(request: Request, model: str, action: Action | None = None) -> bool:
    """For a route that `lists`: whether its sender may do the route's action, or this one, to this model."""
    door, route = _asked(request)
    return door.gate.may(principal_of(request), action or route.action, model)


def _asked(request: Request) -> tuple[HttpDoor, Route]:
    door, route = request.app.state.door, request.scope["route"]
    return door, route

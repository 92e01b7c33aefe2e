"""`Route`: a route of an ASGI application behind an `HttpConnection`. Its door asks the gate before the handler runs."""

from __future__ import annotations

import urllib.parse
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Protocol

from starlette import routing
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weir.access.policy.actions import Action

Handler = Callable[[Request], Awaitable[Response]]


class Door(Protocol):
    """Lets requests in (`weir.http_server.door.HttpDoor`). An application has it as `state.door`."""

    async def rejection(self, scope: Scope, route: Route) -> ASGIApp | None:
        """What answers a request for `route` that is not let in; None for one that is."""


class Route(routing.Route):
    """A route for the paths of `weir.schemas.core.names.routed_path`: it decodes what is left of the names in them.

    A request does `action` to the model in the path parameter `model_parameter`, or to the server where the path has none.
    With `lists`, it concerns several models, or one that the body names: the door lets in whoever may do the action to any
    model, and the handler asks about each model (`allowed_models`, `check_model` of `weir.http_server.door`). What
    `submits` work for later counts towards the limits of its owner, as inference does.
    """

    def __init__(  # noqa: PLR0913 - what a route is, by name
        self,
        path: str,
        endpoint: Handler,
        action: Action,
        *,
        methods: Collection[str] = ("GET",),
        lists: bool = False,
        model_parameter: str = "model",
        submits: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(path, endpoint, methods=list(methods), **more)
        self.action = action
        self.lists = lists
        self.model_parameter = model_parameter
        self.submits = submits

    def matches(self, scope: Scope) -> tuple[routing.Match, Scope]:
        """Whether the route matches, and what it adds to the scope."""
        match, added = super().matches(scope)
        for name, value in added.get("path_params", {}).items():
            if isinstance(value, str):  # else it is a number
                added["path_params"][name] = urllib.parse.unquote(value)
        return match, added

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request that the door lets in."""
        door: Door = scope["app"].state.door
        rejection = await door.rejection(scope, self)
        await (super().handle if rejection is None else rejection)(scope, receive, send)

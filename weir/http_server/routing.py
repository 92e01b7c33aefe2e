"""`Route`: a route of an ASGI application behind an `HttpConnection`."""

from __future__ import annotations

import urllib.parse

from starlette import routing
from starlette.types import Scope


class Route(routing.Route):
    """A route for the paths of `weir.schemas.core.names.routed_path`: it decodes what is left of the names in them."""

    def matches(self, scope: Scope) -> tuple[routing.Match, Scope]:
        """Whether the route matches, and what it adds to the scope."""
        match, added = super().matches(scope)
        for name, value in added.get("path_params", {}).items():
            if isinstance(value, str):  # else it is a number
                added["path_params"][name] = urllib.parse.unquote(value)
        return match, added

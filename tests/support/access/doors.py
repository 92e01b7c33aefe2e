"""Applications behind an open door: without a policy everybody may do everything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from weir.access.gate import Gate
from weir.http_server.door import HttpDoor
from weir.http_server.responses import weir_error_response


def open_gate() -> Gate:
    return Gate(time.time)


def application(routes: Sequence[BaseRoute], gate: Gate | None = None, **more: Any) -> Starlette:
    """The application of these routes."""
    app = Starlette(routes=routes, **more)
    app.state.door = HttpDoor(gate or open_gate(), weir_error_response)
    return app

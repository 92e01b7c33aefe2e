"""`make_app`: the console's ASGI application."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from console.api.acting import acting_routes
from console.api.context import ConsoleContext
from console.api.dead_letters import dead_letter_routes
from console.api.inference import inference_routes
from console.api.page import page_routes
from console.api.reading import reading_routes
from console.api.requests import request_routes

_COMPRESSED_BYTES = 4096
_COMPRESSION_LEVEL = 1


def make_app(context: ConsoleContext, address: str, allowed_hosts: Sequence[str] = ()) -> Starlette:
    """The application of a console that listens on `address`.

    A request whose `Host` header names another host than this one is rejected, so that a foreign domain name that resolves
    to this host gains nothing. `allowed_hosts` are further names of it; "*" accepts all.
    """
    own = {"localhost", "127.0.0.1", "[::1]", address, socket.gethostname(), socket.getfqdn()}
    return Starlette(
        routes=[
            *page_routes(),
            *reading_routes(context),
            *acting_routes(context),
            *inference_routes(context),
            *request_routes(context),
            *dead_letter_routes(context),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=sorted({*own, *allowed_hosts}), www_redirect=False),
            Middleware(GZipMiddleware, minimum_size=_COMPRESSED_BYTES, compresslevel=_COMPRESSION_LEVEL),
        ],
    )

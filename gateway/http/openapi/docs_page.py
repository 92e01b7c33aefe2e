"""`/docs`: a page that shows `/openapi.json`, and sends the requests that its reader fills in.

The page is Swagger UI. Its files come from the npm package swagger-ui-dist and are copied into `vendor/` when Weir is
built; the source tree does not contain them. The page loads nothing from other hosts, and its policy makes the
browser refuse that.

Source: Content Security Policy Level 3.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.gateway.http.routing import conditional_response
from weir.http_server.responses import error_response
from weir.http_server.routing import Handler, Route

DOCS_PATH = "/docs"

VENDOR = Path(__file__).with_name("vendor")
_INDEX = "page/index.html"

FILES = {
    _INDEX: "text/html; charset=utf-8",
    "page/start.js": "text/javascript; charset=utf-8",
    "page/icon.svg": "image/svg+xml",
    "vendor/swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "vendor/swagger-ui.css": "text/css; charset=utf-8",
}
"""The content type of each file of the page."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

NOT_BUILT = (
    "this installation lacks the files of the page /docs, which are copied when Weir is built: run `make web` in a "
    "clone and install Weir from it again, or install a wheel. The description itself is at /openapi.json"
)


class _File(NamedTuple):
    content: bytes
    content_type: str
    etag: str


def docs_routes(folder: Path = VENDOR.parent) -> list[Route]:
    """The routes of the page. Its files, whose paths in `folder` are in `FILES`, are read at the first request."""
    files: dict[str, _File] = {}
    reading = asyncio.Lock()

    def route(path: str, file: str) -> Route:
        async def send(request: Request) -> Response:
            async with reading:
                if not files:
                    files.update(await asyncio.to_thread(_read, folder))
            if not files:
                return error_response(404, NOT_BUILT)
            found = files[file]
            return conditional_response(request, found.content, found.etag, found.content_type, HEADERS)

        return _page(path, send)

    others = [file for file in FILES if file != _INDEX]
    return [route(DOCS_PATH, _INDEX), *(route(f"{DOCS_PATH}/{Path(file).name}", file) for file in others)]


def _page(path: str, handler: Handler) -> Route:
    return Route(path, handler, Action.METADATA, lists=True, include_in_schema=False)


def _read(folder: Path) -> dict[str, _File]:
    """All files by their paths; none if one of them is missing."""
    found: dict[str, _File] = {}
    for file, content_type in FILES.items():
        try:
            content = (folder / file).read_bytes()
        except FileNotFoundError:
            return {}
        found[file] = _File(content, content_type, f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"')
    return found

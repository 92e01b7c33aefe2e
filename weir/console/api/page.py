"""The page itself: its files are read once, and served with validators and a strict content security policy."""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from weir.access.policy.actions import Action
from weir.http_server.routing import Route

WEB_FOLDER = Path(__file__).parents[1] / "web"

NOT_BUILT = (
    "The console's page needs libraries that are copied at build time, and this installation lacks them.\n"
    "In a clone run `make web`, then install Weir from it again; wheels of weir-serve contain them.\n"
)

_IMPORT_MAP = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".html": "text/html"}


def page_routes(folder: Path = WEB_FOLDER) -> list[Route]:
    """`/` and `/web/<path>`. The files of `folder` are in memory; a path that is not one of them returns 404."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    contents = {name: path.read_bytes() for name, path in files.items()}
    index = contents.get("index.html", b"")
    policy = _policy(index)
    is_built = any(name.startswith("vendor/") and name.endswith(".mjs") for name in contents)

    async def page(request: Request) -> Response:
        if not is_built:
            return PlainTextResponse(NOT_BUILT, 503)
        return _file_response(request, "index.html", index, policy)

    async def file(request: Request) -> Response:
        name = request.path_params["path"]
        content = contents.get(name)
        if content is None:
            return PlainTextResponse("Not Found", 404)
        return _file_response(request, name, content, policy)

    return [Route("/", page, Action.CONSOLE_READ), Route("/web/{path:path}", file, Action.CONSOLE_READ)]


def _policy(index: bytes) -> str:
    """The content security policy: own files only, and the import map that stands in the page, by its hash."""
    found = _IMPORT_MAP.search(index)
    digest = base64.b64encode(hashlib.sha256(found[1] if found else b"").digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; media-src blob:; connect-src 'self'; font-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _file_response(request: Request, name: str, content: bytes, policy: str) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "ETag": tag,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    suffix = Path(name).suffix
    kind = _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "text/plain"
    return Response(content, headers=headers, media_type=kind)

"""`PageServer`: serves the console's page with the answers of a `LargeCluster`, without a broker.

For tests of the page at a size that no test machine can serve for real. What the real server answers is tested with it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tests.support.console.large_cluster import LargeCluster
from tests.support.waiting import wait_until

WEB = Path(__file__).parents[3] / "weir/console" / "web"


class PageServer:
    """A running server. `calls` counts the requests by path, `actions` has those that change something."""

    def __init__(self, cluster: LargeCluster) -> None:
        self.cluster = cluster
        self.allow_changes = False
        self.calls: dict[str, int] = {}
        self.actions: list[tuple[str, str, Any]] = []
        self.url = ""

    def app(self) -> Starlette:
        """The routes that the page uses."""
        cluster = self.cluster

        def answer(make: Callable[[Request], Any]) -> Callable[[Request], Any]:
            async def handle(request: Request) -> Response:
                path = request.url.path
                self.calls[path] = self.calls.get(path, 0) + 1
                document = make(request)
                if document is None:
                    return JSONResponse({"error": f"not found: {path}"}, 404)
                return JSONResponse(document)

            return handle

        async def act(request: Request) -> Response:
            assert request.headers["x-weir-console"] == "1"
            if not self.allow_changes:
                return JSONResponse({"error": "the console is read-only"}, 403)
            body = await request.body()
            self.actions.append((request.method, request.url.path, body.decode(errors="replace")))
            if request.url.path.startswith("/api/try/"):
                return JSONResponse(cluster.tried())
            if request.url.path.endswith("/rollback"):
                undone = {"number": 3, "kind": "traffic", "at_ms": cluster.started_ms}
                return JSONResponse({"undone": undone, "now": {"traffic": {"weights": {"1": 100.0}}}})
            return JSONResponse({})

        def query(request: Request, name: str) -> str:
            return request.query_params.get(name, "")

        page = (WEB / "index.html").read_text()
        (imports,) = re.findall(r'<script type="importmap">(.*?)</script>', page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(imports.encode()).digest()).decode()
        policy = (
            f"default-src 'self'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; "
            "img-src 'self' data: blob:; media-src blob:"
        )

        async def index(request: Request) -> Response:
            return FileResponse(WEB / "index.html", headers={"Content-Security-Policy": policy})

        return Starlette(
            routes=[
                Route("/", index),
                Route("/api/session", answer(lambda request: cluster.session(self.allow_changes))),
                Route("/api/status", answer(lambda request: cluster.status())),
                Route("/api/models", answer(lambda request: cluster.index())),
                Route("/api/models/{name}", answer(lambda request: cluster.model(request.path_params["name"]))),
                Route(
                    "/api/series",
                    answer(
                        lambda request: cluster.series(query(request, "model"), int(query(request, "since_ms") or 0))
                    ),
                ),
                Route(
                    "/api/batching",
                    answer(
                        lambda request: cluster.batching(query(request, "model"), int(query(request, "after") or 0))
                    ),
                ),
                Route("/api/requests", answer(lambda request: cluster.requests())),
                Route("/api/requests/{id:path}", answer(lambda request: cluster.request(request.path_params["id"]))),
                Route("/api/jobs", answer(lambda request: cluster.jobs())),
                Route("/api/jobs/{id}", answer(lambda request: cluster.job(request.path_params["id"]))),
                Route("/api/dead", answer(lambda request: cluster.dead())),
                Route("/api/dead/{seq:int}", answer(lambda request: cluster.letter(request.path_params["seq"]))),
                Route("/api/{rest:path}", act, methods=["POST", "PUT", "DELETE"]),
                Mount("/web", StaticFiles(directory=WEB)),
            ]
        )


@contextlib.contextmanager
def serving_page(cluster: LargeCluster) -> Iterator[PageServer]:
    """Serves the page on a free port of loopback while the block runs."""
    pages = PageServer(cluster)
    config = uvicorn.Config(pages.app(), host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        pages.url = f"http://127.0.0.1:{port}/"
        yield pages
    finally:
        server.should_exit = True
        thread.join(10)


def main() -> None:
    """Serves the page until Ctrl-C: `python -m tests.support.console.page_server`."""
    with serving_page(LargeCluster()) as pages, contextlib.suppress(KeyboardInterrupt):
        pages.allow_changes = True
        print(pages.url, flush=True)
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()

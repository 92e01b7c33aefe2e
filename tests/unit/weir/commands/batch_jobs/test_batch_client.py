"""`JobsClient`: responses of a jobs API become job descriptions, or errors for the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from weir.commands.batch_jobs.batch_client import JobsClient, Unreachable
from weir.errors import StartError


class Handler(BaseHTTPRequestHandler):
    response = (200, b"{}")
    received: ClassVar[list[tuple[str, str, bytes]]] = []

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.received.append((self.command, self.path, body))
        status, content = self.response
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def handler() -> Iterator[tuple[type[Handler], JobsClient]]:
    kind = type("OwnHandler", (Handler,), {"received": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield kind, JobsClient(f"http://127.0.0.1:{server.server_port}/prefix/")
        server.shutdown()


def test_requests_name_the_job_and_keep_the_prefix_of_the_url(handler: tuple[type[Handler], JobsClient]) -> None:
    kind, client = handler
    client.submit({"model": "m"})
    client.status("batch-1/2")
    client.control("batch-1", "pause")
    assert kind.received == [
        ("POST", "/prefix/v2/jobs", b'{"model": "m"}'),
        ("GET", "/prefix/v2/jobs/batch-1%2F2", b""),
        ("POST", "/prefix/v2/jobs/batch-1/pause", b""),
    ]


def test_a_list_holds_only_job_descriptions(handler: tuple[type[Handler], JobsClient]) -> None:
    kind, client = handler
    kind.response = 200, json.dumps({"jobs": [{"id": "a"}, "b", None]}).encode()
    assert client.list() == [{"id": "a"}]


@pytest.mark.parametrize(
    ("status", "content", "kind", "text"),
    [
        (503, b'{"error": "no worker"}', Unreachable, "no worker"),
        (404, b'{"error": "no such job"}', StartError, "no such job"),
        (500, b"{}", StartError, "HTTP status 500"),
        (200, b"<html>", StartError, "is not a Weir gateway"),
        (200, b"[]", StartError, "is not a Weir gateway"),
    ],
)
def test_a_failure_is_an_error_with_the_reason(
    handler: tuple[type[Handler], JobsClient], status: int, content: bytes, kind: type[Exception], text: str
) -> None:
    server, client = handler
    server.response = status, content
    with pytest.raises(kind, match=text):
        client.status("batch-1")


def test_a_server_without_a_listener_is_unreachable() -> None:
    with pytest.raises(Unreachable, match=r"^127\.0\.0\.1:1 is not reachable: "):
        JobsClient("127.0.0.1:1").list()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "host:port", "host:99999"])
def test_a_url_that_is_not_http_is_rejected(url: str) -> None:
    with pytest.raises(StartError, match="--url must be host:port, not"):
        JobsClient(url)

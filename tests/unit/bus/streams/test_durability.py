"""How the monitor of a nats-server is asked."""

from __future__ import annotations

import base64
import http.server
import threading

import pytest

from weir.bus.streams.durability import _fetch


def test_a_user_in_the_url_is_shown_to_the_monitor_and_in_no_error() -> None:
    shown: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers["Authorization"])
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        assert _fetch(f"http://user:h%40sh@127.0.0.1:{server.server_port}/jsz") == b"{}"
        serving.join()
        port = server.server_port
    assert shown == [f"Basic {base64.b64encode(b'user:h@sh').decode()}"]
    with pytest.raises(OSError, match="refused") as error:
        _fetch(f"http://user:hush@127.0.0.1:{port}/jsz")
    assert "hush" not in str(error.value)

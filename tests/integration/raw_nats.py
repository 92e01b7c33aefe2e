"""`publish_raw`: publishes what no NATS client library would, on a bare socket."""

from __future__ import annotations

import json
import socket
from urllib.parse import unquote, urlsplit


def publish_raw(url: str, *messages: tuple[bytes, bytes, bytes]) -> None:
    """Publishes messages of (subject, reply subject, data), and returns once nats-server has taken them."""
    where = urlsplit(url)
    assert where.hostname is not None
    options = {"verbose": False, "pedantic": False, "headers": True}
    if where.username:
        options |= {"user": unquote(where.username), "pass": unquote(where.password or "")}
    with socket.create_connection((where.hostname, where.port or 4222), timeout=10) as connection:
        lines = b"".join(
            b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(data), data) for subject, reply, data in messages
        )
        connection.sendall(b"CONNECT %b\r\n%bPING\r\n" % (json.dumps(options).encode(), lines))
        answered = b""
        while not answered.endswith(b"PONG\r\n"):
            more = connection.recv(65536)
            assert more, f"nats-server closed the connection: {answered[-200:]!r}"
            answered += more

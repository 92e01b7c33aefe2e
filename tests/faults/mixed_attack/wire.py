"""Raw protocol data for the attacks: HTTP/1.1, HTTP/2 frames, protobuf fields and NATS lines."""

from __future__ import annotations

import json
import socket
import struct
from urllib.parse import unquote, urlsplit

from hpack import Encoder

CHUNK_BYTES = 1 << 20

_MODEL_INFER = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
_FRAME_BYTES = 16_384
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW = 4


def connected(address: str, timeout_s: float) -> socket.socket:
    """A connection to "host:port"."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    connection.settimeout(timeout_s)
    return connection


def post(path: str, body: bytes, headers: str = "", announced_bytes: int | None = None) -> bytes:
    """A POST request; `announced_bytes` is its Content-Length, by default the size of the body."""
    size = len(body) if announced_bytes is None else announced_bytes
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {size}\r\n\r\n".encode("latin-1") + body
    )


def answer(connection: socket.socket) -> str:
    """The status of the next response, "closed" without one, "silence" after a time-out."""
    try:
        line = connection.recv(4096)
    except TimeoutError:
        return "silence"
    except OSError:
        return "closed"
    return line[9:12].decode("latin-1") if line.startswith(b"HTTP/1.1 ") else "closed" if not line else "other"


def infer_message(model: str, datatype: str, elements: int, content: bytes) -> bytes:
    """A ModelInferRequest, framed for gRPC, with one input that declares `elements` elements."""
    tensor = _field(1, b"INPUT0") + _field(2, datatype.encode()) + _field(3, _varint(1) + _varint(elements))
    message = _field(1, model.encode()) + _field(5, tensor) + _field(7, content)
    return b"\0" + struct.pack(">I", len(message)) + message


def http2_start(window_bytes: int | None = None) -> bytes:
    """The start of a connection; `window_bytes` is the initial window for each response."""
    settings = b"" if window_bytes is None else struct.pack(">HI", _INITIAL_WINDOW, window_bytes)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings)


def call_head() -> bytes:
    """The header block of a ModelInfer call."""
    return Encoder().encode(_MODEL_INFER)


def headers_frame(stream: int, block: bytes) -> bytes:
    """A HEADERS frame with a whole block, after which data follows."""
    return _frame(_HEADERS, _END_HEADERS, stream, block)


def send_call(connection: socket.socket, stream: int, message: bytes, encoding: str = "") -> None:
    """Send a whole ModelInfer call, compressed if `encoding` says so. Raises OSError if the server stops reading."""
    more = [("grpc-encoding", encoding)] if encoding else []
    connection.sendall(headers_frame(stream, Encoder().encode([*_MODEL_INFER, *more])))
    frames = []
    for start in range(0, len(message), _FRAME_BYTES):
        is_last = start + _FRAME_BYTES >= len(message)
        frames.append(_frame(_DATA, _END_STREAM if is_last else 0, stream, message[start : start + _FRAME_BYTES]))
        if len(frames) == CHUNK_BYTES // _FRAME_BYTES or is_last:
            connection.sendall(b"".join(frames))
            frames = []


def nats_connection(url: str, timeout_s: float) -> socket.socket:
    """A connection to nats-server, past CONNECT."""
    parts = urlsplit(url)
    connection = connected(f"{parts.hostname}:{parts.port}", timeout_s)
    connection.recv(65536)
    options: dict[str, object] = {"verbose": False, "pedantic": False, "headers": True}
    if parts.username:
        options |= {"user": unquote(parts.username), "pass": unquote(parts.password or "")}
    connection.sendall(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
    connection.recv(4096)
    return connection


def nats_pub(subject: bytes, reply: bytes, body: bytes) -> bytes:
    """A PUB line with its message."""
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(body), body)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _varint(number: int) -> bytes:
    encoded = b""
    while number > 127:
        encoded += bytes((number & 127 | 128,))
        number >>= 7
    return encoded + bytes((number,))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content

"""An HTTP/2 client for tests: a connection without a transport, or a socket, and frames by hand."""

import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hpack import Decoder, Encoder

from weir.gateway.http2.connection import Connection
from weir.gateway.http2.frames import PREFACE, Flag, FrameType, Setting, frame_head, settings
from weir.gateway.http2.headers import RequestHead, encode_headers
from weir.gateway.http2.options import Http2Options
from weir.gateway.http2.send_buffer import SendBuffer
from weir.gateway.http2.stream import Stream
from weir.runtime.memory_ledger import MemoryLedger

REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/echo"),
    (b":authority", b"here"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]
ANSWER = encode_headers([(b":status", b"200")])
TRAILERS = encode_headers([(b"grpc-status", b"0")])
GREETING = PREFACE + settings({})


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> bytes:
    return frame_head(len(payload), kind, flags, stream_id) + payload


def uint32(value: int) -> bytes:
    return struct.pack(">I", value)


def headers(stream_id: int, fields: Iterable[tuple[bytes, bytes]] = REQUEST, end: bool = False) -> bytes:
    flags = Flag.END_HEADERS | (Flag.END_STREAM if end else Flag.NONE)
    return frame(FrameType.HEADERS, flags, stream_id, encode_headers(fields))


def data(stream_id: int, payload: bytes, end: bool = False) -> bytes:
    return frame(FrameType.DATA, Flag.END_STREAM if end else 0, stream_id, payload)


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, uint32(increment))


def settings_frame(setting: Setting, value: int) -> bytes:
    return settings({setting: value})


class Cutter:
    """Splits what a server sent into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[tuple[int, int, int, bytes]]:
        """Type, flags, stream and payload of the frames that are complete."""
        received = self._rest + received
        frames = []
        at = 0
        while len(received) >= at + 9:
            length, stream_id = (int.from_bytes(received[at + a : at + b], "big") for a, b in ((0, 3), (5, 9)))
            if len(received) < at + 9 + length:
                break
            frames.append((received[at + 3], received[at + 4], stream_id, received[at + 9 : at + 9 + length]))
            at += 9 + length
        self._rest = received[at:]
        return frames


@dataclass
class Echo:
    """An exchange that echoes what it receives; a `silent` one never answers."""

    stream: Stream
    head: RequestHead
    received: bytearray = field(default_factory=bytearray)
    ended: bool = False
    closings: int = 0
    drainings: int = 0

    def begin(self) -> None:
        assert not self.received

    def receive(self, data: bytes | memoryview) -> None:
        assert not self.closings
        self.received += data

    def end(self) -> None:
        assert not self.ended
        self.ended = True
        if self.head.path == b"/echo":
            self.stream.send(ANSWER, (bytes(self.received),), TRAILERS)

    def drained(self) -> None:
        self.drainings += 1

    def check_progress(self, now_s: float) -> None:
        assert now_s

    def closed(self) -> None:
        self.closings += 1


@dataclass
class Echoes:
    """An application of echoes."""

    exchanges: list[Echo] = field(default_factory=list)

    def interpret(self, head: RequestHead) -> RequestHead:
        return head

    def open(self, stream: Stream, meaning: Any) -> Echo:
        self.exchanges.append(Echo(stream, meaning))
        return self.exchanges[-1]


class Peer:
    """The client's end of a connection without a transport."""

    def __init__(
        self, options: Http2Options | None = None, greet: bool = True, ledger: MemoryLedger | None = None
    ) -> None:
        self.now_s = 1000.0
        self.announced = 0
        self.application = Echoes()
        self.output = SendBuffer(self._count, None if ledger is None else ledger.account("peer"))
        self.connection = Connection(self.application, options or Http2Options(), lambda: self.now_s, self.output)
        self._cutter = Cutter()
        if greet:
            self.connection.receive(GREETING)
            self.take()

    def _count(self) -> None:
        self.announced += 1

    def take(self) -> list[tuple[int, int, int, bytes]]:
        """The frames that were sent until now: type, flags, stream, payload."""
        frames = []
        while self.announced:
            self.announced = 0
            frames += self._cutter.feed(b"".join(self.output.take()))
        return frames

    def send(self, *sent: bytes) -> list[tuple[int, int, int, bytes]]:
        """Sends bytes, and gives the connection all the turns it needs; returns the frames that come back."""
        self.give(*sent)
        return self.take()

    def give(self, *sent: bytes) -> None:
        """As `send`, but leaves the frames that come back to a later call."""
        self.connection.receive(b"".join(sent))
        while self.connection.is_behind:
            self.connection.proceed()

    def goaway_code(self) -> int | None:
        """The error that the connection was closed with."""
        return self.code_in(self.take())

    @staticmethod
    def code_in(received: list[tuple[int, int, int, bytes]]) -> int | None:
        """The error code of the last GOAWAY."""
        codes = [payload[4:8] for kind, _, _, payload in received if kind == FrameType.GOAWAY]
        return int.from_bytes(codes[-1], "big") if codes else None


class Wire:
    """A socket to a server, read and written in frames."""

    def __init__(self, port: int, greeting: bytes = GREETING) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.sendall(greeting)
        self._decoder = Decoder()
        self._encoder = Encoder()
        self._cutter = Cutter()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *sent: bytes) -> None:
        self.socket.sendall(b"".join(sent))

    def headers(self, stream_id: int, fields: list[tuple[bytes, bytes]], end: bool = False) -> None:
        """Sends a head, encoded as clients do it: with the dynamic table."""
        flags = Flag.END_HEADERS | (Flag.END_STREAM if end else Flag.NONE)
        self.send(frame(FrameType.HEADERS, flags, stream_id, self._encoder.encode(fields)))

    def read_until(self, wanted: FrameType, stream_id: int = 0, flags: int = 0) -> list[tuple[int, int, int, bytes]]:
        """Frames until one of this type and stream, with these flags."""
        frames = []
        while True:
            received = self.socket.recv(65536)
            if not received:
                raise EOFError(f"closed after {frames}")
            new = self._cutter.feed(received)
            frames += new
            if any(k == wanted and i == stream_id and f & flags == flags for k, f, i, _ in new):
                return frames

    def response(self, stream_id: int) -> tuple[dict[bytes, bytes], bytes]:
        """All header fields of a response, and its data."""
        fields: dict[bytes, bytes] = {}
        body = bytearray()
        for kind, _, got_id, payload in self.read_until(FrameType.HEADERS, stream_id, Flag.END_STREAM):
            if got_id == stream_id and kind == FrameType.HEADERS:
                fields.update(self._decoder.decode(payload, raw=True))
            elif got_id == stream_id and kind == FrameType.DATA:
                body += payload
        return fields, bytes(body)

    def is_closed(self) -> bool:
        """Whether the server closes the connection, whatever it sends before."""
        while True:
            try:
                if not self.socket.recv(65536):
                    return True
            except ConnectionResetError:
                return True

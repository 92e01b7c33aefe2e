"""`HttpClient`: a connection for each session, with requests that are encoded once.

An HTTP library would cost several times as much per request as sending prepared bytes and letting httptools, the parser of
the server, read the response; and the cost of the client is taken from the server where both share a machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import httptools
import orjson

from weir.perf.clients.addresses import ServerAddress
from weir.perf.clients.bodies import infer_body
from weir.perf.clients.session import Answer, CallFailed, SampleRequest
from weir.perf.load.sequences import SequenceStep
from weir.runtime.certificates import client_context

_MAX_KEPT_BODY_BYTES = 16 << 20

_Chunks = list[bytes | memoryview]


class HttpReply(NamedTuple):
    """A response: its status, its body (b"" if it was not asked for and the status is 200), and when it was complete."""

    status: int
    body: bytes
    end_s: float


class HttpConnection(asyncio.Protocol):
    """One HTTP/1.1 connection that has at most one request in flight, for up to `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._sent_s = 0.0
        # One timer for many requests: it is set again when it expires, not with each request.
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._reply: asyncio.Future[HttpReply] | None = None
        self._keeps_body = False
        self._body = bytearray()

    @classmethod
    async def open(cls, address: ServerAddress, timeout_s: float) -> HttpConnection:
        """Connects. Raises OSError, and TimeoutError after `timeout_s`."""
        context = client_context(address.pinned) if address.is_secure else None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                partial(cls, timeout_s), address.host, address.port, ssl=context
            )
        return connection

    @property
    def is_open(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, chunks: Sequence[bytes | memoryview], keeps_body: bool = False) -> HttpReply:
        """Sends a whole request and returns the response.

        Raises ConnectionError if the connection ends before it, TimeoutError if it does not come in time.
        """
        if self._transport is None:
            raise ConnectionError("the connection is closed")
        self._parser = httptools.HttpResponseParser(self)
        self._keeps_body = keeps_body
        self._body.clear()
        self._reply = self._loop.create_future()
        self._sent_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._expired)
        if len(chunks) == 1:
            self._transport.write(chunks[0])
        else:
            self._transport.writelines(chunks)
        return await self._reply

    def close(self) -> None:
        """Disconnects."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _expired(self) -> None:
        self._timer = None
        if self._reply is None or self._reply.done():
            return
        left_s = self._sent_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._expired)
        else:
            self._fail(TimeoutError())

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called when the connection stands."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        """Called with a part of a response."""
        if self._parser is None:
            self.close()  # bytes that no request asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the response is not HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Called when the connection has ended."""
        self.close()
        self._fail(ConnectionError(f"the server closed the connection{f': {error}' if error else ''}"))

    # httptools

    def on_body(self, body: bytes) -> None:
        """Called with a part of the body."""
        if (self._keeps_body or self._parser.get_status_code() != 200) and len(self._body) < _MAX_KEPT_BODY_BYTES:
            self._body += body

    def on_message_complete(self) -> None:
        """Called at the end of a response."""
        parser, self._parser = self._parser, None
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(HttpReply(parser.get_status_code(), bytes(self._body), time.perf_counter()))
        if not parser.should_keep_alive():
            self.close()

    def _fail(self, error: OSError) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)


def http_head(address: ServerAddress, method: str, path: str, headers: Mapping[str, str], length: int) -> bytes:
    """The head of a request with a body of `length` bytes. Raises ValueError for a header that is not one line."""
    rows = {"Host": str(address), **headers, "Content-Length": str(length)}
    wrong = next((name for name, value in rows.items() if not f"{name}{value}".isprintable() or ":" in name), None)
    if wrong is not None:
        raise ValueError(f"header {wrong!r} must be one line of printable characters")
    lines = "".join(f"{name}: {value}\r\n" for name, value in rows.items())
    return f"{method} {address.prefix}{path} HTTP/1.1\r\n{lines}\r\n".encode()


def error_text(reply: HttpReply) -> str:
    """The text of an error response: Triton's `{"error": ...}`, else what the body says."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(orjson.loads(reply.body)["error"])
    text = reply.body[:500].decode(errors="replace").strip()
    return f"HTTP status {reply.status}" + (f": {text}" if text else "")


class HttpClient:
    """Sends requests to `path` of a server; a request that takes longer than `timeout_s` has failed."""

    def __init__(self, address: ServerAddress, path: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._path = path
        self._headers = dict(headers)
        self._samples: Sequence[SampleRequest] = ()
        self._encoded: list[_Chunks] = []

    def load(self, samples: Sequence[SampleRequest]) -> None:
        """Encodes the samples."""
        self._samples = samples
        self._encoded = [self._encode(sample) for sample in samples]

    def load_bodies(self, bodies: Sequence[bytes]) -> None:
        """Sends these bodies, with the client's headers, in place of samples."""
        self._encoded = [
            [http_head(self.address, "POST", self._path, self._headers, len(body)) + body] for body in bodies
        ]

    def chunks(self, sample: int, step: SequenceStep | None) -> _Chunks:
        """The request as it is written."""
        return self._encoded[sample] if step is None else self._encode(self._samples[sample].at(step))

    def session(self) -> HttpSession:
        """A session with a connection of its own."""
        return HttpSession(self)

    async def close(self) -> None:
        """Does nothing: each session has its own connection."""

    def _encode(self, sample: SampleRequest) -> _Chunks:
        chunks, header_length = infer_body(sample)
        headers = self._headers | {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(header_length),
        }
        length = sum(map(len, chunks))
        head = http_head(self.address, "POST", self._path, headers, length) + chunks[0]
        return [head, *chunks[1:]]


class HttpSession:
    """One connection, opened when it is first used and after each failure."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._connection: HttpConnection | None = None

    async def infer(self, sample: int, step: SequenceStep | None) -> Answer:
        """Sends one request. Raises CallFailed."""
        reply = await self.exchange(self._client.chunks(sample, step))
        if reply.status != 200:
            raise CallFailed(error_text(reply))
        return Answer((reply.end_s,), reply.end_s)

    async def exchange(self, chunks: Sequence[bytes | memoryview], keeps_body: bool = False) -> HttpReply:
        """Sends any request and returns its response. Raises CallFailed without one."""
        connection = self._connection
        try:
            if connection is None or not connection.is_open:
                connection = await HttpConnection.open(self._client.address, self._client.timeout_s)
                self._connection = connection
            return await connection.exchange(chunks, keeps_body)
        except TimeoutError:
            self._drop()
            raise CallFailed(f"no response within {self._client.timeout_s:g} s") from None
        except OSError as error:
            self._drop()
            raise CallFailed(str(error) or type(error).__name__, is_connection=True) from error
        except asyncio.CancelledError:
            self._drop()
            raise

    async def close(self) -> None:
        """Disconnects."""
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

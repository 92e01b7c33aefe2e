"""`GrpcCall`: one gRPC call on an HTTP/2 stream, and `UnaryCall`, with one request and one response message.

A call ends in exactly one way: it succeeds, fails, or is cancelled by the client; `on_cancel` reports the last. Response
messages may be compressed. A thread compresses and decompresses large messages; the order of messages stays.
`CallMetadata` is the meaning of the headers of a call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weir.access.principal import NOBODY
from weir.calls.request_headers import deadline_ms_in
from weir.durable.api.options import read_preferences
from weir.gateway.access import OPEN, Access
from weir.gateway.grpc.guarded_call import GuardedCall
from weir.gateway.grpc.messages import (
    ENCODINGS,
    PREFIX_BYTES,
    Message,
    MessageDeflater,
    MessageInflation,
    MessageReader,
    accepted_encoding,
    message_prefix,
)
from weir.gateway.grpc.status import OK_TRAILERS, RESPONSE_HEADERS, CallError, Status, http_error
from weir.gateway.http2.connection import ADVERTISED_HEADER_LIST_BYTES
from weir.gateway.http2.headers import RequestHead
from weir.gateway.http2.stream import Stream
from weir.gateway.inflation import inflate
from weir.http_server.connection_memory import no_memory
from weir.http_server.stall_detection import StallDetector, StalledRequestError
from weir.runtime.containment import report
from weir.runtime.memory_ledger import Account
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import Parameters
from weir.telemetry.access_log import CallLine

_LEAST_BUFFER_BYTES = 64 * 1024 * 1024

_MESSAGE = "grpc"
_DECOMPRESSED = "decompressed"

_HUGE_PAGE_BYTES = 2 << 20
"""The memory that the first byte of a large message may occupy: numpy uses huge pages from twice this size on."""


class GrpcCall(GuardedCall):
    """The base of all kinds of calls: framing, deadline, status. Subclasses take messages in `on_message` and `end`.

    `limit` bounds a request message, in bytes. Received and decompressed bytes are charged to the account of the
    connection. `deadline_ms` is unix time, 0 without a deadline. `on_cancel`, if set, is called when the call ends without
    a response. A call is the `Exchange` of its stream.
    """

    __slots__ = (
        "_arrival",
        "_buffered_bytes",
        "_charged_bytes",
        "_deadline",
        "_deflater",
        "_expanded_bytes",
        "_has_begun",
        "_limit",
        "_reader",
        "_stream",
        "deadline_ms",
        "line",
        "on_cancel",
    )

    def __init__(self, stream: Stream, head: CallMetadata, limit: int) -> None:
        self._arrival: StallDetector | None = None
        self._buffered_bytes = 0  # announced
        self._charged_bytes = 0  # arrived
        self._expanded_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._deflater: MessageDeflater | None = None
        self._has_begun = False
        self._limit = limit
        self._reader: MessageReader | None = None
        self._stream = stream
        self.deadline_ms = 0
        self.gate = None
        self.head = head
        self.line: CallLine | None = None
        """The line of the call in the access log, if there is one."""
        self.refusal = None
        self.on_cancel: Callable[[], None] | None = None
        self.principal = NOBODY

    # The kind of call

    def on_message(self, message: Message | MessageInflation) -> None:
        """Takes a complete message of the request. Raises CallError if the message is not allowed."""
        raise NotImplementedError

    def end(self) -> None:
        """The request is complete."""
        raise NotImplementedError

    # Events of the stream

    def begin(self) -> None:
        """Implements `Exchange.begin`."""
        head = self.head
        refusal = self.refusal
        if head.rejection or refusal is not None:
            if self.line is not None:
                self.line.status = head.rejection_status if refusal is None or head.rejection else refusal.status
            self._stream.send(trailers=head.rejection or (b"" if refusal is None else refusal.response()))
        elif head.timeout_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(head.timeout_s, self._expire)
            self.deadline_ms = deadline_ms_in(head.timeout_s)

    def receive(self, data: bytes | memoryview) -> None:
        """Implements `Exchange.receive`."""
        if self.line is not None:
            self.line.bytes_in += len(data)
        try:
            if self._reader is None:
                # Most often a frame holds exactly one message.
                size = len(data) - PREFIX_BYTES
                if 0 <= size <= self._limit and data[:PREFIX_BYTES] == message_prefix(size):
                    self.on_message(bytes(data[PREFIX_BYTES:]))
                    return
                self._reader = MessageReader(self.head.encoding, self._limit, self._admit, self._arrive)
            for message in self._reader.feed(data):
                self.on_message(message)
        except CallError as error:
            self.fail(error)

    def drained(self) -> None:
        """Implements `Exchange.drained`."""

    def check_progress(self, now_s: float) -> None:
        """Fails the call with DEADLINE_EXCEEDED if a message of its request has stalled."""
        if not self._is_receiving or self._reader is None or self._reader.is_between_messages:
            self._arrival = None
            return
        if self._arrival is None:
            self._arrival = StallDetector()
        if self._arrival.is_stalled(now_s, self._reader.filled_bytes):
            self.fail(CallError.of(StalledRequestError()))

    @property
    def _is_receiving(self) -> bool:
        """Whether the client may send more of its request."""
        return True

    def closed(self) -> None:
        """Implements `Exchange.closed`."""
        if self.line is not None:
            self.line.write(self.principal)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._deflater is not None:
            self._deflater.close()
        if self._buffered_bytes or self._expanded_bytes:
            self._release_all()
        if self.on_cancel is not None:
            on_cancel, self.on_cancel = self.on_cancel, None
            on_cancel()

    # Responses

    def compress(self, level: int) -> None:
        """Compresses the following messages with zlib's `level` if the client accepts that."""
        if self.head.accepted_encoding:
            self._deflater = MessageDeflater(self.head.accepted_encoding, level, self._send_message, self.account)

    def send(self, *pieces: bytes, is_last: bool = False) -> None:
        """Sends a message, given in pieces; the last message ends the call with the status OK."""
        if is_last:
            self.on_cancel = None
        if self._deflater is None:
            self._send_message(0, pieces, is_last)
        elif not self._deflater.put(pieces, is_last):
            self.exhaust()

    def exhaust(self) -> None:
        """Ends the call because too many of its responses wait for the client."""
        self.fail(CallError(Status.RESOURCE_EXHAUSTED, "too many responses are not read", retry_after_s=1))

    def _send_message(self, flag: int, pieces: Sequence[bytes], is_last: bool) -> None:
        size = sum(map(len, pieces))
        if self.line is not None:
            self.line.bytes_out += size
            if is_last:
                self.line.status = Status.OK
        headers = b"" if self._has_begun else self._response_headers()
        message = (message_prefix(size, flag), *pieces)
        if self._stream.send(headers, message, OK_TRAILERS if is_last else b""):
            self._has_begun = True
        else:
            self.exhaust()

    def _response_headers(self) -> bytes:
        return RESPONSE_HEADERS["" if self._deflater is None else self.head.accepted_encoding]

    def fail(self, error: CallError) -> None:
        """Ends the call with the status of `error`."""
        if self.line is not None:
            self.line.status = error.status
        self._stream.send(trailers=error.trailers() if self._has_begun else error.response())

    def release(self, size: int) -> None:
        """Releases `size` announced bytes of received messages, and their charge."""
        charged_bytes = min(size, self._charged_bytes)
        self.account.release(_MESSAGE, charged_bytes)
        self._charged_bytes -= charged_bytes
        self._stream.connection.buffered_bytes -= size
        self._buffered_bytes -= size

    def _admit(self, size: int) -> None:
        # A connection holds at most the size of one largest request, or a fixed minimum.
        connection = self._stream.connection
        if connection.buffered_bytes + size > max(self._limit, _LEAST_BUFFER_BYTES):
            raise CallError(Status.RESOURCE_EXHAUSTED, "too many unfinished requests on this connection")
        if not self.account.fits(size, self):
            self.account.refuse(_MESSAGE)
            raise _no_memory()
        self._buffered_bytes += size
        connection.buffered_bytes += size

    def _arrive(self, filled_bytes: int, length_bytes: int) -> None:
        """Charges what has arrived of a message, by the memory that it occupies."""
        if length_bytes >= 2 * _HUGE_PAGE_BYTES:
            filled_bytes = min(length_bytes, -(-filled_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES)
        self._charge(filled_bytes - self._message_bytes)

    def _charge(self, size: int) -> None:
        if size > 0:
            if not self.account.charge(_MESSAGE, size, self, self._buffered_bytes):
                raise _no_memory()
            self._charged_bytes += size

    @property
    def _message_bytes(self) -> int:
        """The charge of the message that is arriving."""
        return self._charged_bytes

    @property
    def account(self) -> Account:
        """The account of the connection in the memory ledger."""
        return self._stream.connection.send_buffer.account

    @property
    def held_bytes(self) -> int:
        """What the request holds of the account."""
        return self._charged_bytes + self._expanded_bytes

    def charge_expanded(self, size: int) -> bool:
        """Charges `size` more decompressed bytes. Returns False if there is no room for them."""
        if not self.account.charge(_DECOMPRESSED, size, self):
            return False
        self._expanded_bytes += size
        return True

    def _release_all(self) -> None:
        self.release(self._buffered_bytes)
        self.release_expanded()

    def release_expanded(self) -> None:
        """Releases the charge of decompressed bytes."""
        self.account.release(_DECOMPRESSED, self._expanded_bytes)
        self._expanded_bytes = 0

    def _expire(self) -> None:
        self.fail(CallError(Status.DEADLINE_EXCEEDED, "Deadline Exceeded"))


class UnaryCall(GrpcCall):
    """A call with one request message, given to `serve` when complete. The call is in `open_calls` from then on."""

    __slots__ = ("_message", "_open_calls", "_serve", "keeps_received")

    def __init__(
        self,
        stream: Stream,
        head: CallMetadata,
        limit: int,
        serve: Callable[[UnaryCall, Message], None],
        open_calls: set[GrpcCall],
    ) -> None:
        super().__init__(stream, head, limit)
        self._message: Message | MessageInflation | None = None
        self._open_calls = open_calls
        self._serve = serve
        self.keeps_received = False
        """Set by a handler that keeps the message until it responds: the message stays charged until then."""

    def on_message(self, message: Message | MessageInflation) -> None:
        """Implements `GrpcCall.on_message`."""
        if self._message is not None:
            raise _not_one_message()
        self._message = message

    def end(self) -> None:
        """Implements `GrpcCall.end`."""
        message = self._message
        if message is None or (self._reader is not None and not self._reader.is_between_messages):
            self.fail(_not_one_message())
            return
        self._open_calls.add(self)
        if isinstance(message, MessageInflation):
            inflate_message(message, self.charge_expanded, self._on_inflated)
            return
        self._message = None
        self._serve_and_release(message)

    def _serve_and_release(self, message: Message) -> None:
        self._serve(self, message)
        if (self._buffered_bytes or self._expanded_bytes) and not self.keeps_received:
            self._release_all()

    def closed(self) -> None:
        """Implements `GrpcCall.closed`."""
        self._open_calls.discard(self)
        if isinstance(self._message, MessageInflation):
            self._message.is_wanted = False
        self._message = None
        super().closed()

    def _on_inflated(self, message: Message | CallError) -> None:
        self._message = None
        if self._stream.is_closed:
            return
        self.release(self._buffered_bytes)
        if isinstance(message, CallError):
            self.fail(message)
        else:
            self._serve_and_release(message)


def inflate_message(
    inflation: MessageInflation, charge: Callable[[int], bool], take: Callable[[Message | CallError], None]
) -> None:
    """Decompresses a message in threads, and calls `take` with the outcome in the event loop.

    `charge` is called with the growth of each step, and returns whether there is room for it.
    """

    def end(task: asyncio.Future[Message]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            take(task.result())
        elif isinstance(error, CallError):
            take(error)
        elif isinstance(error, Exception):
            report("weir.gateway.grpc.call: decompressing a message", error)
            take(CallError(Status.INTERNAL, "internal server error"))

    async def run() -> Message:
        await inflate(inflation, charge, _no_memory)
        return inflation.message()

    asyncio.get_running_loop().create_task(run()).add_done_callback(end)


def _no_memory() -> CallError:
    return CallError(Status.RESOURCE_EXHAUSTED, no_memory().message, retry_after_s=1)


def _not_one_message() -> CallError:
    return CallError(Status.UNIMPLEMENTED, "the method takes exactly one message")


_CONTENT_TYPE = re.compile(rb"application/grpc(?:[+;].*)?", re.IGNORECASE | re.DOTALL)
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_INFER_METHODS = (b"/ModelInfer", b"/ModelStreamInfer")
_PREFER = (b"prefer", b"weir-prefer")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class CallMetadata:
    """The method, at `path`, and the options of a call.

    `handler` is the handler of the method, None for an unknown method. `encoding` is the compression of request messages,
    `accepted_encoding` the preferred one for responses, "" for none. With `wants_grpc_errors` (`triton_grpc_error`) an
    error of one request ends the whole call. `timeout_s` is None for a call without a deadline. `rejection` is the header
    block of the response to an invalid call, otherwise empty. `forwarded` are the headers that become parameters of a
    request. `async_headers` are all headers of an asynchronous inference request, else None. `fields` has the last header
    of each name.
    """

    __slots__ = (
        "accepted_encoding",
        "async_headers",
        "encoding",
        "fields",
        "forwarded",
        "handler",
        "method",
        "path",
        "reads",
        "rejection",
        "rejection_status",
        "timeout_s",
        "traceparent",
        "tracestate",
        "wants_grpc_errors",
    )

    def __init__(self, head: RequestHead, handlers: Mapping[bytes, Any], access: Access = OPEN) -> None:
        self.fields = fields = dict(head.fields)
        self.handler: Any = handlers.get(head.path)
        self.path = head.path
        self.method = head.path.decode("latin-1").rpartition("/")[2]
        self.reads = self.method.startswith("Get") or self.method.endswith("Status")
        self.encoding = fields.get(b"grpc-encoding", b"identity").decode("latin-1")
        self.traceparent = fields.get(b"traceparent", b"").decode("latin-1")
        self.accepted_encoding = accepted_encoding(fields.get(b"grpc-accept-encoding", b"").decode("latin-1"))
        self.wants_grpc_errors = fields.get(b"triton_grpc_error") == b"true"
        self.tracestate = fields.get(b"tracestate", b"").decode("latin-1") if self.traceparent else ""
        self.timeout_s: float | None = None
        self.forwarded: Parameters = {}
        self.async_headers: Sequence[tuple[bytes, bytes]] | None = None
        self.rejection = b""
        self.rejection_status: int = Status.UNKNOWN  # what clients make of a status of HTTP
        if head.method != b"POST":
            self.rejection = http_error(405)
        elif not _CONTENT_TYPE.fullmatch(fields.get(b"content-type", b"")):
            self.rejection = http_error(415)
        else:
            try:
                self._check(head, fields)
                self._admit(head, access)
            except CallError as error:
                self.rejection, self.rejection_status = error.response(), error.status

    def _check(self, head: RequestHead, fields: dict[bytes, bytes]) -> None:
        if head.size_bytes > ADVERTISED_HEADER_LIST_BYTES:
            raise CallError(Status.RESOURCE_EXHAUSTED, "received metadata size exceeds the limit")
        if self.handler is None:
            raise CallError(Status.UNIMPLEMENTED, f"unknown method {head.path.decode('latin-1')}")
        if self.encoding not in ENCODINGS:
            raise CallError(Status.UNIMPLEMENTED, f"unknown compression '{self.encoding}'")
        timeout = fields.get(b"grpc-timeout")
        if timeout is not None:
            self.timeout_s = _seconds(timeout)

    def _admit(self, head: RequestHead, access: Access) -> None:
        # A head is interpreted once for all calls with the same head, so this costs most calls nothing.
        rejection = access.grpc_rejection(head.path, head.fields)
        if rejection:
            raise CallError(Status.UNAVAILABLE, rejection)
        if not head.path.endswith(_INFER_METHODS):
            return
        if head.path.endswith(b"/ModelInfer") and _wants_answer_later(head):
            self.async_headers = head.fields
        try:
            self.forwarded = access.grpc_parameters(head.fields)
        except WeirError as error:
            raise CallError.of(error) from None


def _wants_answer_later(head: RequestHead) -> bool:
    preferences = [value for name, value in head.fields if name in _PREFER]
    return bool(preferences) and read_preferences(preferences).respond_async


def _seconds(timeout: bytes) -> float:
    match = _TIMEOUT.fullmatch(timeout)
    if match is None:
        raise CallError(Status.INTERNAL, "malformed grpc-timeout")
    return int(match[1]) * _UNIT_S[match[2]]

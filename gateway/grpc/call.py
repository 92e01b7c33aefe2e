"""`GrpcCall`: one gRPC call on a stream of HTTP/2, and `UnaryCall`, which takes one message and answers with one.

A call ends in exactly one way: answered, failed, or given up by the client; whoever works for it is told of the last.
Messages of its response may be compressed; what would hold up the event loop for long is compressed, or expanded, in a
thread, and nothing overtakes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.deadlines import deadline_ms_in
from gateway.grpc.compression import Deflater, Inflation
from gateway.grpc.head import CallHead
from gateway.grpc.messages import PREFIX_BYTES, Message, MessageReader, message_prefix
from gateway.grpc.status import OK_TRAILERS, RESPONSE_HEADERS, CallError, Status
from gateway.http2.stream import Stream
from gateway.received_bytes import ReceivedBytes

logger = logging.getLogger("weir.gateway")

_LEAST_BUFFER_BYTES = 64 * 1024 * 1024

MAX_UNSENT_BYTES = 2**31
"""How much of its answers a connection may leave unread before the next one is not kept for it."""


class GrpcCall:
    """What all kinds of calls share: framing, deadline, status. A kind of call takes messages in `take` and `end`.

    `limit` bounds a request message, in bytes, and `received` those of all calls that are not complete. `deadline_ms` is
    unix time, 0 for a call without one. `on_cancel`, if set, is called when the call is over and was not answered. It is an
    `Exchange` of its stream.
    """

    __slots__ = (
        "_buffered_bytes",
        "_deadline",
        "_deflater",
        "_has_begun",
        "_limit",
        "_reader",
        "_received",
        "_stream",
        "deadline_ms",
        "head",
        "on_cancel",
    )

    def __init__(self, stream: Stream, head: CallHead, limit: int, received: ReceivedBytes) -> None:
        self._buffered_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._deflater: Deflater | None = None
        self._has_begun = False
        self._limit = limit
        self._reader: MessageReader | None = None
        self._received = received
        self._stream = stream
        self.deadline_ms = 0
        self.head = head
        self.on_cancel: Callable[[], None] | None = None

    # The kind of call

    def take(self, message: Message | Inflation) -> None:
        """A message of the request is complete. Raises CallError for one that should not be."""
        raise NotImplementedError

    def end(self) -> None:
        """The request is complete."""
        raise NotImplementedError

    # Events of the stream

    def begin(self) -> None:
        """See Exchange."""
        head = self.head
        if head.refusal:
            self._stream.send(trailers=head.refusal)
        elif head.timeout_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(head.timeout_s, self._expire)
            self.deadline_ms = deadline_ms_in(head.timeout_s)

    def receive(self, data: bytes | memoryview) -> None:
        """See Exchange."""
        try:
            if self._reader is None:
                # Most often a frame holds a message, and that's it.
                size = len(data) - PREFIX_BYTES
                if 0 <= size <= self._limit and data[:PREFIX_BYTES] == message_prefix(size):
                    self.take(bytes(data[PREFIX_BYTES:]))
                    return
                self._reader = MessageReader(self.head.encoding, self._limit, self._admit)
            for message in self._reader.feed(data):
                self.take(message)
        except CallError as error:
            self.fail(error)

    def drained(self) -> None:
        """See Exchange."""

    def closed(self) -> None:
        """See Exchange."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._deflater is not None:
            self._deflater.close()
        self.release(self._buffered_bytes)
        if self.on_cancel is not None:
            on_cancel, self.on_cancel = self.on_cancel, None
            on_cancel()

    # Answers

    def compress(self, level: int) -> None:
        """Has the messages to come compressed with zlib's `level`, where the client accepts that."""
        if self.head.accepted_encoding:
            self._deflater = Deflater(self.head.accepted_encoding, level, self._put_out)

    def send(self, *pieces: bytes, is_last: bool = False) -> None:
        """Sends a message, which is in one piece or several; the last one ends the call, with the status OK."""
        if is_last:
            self.on_cancel = None
        if self._deflater is None:
            self._put_out(0, pieces, is_last)
        else:
            self._deflater.put(pieces, is_last)

    def exhaust(self) -> None:
        """Ends the call: its client leaves too much unread."""
        self.fail(CallError(Status.RESOURCE_EXHAUSTED, "the answers on this connection are not being read"))

    def _put_out(self, flag: int, pieces: Sequence[bytes], is_last: bool) -> None:
        size = sum(map(len, pieces))
        output = self._stream.connection.output
        if output.unsent_bytes + size > MAX_UNSENT_BYTES and output.unsent_bytes:
            self.exhaust()
            return
        headers = b"" if self._has_begun else self._response_headers()
        self._has_begun = True
        self._stream.send(headers, (message_prefix(size, flag), *pieces), OK_TRAILERS if is_last else b"")

    def _response_headers(self) -> bytes:
        return RESPONSE_HEADERS["" if self._deflater is None else self.head.accepted_encoding]

    def fail(self, error: CallError) -> None:
        """Ends the call with the status of `error`; whoever works for it is told."""
        self._stream.send(trailers=error.trailers() if self._has_begun else error.response())

    def release(self, size: int) -> None:
        """`size` bytes of what was received are done with, as far as the bound on it is concerned."""
        self._received.give_back(size)
        self._stream.connection.buffered_bytes -= size
        self._buffered_bytes -= size

    def _admit(self, size: int) -> None:
        # All that a connection holds of requests is at most one of the largest, unless that is small.
        connection = self._stream.connection
        if connection.buffered_bytes + size > max(self._limit, _LEAST_BUFFER_BYTES):
            raise CallError(Status.RESOURCE_EXHAUSTED, "too many unfinished requests on this connection")
        if not self._received.take(size):
            raise CallError(Status.RESOURCE_EXHAUSTED, "too many unfinished requests", retry_after_s=1)
        self._buffered_bytes += size
        connection.buffered_bytes += size

    def _expire(self) -> None:
        self.fail(CallError(Status.DEADLINE_EXCEEDED, "Deadline Exceeded"))


class UnaryCall(GrpcCall):
    """A call with one message, given to `serve` when the request is complete; it is in `open_calls` from then on."""

    __slots__ = ("_message", "_open_calls", "_serve")

    def __init__(
        self,
        stream: Stream,
        head: CallHead,
        limit: int,
        received: ReceivedBytes,
        serve: Callable[[UnaryCall, Message], None],
        open_calls: set[GrpcCall],
    ) -> None:
        super().__init__(stream, head, limit, received)
        self._message: Message | Inflation | None = None
        self._open_calls = open_calls
        self._serve = serve

    def take(self, message: Message | Inflation) -> None:
        """See GrpcCall."""
        if self._message is not None:
            raise _not_one_message()
        self._message = message

    def end(self) -> None:
        """See GrpcCall."""
        message = self._message
        if message is None or (self._reader is not None and not self._reader.is_between_messages):
            self.fail(_not_one_message())
            return
        self._open_calls.add(self)
        if isinstance(message, Inflation):
            inflate(message, self._take_inflated)
            return
        self._message = None
        self.release(self._buffered_bytes)
        self._serve(self, message)

    def closed(self) -> None:
        """See GrpcCall."""
        self._open_calls.discard(self)
        if isinstance(self._message, Inflation):
            self._message.is_wanted = False
        super().closed()

    def _take_inflated(self, message: Message | CallError) -> None:
        if self._stream.is_closed:
            return
        self._message = None
        self.release(self._buffered_bytes)
        if isinstance(message, CallError):
            self.fail(message)
        else:
            self._serve(self, message)


def inflate(inflation: Inflation, take: Callable[[Message | CallError], None]) -> None:
    """Expands a message in a thread; `take` is told the outcome, in the event loop."""

    def end(job: asyncio.Future[bytes]) -> None:
        if not job.cancelled():
            error = job.exception()
            if error is not None and not isinstance(error, CallError):
                logger.error("a message could not be expanded", exc_info=error)
                error = CallError(Status.INTERNAL, "internal server error")
            take(job.result() if error is None else error)

    asyncio.get_running_loop().run_in_executor(None, inflation.run).add_done_callback(end)


def _not_one_message() -> CallError:
    return CallError(Status.UNIMPLEMENTED, "the method takes exactly one message")

"""`GrpcCall`: one gRPC call on a stream of HTTP/2, and `UnaryCall`, which takes one message and answers with one.

A call ends in exactly one way: answered, failed, or given up by the client; whoever works for it is told of the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.grpc.head import CallHead
from gateway.grpc.messages import PREFIX_BYTES, Message, MessageReader, message_prefix
from gateway.grpc.status import OK_TRAILERS, RESPONSE_HEADERS, CallError, Status
from gateway.http2.stream import Stream

_LEAST_BUFFER_BYTES = 64 * 1024 * 1024

MAX_UNSENT_BYTES = 2**31
"""How much of its answers a connection may leave unread before the next one is not kept for it."""


class GrpcCall:
    """What all kinds of calls share: framing, deadline, status. A kind of call takes messages in `take` and `end`.

    `limit` bounds a request message, in bytes. `on_cancel`, if set, is called when the call is over and was not
    answered. It is an `Exchange` of its stream.
    """

    __slots__ = ("_buffered_bytes", "_deadline", "_has_begun", "_limit", "_reader", "_stream", "head", "on_cancel")

    def __init__(self, stream: Stream, head: CallHead, limit: int) -> None:
        self._buffered_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._limit = limit
        self._reader: MessageReader | None = None
        self._stream = stream
        self.head = head
        self.on_cancel: Callable[[], None] | None = None

    # The kind of call

    def take(self, message: Message) -> None:
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

    def closed(self) -> None:
        """See Exchange."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.release()
        if self.on_cancel is not None:
            on_cancel, self.on_cancel = self.on_cancel, None
            on_cancel()

    # Answers

    def send(self, message: bytes, is_last: bool = False) -> None:
        """Sends a message; the last one ends the call, with the status OK."""
        output = self._stream.connection.output
        if output.unsent_bytes + len(message) > MAX_UNSENT_BYTES and output.unsent_bytes:
            self.fail(CallError(Status.RESOURCE_EXHAUSTED, "the answers on this connection are not being read"))
            return
        headers = b"" if self._has_begun else RESPONSE_HEADERS
        self._has_begun = True
        if is_last:
            self.on_cancel = None
        data = (message_prefix(len(message)), message)
        self._stream.send(headers, data, OK_TRAILERS if is_last else b"")

    def fail(self, error: CallError) -> None:
        """Ends the call with the status of `error`; whoever works for it is told."""
        self._stream.send(trailers=error.trailers() if self._has_begun else error.response())

    def release(self) -> None:
        """What was received is done with, as far as the bound on it is concerned."""
        self._stream.connection.buffered_bytes -= self._buffered_bytes
        self._buffered_bytes = 0

    def _admit(self, size: int) -> None:
        # All that a connection holds of requests is at most one of the largest, unless that is small.
        connection = self._stream.connection
        if connection.buffered_bytes + size > max(self._limit, _LEAST_BUFFER_BYTES):
            raise CallError(Status.RESOURCE_EXHAUSTED, "too many unfinished requests on this connection")
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
        serve: Callable[[UnaryCall, Message], None],
        open_calls: set[UnaryCall],
    ) -> None:
        super().__init__(stream, head, limit)
        self._message: Message | None = None
        self._open_calls = open_calls
        self._serve = serve

    def take(self, message: Message) -> None:
        """See GrpcCall."""
        if self._message is not None:
            raise _not_one_message()
        self._message = message

    def end(self) -> None:
        """See GrpcCall."""
        message, self._message = self._message, None
        if message is None or (self._reader is not None and not self._reader.is_between_messages):
            self.fail(_not_one_message())
            return
        self.release()
        self._open_calls.add(self)
        self._serve(self, message)

    def closed(self) -> None:
        """See GrpcCall."""
        self._open_calls.discard(self)
        super().closed()


def _not_one_message() -> CallError:
    return CallError(Status.UNIMPLEMENTED, "the method takes exactly one message")

"""`StreamCall`: a call with any number of messages each way, and `StreamHandler`, the interface of its handler.

A handler that is busy puts its call on hold. The client can then send no more than its window, which waits unread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from weir.gateway.grpc.call import CallMetadata, GrpcCall, inflate_message
from weir.gateway.grpc.messages import PREFIX_BYTES, Message, MessageInflation, MessageReader, message_prefix
from weir.gateway.grpc.status import OK_TRAILERS, CallError, Status, call_error
from weir.gateway.http2.frames import Http2ErrorCode
from weir.gateway.http2.stream import Stream


class StreamHandler(Protocol):
    """The handler of one streaming call. A WeirError or CallError that it raises ends the call with that status."""

    def on_message(self, message: Message) -> None:
        """The next message of the client."""

    def end(self) -> None:
        """The client sends no more."""

    def drain(self) -> None:
        """The server is stopping: the handler starts nothing new, and ends the call when nothing is left to do."""

    def drained(self) -> None:
        """The client has received everything that was sent."""

    def closed(self) -> None:
        """Called once: the call is over. The handler cancels its pending work."""


class StreamCall(GrpcCall):
    """One streaming call, in `open_calls` until it is over. `make_handler` may raise WeirError to reject the call.

    While `is_on_hold`, the handler gets no messages. `is_draining` is set when the server is stopping.
    """

    __slots__ = (
        "_backlog",
        "_backlog_bytes",
        "_handler",
        "_inflation",
        "_is_complete",
        "_is_over",
        "_make_handler",
        "_messages",
        "_open_calls",
        "is_draining",
        "is_on_hold",
    )

    def __init__(
        self,
        stream: Stream,
        head: CallMetadata,
        limit: int,
        make_handler: Callable[[StreamCall], StreamHandler],
        open_calls: set[GrpcCall],
    ) -> None:
        super().__init__(stream, head, limit)
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._handler: StreamHandler | None = None
        self._make_handler = make_handler
        self._inflation: MessageInflation | None = None
        self._is_complete = False
        self._is_over = False
        self._messages: Iterator[Message | MessageInflation] = iter(())
        self._open_calls = open_calls
        self.is_draining = False
        self.is_on_hold = False

    # Events of the stream

    def begin(self) -> None:
        """Implements `Exchange.begin`."""
        super().begin()
        if not self._stream.is_closed:
            self._open_calls.add(self)
            self._guard(self._start)

    def receive(self, data: bytes | memoryview) -> None:
        """Implements `Exchange.receive`."""
        if self.line is not None:
            self.line.bytes_in += len(data)
        if not self._is_over:
            self._guard(self._hold_back if self._is_waiting else self._read, data)

    def end(self) -> None:
        """Implements `Exchange.end`."""
        self._is_complete = True
        if not self._is_waiting and not self._is_over:
            self._guard(self._end)

    def drained(self) -> None:
        """Implements `Exchange.drained`."""
        # In a turn of its own, not while the connection sends.
        asyncio.get_running_loop().call_soon(self._notify_drained)

    def closed(self) -> None:
        """Implements `Exchange.closed`."""
        self._open_calls.discard(self)
        self._end_handler()
        super().closed()

    # Called by the handler

    @property
    def is_closed(self) -> bool:
        """Whether the call is over: nothing more can be sent. The client may not have received everything yet."""
        return self._is_over

    @property
    def unsent_bytes(self) -> int:
        """How much of what was sent still waits for the client."""
        return self._stream.unsent_bytes + (0 if self._deflater is None else self._deflater.waiting_bytes)

    def compress(self, level: int) -> None:
        """Implements `GrpcCall.compress`."""
        super().compress(level)
        if self._deflater is not None:
            self._deflater.on_idle = self._notify_drained

    def hold(self) -> None:
        """Passes no more messages to the handler, until `resume`."""
        self.is_on_hold = True
        self._stream.hold()

    def resume(self) -> None:
        """Passes messages to the handler again."""
        self.is_on_hold = False
        if not self._is_waiting:
            self._guard(self._resume_messages)

    def send(self, *pieces: bytes, is_last: bool = False) -> None:
        """Implements `GrpcCall.send`."""
        if not self._is_over:
            super().send(*pieces, is_last=is_last)

    def finish(self) -> None:
        """Ends the call with the status OK, after what was sent."""
        self._end_handler()
        if self._deflater is not None and self._deflater.is_busy:
            self._deflater.on_idle = self._send_trailers
        else:
            self._send_trailers()

    def fail(self, error: CallError) -> None:
        """Implements `GrpcCall.fail`. The status follows what was sent before, however slowly the client reads that."""
        self._end_handler()
        super().fail(error)

    def exhaust(self) -> None:
        """Implements `GrpcCall.exhaust`. Drops what waits to be sent; clients report this reset as RESOURCE_EXHAUSTED."""
        if self.line is not None:
            self.line.status = Status.RESOURCE_EXHAUSTED
        self._stream.reset(Http2ErrorCode.ENHANCE_YOUR_CALM)

    def drain(self) -> None:
        """The server is stopping."""
        self.is_draining = True
        if self._handler is not None and not self._is_over:
            self._handler.drain()

    def _end_handler(self) -> None:
        """Ends the handler, once."""
        if self._is_over:
            return
        self._is_over = True
        self._stream.hold()
        self._backlog.clear()
        self._messages = iter(())
        if self._inflation is not None:
            self._inflation.is_wanted = False
        if self._handler is not None:
            self._handler.closed()

    # Messages

    def on_message(self, message: Message | MessageInflation) -> None:
        """Implements `GrpcCall.on_message`."""
        if isinstance(message, MessageInflation):
            self._inflation = message
            self._stream.hold()
            inflate_message(message, self.charge_expanded, self._on_inflated)
        elif self._handler is not None:
            self._handler.on_message(message)

    @property
    def _message_bytes(self) -> int:
        return self._charged_bytes - self._backlog_bytes

    @property
    def _is_receiving(self) -> bool:
        return not (self._is_waiting or self._is_over)

    @property
    def _is_waiting(self) -> bool:
        return self.is_on_hold or self._inflation is not None

    def _start(self) -> None:
        self._handler = self._make_handler(self)

    def _read(self, data: bytes | memoryview) -> None:
        if self._reader is None or self._reader.is_between_messages:
            # Most often a frame holds exactly one message.
            size = len(data) - PREFIX_BYTES
            if 0 <= size <= self._limit and data[:PREFIX_BYTES] == message_prefix(size):
                self.on_message(bytes(data[PREFIX_BYTES:]))
                return
        if self._reader is None:
            self._reader = MessageReader(self.head.encoding, self._limit, self._admit, self._arrive)
        self._messages = self._reader.feed(data)
        self._pass_messages()

    def _pass_messages(self) -> None:
        for message in self._messages:
            self.release(self._buffered_bytes - self._backlog_bytes)
            self.on_message(message)
            if self._is_waiting or self.is_closed:
                return

    def _hold_back(self, data: bytes | memoryview) -> None:
        self._admit(len(data))
        self._charge(len(data))
        self._backlog.append(bytes(data))
        self._backlog_bytes += len(data)

    def _resume_messages(self) -> None:
        self._pass_messages()
        while self._backlog and not self._is_waiting and not self.is_closed:
            data = self._backlog.popleft()
            self._backlog_bytes -= len(data)
            self.release(len(data))
            self._read(data)
        if self._is_waiting or self.is_closed:
            return
        self._stream.resume()
        if self._is_complete:
            self._end()

    def _on_inflated(self, message: Message | CallError) -> None:
        self._inflation = None
        if self.is_closed:
            return
        if isinstance(message, CallError):
            self.fail(message)
            return
        self._guard(self.on_message, message)
        self.release_expanded()
        if not self._is_waiting:
            self._guard(self._resume_messages)

    def _end(self) -> None:
        if self._reader is not None and not self._reader.is_between_messages:
            raise CallError(Status.INTERNAL, "the last message is not complete")
        if self._handler is not None:
            self._handler.end()

    def _notify_drained(self) -> None:
        if self._handler is not None and not self.is_closed:
            self._guard(self._handler.drained)

    def _send_trailers(self) -> None:
        if self.line is not None:
            self.line.status = Status.OK
        headers = b"" if self._has_begun else self._response_headers()
        self._stream.send(headers, trailers=OK_TRAILERS)

    def _guard(self, step: Callable[..., None], *arguments: Any) -> None:
        """Runs a step of the handler; an error ends the call."""
        try:
            step(*arguments)
        except Exception as error:  # noqa: BLE001 - those without a status are reported
            self.fail(call_error(error, "weir.gateway.grpc.stream_call: handling a call"))

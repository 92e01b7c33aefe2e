"""`StreamCall`: a call with any number of messages each way, and the `Conversation` that takes and sends them.

A conversation that has enough to do puts its call on hold. The client can then send no more than it was granted, which
waits unread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from gateway.grpc.call import GrpcCall, inflate
from gateway.grpc.compression import Inflation
from gateway.grpc.head import CallHead
from gateway.grpc.messages import PREFIX_BYTES, Message, MessageReader, message_prefix
from gateway.grpc.status import OK_TRAILERS, CallError, Status
from gateway.http2.faults import FaultCode
from gateway.http2.stream import Stream
from runtime.containment import report
from schemas.errors import WeirError


class Conversation(Protocol):
    """What happens in one call. What it raises as WeirError or CallError ends the call with that status."""

    def take(self, message: Message) -> None:
        """The next message of the client."""

    def end(self) -> None:
        """The client sends no more."""

    def drain(self) -> None:
        """The server is stopping: nothing new is to be begun, and the call is to end when nothing is left to do."""

    def drained(self) -> None:
        """The client has taken all that was sent."""

    def closed(self) -> None:
        """Called once: the call is over. What is being done for it is to be given up."""


class StreamCall(GrpcCall):
    """See the module. It is in `open_calls` until it is over. `converse` may raise WeirError to refuse the call.

    `is_on_hold` says that no messages are given to the conversation, `is_draining` that the server is stopping.
    """

    __slots__ = (
        "_backlog",
        "_backlog_bytes",
        "_conversation",
        "_converse",
        "_inflation",
        "_is_complete",
        "_is_over",
        "_messages",
        "_open_calls",
        "is_draining",
        "is_on_hold",
    )

    def __init__(
        self,
        stream: Stream,
        head: CallHead,
        limit: int,
        converse: Callable[[StreamCall], Conversation],
        open_calls: set[GrpcCall],
    ) -> None:
        super().__init__(stream, head, limit)
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._conversation: Conversation | None = None
        self._converse = converse
        self._inflation: Inflation | None = None
        self._is_complete = False
        self._is_over = False
        self._messages: Iterator[Message | Inflation] = iter(())
        self._open_calls = open_calls
        self.is_draining = False
        self.is_on_hold = False

    # Events of the stream

    def begin(self) -> None:
        """See Exchange."""
        super().begin()
        if not self._stream.is_closed:
            self._open_calls.add(self)
            self._guard(self._start)

    def receive(self, data: bytes | memoryview) -> None:
        """See Exchange."""
        if not self._is_over:
            self._guard(self._keep if self._is_waiting else self._read, data)

    def end(self) -> None:
        """See Exchange."""
        self._is_complete = True
        if not self._is_waiting and not self._is_over:
            self._guard(self._end)

    def drained(self) -> None:
        """See Exchange."""
        # Not from within the connection's sending.
        asyncio.get_running_loop().call_soon(self._tell_drained)

    def closed(self) -> None:
        """See Exchange."""
        self._open_calls.discard(self)
        self._leave()
        super().closed()

    # What the conversation asks of its call

    @property
    def is_closed(self) -> bool:
        """Whether the call is over: nothing can be sent, though the client may not have taken all that was."""
        return self._is_over

    @property
    def unsent_bytes(self) -> int:
        """How much of what was sent waits here for the client to take it."""
        return self._stream.unsent_bytes + (0 if self._deflater is None else self._deflater.waiting_bytes)

    def compress(self, level: int) -> None:
        """See GrpcCall."""
        super().compress(level)
        if self._deflater is not None:
            self._deflater.on_idle = self._tell_drained

    def hold(self) -> None:
        """Gives no more messages to the conversation, until `go_on`."""
        self.is_on_hold = True
        self._stream.hold()

    def go_on(self) -> None:
        """Gives messages to the conversation again."""
        self.is_on_hold = False
        if not self._is_waiting:
            self._guard(self._catch_up)

    def send(self, *pieces: bytes, is_last: bool = False) -> None:
        """See GrpcCall."""
        if not self._is_over:
            super().send(*pieces, is_last=is_last)

    def finish(self) -> None:
        """Ends the call with the status OK, after what was sent."""
        self._leave()
        if self._deflater is not None and self._deflater.is_busy:
            self._deflater.on_idle = self._put_out_end
        else:
            self._put_out_end()

    def fail(self, error: CallError) -> None:
        """See GrpcCall. The status comes after what was sent, however late the client takes that."""
        self._leave()
        super().fail(error)

    def exhaust(self) -> None:
        """See GrpcCall; clients take this reset for RESOURCE_EXHAUSTED. What waits to be sent is forgotten."""
        self._stream.reset(FaultCode.ENHANCE_YOUR_CALM)

    def drain(self) -> None:
        """The server is stopping."""
        self.is_draining = True
        if self._conversation is not None and not self._is_over:
            self._conversation.drain()

    def _leave(self) -> None:
        """Tells the conversation that it is over, once."""
        if self._is_over:
            return
        self._is_over = True
        self._stream.hold()
        self._backlog.clear()
        self._messages = iter(())
        if self._inflation is not None:
            self._inflation.is_wanted = False
        if self._conversation is not None:
            self._conversation.closed()

    # Messages

    def take(self, message: Message | Inflation) -> None:
        """See GrpcCall."""
        if isinstance(message, Inflation):
            self._inflation = message
            self._stream.hold()
            inflate(message, self.charge_expanded, self._take_inflated)
        elif self._conversation is not None:
            self._conversation.take(message)

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
        self._conversation = self._converse(self)

    def _read(self, data: bytes | memoryview) -> None:
        if self._reader is None or self._reader.is_between_messages:
            # Most often a frame holds a message, and that's it.
            size = len(data) - PREFIX_BYTES
            if 0 <= size <= self._limit and data[:PREFIX_BYTES] == message_prefix(size):
                self.take(bytes(data[PREFIX_BYTES:]))
                return
        if self._reader is None:
            self._reader = MessageReader(self.head.encoding, self._limit, self._admit, self._arrive)
        self._messages = self._reader.feed(data)
        self._take_messages()

    def _take_messages(self) -> None:
        for message in self._messages:
            self.release(self._buffered_bytes - self._backlog_bytes)
            self.take(message)
            if self._is_waiting or self.is_closed:
                return

    def _keep(self, data: bytes | memoryview) -> None:
        self._admit(len(data))
        self._charge(len(data))
        self._backlog.append(bytes(data))
        self._backlog_bytes += len(data)

    def _catch_up(self) -> None:
        self._take_messages()
        while self._backlog and not self._is_waiting and not self.is_closed:
            data = self._backlog.popleft()
            self._backlog_bytes -= len(data)
            self.release(len(data))
            self._read(data)
        if self._is_waiting or self.is_closed:
            return
        self._stream.go_on()
        if self._is_complete:
            self._end()

    def _take_inflated(self, message: Message | CallError) -> None:
        self._inflation = None
        if self.is_closed:
            return
        if isinstance(message, CallError):
            self.fail(message)
            return
        self._guard(self.take, message)
        self.release_expanded()
        if not self._is_waiting:
            self._guard(self._catch_up)

    def _end(self) -> None:
        if self._reader is not None and not self._reader.is_between_messages:
            raise CallError(Status.INTERNAL, "the last message is not complete")
        if self._conversation is not None:
            self._conversation.end()

    def _tell_drained(self) -> None:
        if self._conversation is not None and not self.is_closed:
            self._guard(self._conversation.drained)

    def _put_out_end(self) -> None:
        headers = b"" if self._has_begun else self._response_headers()
        self._stream.send(headers, trailers=OK_TRAILERS)

    def _guard(self, step: Callable[..., None], *arguments: Any) -> None:
        """Takes a step of the conversation; what goes wrong ends the call."""
        try:
            step(*arguments)
        except CallError as error:
            self.fail(error)
        except WeirError as error:
            self.fail(CallError.of(error))
        except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
            report("gateway.grpc.stream_call: handling a call", error)
            self.fail(CallError(Status.INTERNAL, "internal server error"))

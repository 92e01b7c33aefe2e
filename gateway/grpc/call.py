"""`GrpcCall`: one gRPC call on a stream of HTTP/2, and `UnaryCall`, which takes one message and answers with one.

A call ends in exactly one way: answered, failed, or given up by the client; whoever works for it is told of the last.
Messages of its response may be compressed; what would hold up the event loop for long is compressed, or expanded, in a
thread, and nothing overtakes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway.connection_memory import no_memory
from gateway.deadlines import deadline_ms_in
from gateway.grpc.compression import Deflater, Inflation
from gateway.grpc.head import CallHead
from gateway.grpc.messages import PREFIX_BYTES, Message, MessageReader, message_prefix
from gateway.grpc.status import OK_TRAILERS, RESPONSE_HEADERS, CallError, Status
from gateway.http2.stream import Stream
from gateway.progress import Progress, StalledRequest
from runtime.containment import report
from runtime.memory_ledger import Account

_LEAST_BUFFER_BYTES = 64 * 1024 * 1024

_MESSAGE = "grpc"
_DECOMPRESSED = "decompressed"

_HUGE_PAGE_BYTES = 2 << 20
"""So much memory the first byte of a large message may take up: numpy asks for huge pages from twice this size on."""


class GrpcCall:
    """What all kinds of calls share: framing, deadline, status. A kind of call takes messages in `take` and `end`.

    `limit` bounds a request message, in bytes. What arrives of one, and what it is expanded to, is charged to the account
    of the connection. `deadline_ms` is unix time, 0 for a call without one. `on_cancel`, if set, is called when the call is
    over and was not answered. It is an `Exchange` of its stream.
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
        "head",
        "on_cancel",
    )

    def __init__(self, stream: Stream, head: CallHead, limit: int) -> None:
        self._arrival: Progress | None = None
        self._buffered_bytes = 0  # announced
        self._charged_bytes = 0  # arrived
        self._expanded_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._deflater: Deflater | None = None
        self._has_begun = False
        self._limit = limit
        self._reader: MessageReader | None = None
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
                self._reader = MessageReader(self.head.encoding, self._limit, self._admit, self._arrive)
            for message in self._reader.feed(data):
                self.take(message)
        except CallError as error:
            self.fail(error)

    def drained(self) -> None:
        """See Exchange."""

    def check_progress(self, now_s: float) -> None:
        """Fails the call with DEADLINE_EXCEEDED if a message of its request has stalled."""
        if not self._is_receiving or self._reader is None or self._reader.is_between_messages:
            self._arrival = None
            return
        if self._arrival is None:
            self._arrival = Progress()
        if self._arrival.is_stalled(now_s, self, self._reader.filled_bytes):
            self.fail(CallError.of(StalledRequest()))

    @property
    def _is_receiving(self) -> bool:
        """Whether the client may send more of its request."""
        return True

    def closed(self) -> None:
        """See Exchange."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._deflater is not None:
            self._deflater.close()
        if self._buffered_bytes or self._expanded_bytes:
            self._release_all()
        if self.on_cancel is not None:
            on_cancel, self.on_cancel = self.on_cancel, None
            on_cancel()

    # Answers

    def compress(self, level: int) -> None:
        """Has the messages to come compressed with zlib's `level`, where the client accepts that."""
        if self.head.accepted_encoding:
            self._deflater = Deflater(self.head.accepted_encoding, level, self._put_out, self.account)

    def send(self, *pieces: bytes, is_last: bool = False) -> None:
        """Sends a message, which is in one piece or several; the last one ends the call, with the status OK."""
        if is_last:
            self.on_cancel = None
        if self._deflater is None:
            self._put_out(0, pieces, is_last)
        elif not self._deflater.put(pieces, is_last):
            self.exhaust()

    def exhaust(self) -> None:
        """Ends the call: its client leaves too much unread."""
        self.fail(CallError(Status.RESOURCE_EXHAUSTED, "too many responses are not read", retry_after_s=1))

    def _put_out(self, flag: int, pieces: Sequence[bytes], is_last: bool) -> None:
        size = sum(map(len, pieces))
        headers = b"" if self._has_begun else self._response_headers()
        message = (message_prefix(size, flag), *pieces)
        if self._stream.send(headers, message, OK_TRAILERS if is_last else b""):
            self._has_begun = True
        else:
            self.exhaust()

    def _response_headers(self) -> bytes:
        return RESPONSE_HEADERS["" if self._deflater is None else self.head.accepted_encoding]

    def fail(self, error: CallError) -> None:
        """Ends the call with the status of `error`; whoever works for it is told."""
        self._stream.send(trailers=error.trailers() if self._has_begun else error.response())

    def release(self, size: int) -> None:
        """`size` announced bytes of what was received are done with, and what was charged of them."""
        charged_bytes = min(size, self._charged_bytes)
        self.account.release(_MESSAGE, charged_bytes)
        self._charged_bytes -= charged_bytes
        self._stream.connection.buffered_bytes -= size
        self._buffered_bytes -= size

    def _admit(self, size: int) -> None:
        # All that a connection holds of requests is at most one of the largest, unless that is small.
        connection = self._stream.connection
        if connection.buffered_bytes + size > max(self._limit, _LEAST_BUFFER_BYTES):
            raise CallError(Status.RESOURCE_EXHAUSTED, "too many unfinished requests on this connection")
        if not self.account.fits(size):
            self.account.refuse(_MESSAGE)
            raise _no_memory()
        self._buffered_bytes += size
        connection.buffered_bytes += size

    def _arrive(self, filled_bytes: int, length_bytes: int) -> None:
        """Charges what has arrived of a message, by the memory that it takes up."""
        if length_bytes >= 2 * _HUGE_PAGE_BYTES:
            filled_bytes = min(length_bytes, -(-filled_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES)
        self._charge(filled_bytes - self._message_bytes)

    def _charge(self, size: int) -> None:
        if size > 0:
            if not self.account.charge(_MESSAGE, size):
                raise _no_memory()
            self._charged_bytes += size

    @property
    def _message_bytes(self) -> int:
        """How much is charged for the message that is arriving."""
        return self._charged_bytes

    @property
    def account(self) -> Account:
        """What the connection of the call holds."""
        return self._stream.connection.output.account

    def charge_expanded(self, size: int) -> bool:
        """Charges `size` more bytes that a compressed message has become. False where there is no room for them."""
        if not self.account.charge(_DECOMPRESSED, size):
            return False
        self._expanded_bytes += size
        return True

    def _release_all(self) -> None:
        self.release(self._buffered_bytes)
        self.release_expanded()

    def release_expanded(self) -> None:
        """The expanded message is done with."""
        self.account.release(_DECOMPRESSED, self._expanded_bytes)
        self._expanded_bytes = 0

    def _expire(self) -> None:
        self.fail(CallError(Status.DEADLINE_EXCEEDED, "Deadline Exceeded"))


class UnaryCall(GrpcCall):
    """A call with one message, given to `serve` when the request is complete; it is in `open_calls` from then on."""

    __slots__ = ("_message", "_open_calls", "_serve", "keeps_received")

    def __init__(
        self,
        stream: Stream,
        head: CallHead,
        limit: int,
        serve: Callable[[UnaryCall, Message], None],
        open_calls: set[GrpcCall],
    ) -> None:
        super().__init__(stream, head, limit)
        self._message: Message | Inflation | None = None
        self._open_calls = open_calls
        self._serve = serve
        self.keeps_received = False
        """Set by a handler that keeps its message until it answers: the message is charged for as long."""

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
            inflate(message, self.charge_expanded, self._take_inflated)
            return
        self._message = None
        self._serve_and_release(message)

    def _serve_and_release(self, message: Message) -> None:
        self._serve(self, message)
        if (self._buffered_bytes or self._expanded_bytes) and not self.keeps_received:
            self._release_all()

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
            self._serve_and_release(message)


def inflate(inflation: Inflation, charge: Callable[[int], bool], take: Callable[[Message | CallError], None]) -> None:
    """Expands a message in a thread, step by step; `take` is told the outcome, in the event loop.

    `charge` is told by how much each step has made it larger, and returns whether there is room for that.
    """

    def step(charged_bytes: int) -> None:
        job = asyncio.get_running_loop().run_in_executor(None, inflation.run_step)
        job.add_done_callback(lambda done: end(done, charged_bytes))

    def end(job: asyncio.Future[bytes | None], charged_bytes: int) -> None:
        if job.cancelled():
            return
        error = job.exception()
        size = inflation.size_bytes
        if error is None and inflation.is_wanted and not charge(size - charged_bytes):
            error = _no_memory()
        if isinstance(error, CallError):
            take(error)
        elif isinstance(error, Exception):
            report("gateway.grpc.call: expanding a message", error)
            take(CallError(Status.INTERNAL, "internal server error"))
        else:
            message = job.result()
            if message is None:
                step(size)
            else:
                take(message)

    step(0)


def _no_memory() -> CallError:
    return CallError(Status.RESOURCE_EXHAUSTED, no_memory().message, retry_after_s=1)


def _not_one_message() -> CallError:
    return CallError(Status.UNIMPLEMENTED, "the method takes exactly one message")

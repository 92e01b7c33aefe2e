"""`NatsProtocol`: one TCP connection to nats-server, for the hot path: parse, dispatch, one write a loop turn.

nats-py carries a message through a stream reader, a queue and a task, which costs 10 us to receive one and more to
publish; here a message goes from the socket to its callback, and what is published in one turn of the loop leaves in one
write. `bus.connection` reconnects and restores; streams and buckets are administered through nats-py.
Source: the NATS client protocol (INFO, CONNECT, PUB, SUB, UNSUB, HPUB, MSG, HMSG, PING, PONG, -ERR).
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bus.broker_access import BrokerRefused, is_refusal
from runtime.containment import report
from runtime.log_limiter import LogLimiter

logger = logging.getLogger("weir.bus")
_limiter = LogLimiter(logger)

_JOIN_LIMIT_BYTES = 128 * 1024
_M, _H, _P, _I, _MINUS, _PLUS = b"MHPI-+"
_MAX_LINE_BYTES = 1 << 20  # an INFO line names every server of a cluster; nats-server's own limit for a client is 4 KiB
_MAX_SIZE_DIGITS = 10  # of a message's size in bytes; nats-server takes no `max_payload` of more digits
_COMPLAINT_EVERY_S = 60.0  # the same one again: what may not be published is tried with each message
_MAX_COMPLAINTS = 100


class _FramingLost(Exception):
    """The bytes received do not say where the next message begins."""


class Message(NamedTuple):
    """What arrived on a subject. `status` is nats-server's own word in a peer's stead ("503": nobody listens).

    `header_block` are the message's headers as they came, b"" without any; `bus.headers` reads them. Bytes of `subject`
    and `reply` that are not UTF-8 are U+FFFD here: `bus.reserved_subjects.subject_problem` refuses such a subject, and
    nothing may be published there.
    """

    subject: str
    reply: str
    data: bytes
    status: str
    header_block: bytes = b""


Callback = Callable[[Message], None]


def connect_options(name: str, identity: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What we tell a server in CONNECT: what we can, our `name`, and who we are (`bus.broker_access`)."""
    return {
        "verbose": False,
        "pedantic": False,
        "headers": True,
        "no_responders": True,
        "protocol": 1,
        "lang": "python-weir",
        "name": name,
        **(identity or {}),
    }


class NatsProtocol(asyncio.Protocol):
    """See the module. `callbacks` (by subscription id) belongs to the owner, `on_lost` tells it of the connection's end.

    `on_info` is called with what the server says of itself later, as when the cluster around it changes. The server speaks
    first: `greeted` is done then, and it waits for `introduce`; `established` is done once it has taken us.
    """

    def __init__(
        self,
        callbacks: dict[bytes, Callback],
        on_lost: Callable[[], None],
        on_info: Callable[[Mapping[str, Any]], None] = lambda info: None,
    ) -> None:
        self._callbacks = callbacks
        self._on_lost = on_lost
        self._on_info = on_info
        self._transport: asyncio.Transport | None = None
        self._chunks: list[bytes] = []  # received, and not yet enough for the message they begin with
        self._have = 0
        self._need = 0
        self._out: list[bytes] = []
        self._end_due = False
        self._dispatching = False
        self._deferred: list[Callable[[], None]] = []
        self._at_turn_end: list[Callable[[], None]] = []
        self._pongs: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self.established: asyncio.Future[None] = self._loop.create_future()
        self.info: dict[str, Any] = {}
        self.last_error = ""  # that the server told, as when it ends the connection
        self._complaints: dict[str, float] = {}
        self._is_broken = False
        self.malformed_messages = 0
        """Messages skipped because their first line does not name a subject, a subscription and sizes that fit."""

    def secure(self, transport: asyncio.BaseTransport) -> None:
        """From now on speaks through `transport`, which encrypts."""
        self._transport = transport  # type: ignore[assignment]

    def introduce(self, options: Mapping[str, Any]) -> None:
        """Tells the server who we are, with what `connect_options` makes."""
        self.send((b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n",))

    # What goes out

    def publish(self, subject: str, data: bytes, reply: str, header_block: bytes = b"") -> None:
        """Sends a message within this turn of the loop."""
        if header_block:
            size = len(header_block)
            line = f"HPUB {subject} {reply} {size} {size + len(data)}\r\n".encode()
            self.send((line, header_block, data, b"\r\n"))
        else:
            self.send((f"PUB {subject} {reply} {len(data)}\r\n".encode(), data, b"\r\n"))

    def send(self, pieces: tuple[bytes, ...]) -> None:
        """Sends protocol lines within this turn of the loop."""
        self._out += pieces
        if not self._end_due and not self._dispatching:
            self._end_due = True
            self._loop.call_soon(self._end_turn)

    def defer(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once all that has arrived by now is dispatched."""
        if self._dispatching:
            self._deferred.append(callback)
        else:
            self.at_turn_end(callback)

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        """Calls `callback` at the end of this turn of the loop, before what was sent in it is written."""
        self._at_turn_end.append(callback)
        if not self._end_due:
            self._end_due = True
            self._loop.call_soon(self._end_turn)

    def ping(self) -> asyncio.Future[None]:
        """Done once the server has seen everything sent before."""
        pong: asyncio.Future[None] = self._loop.create_future()
        self._pongs.append(pong)
        self.send((b"PING\r\n",))
        return pong

    @property
    def local_host(self) -> str:
        """The address at this end of the connection, "" where it has none."""
        name = None if self._transport is None else self._transport.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def unsent_bytes(self) -> int:
        """What waits for the server to take it, but for what this turn of the loop has added."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Sends what is waiting and closes."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """Closes at once: the peer does not answer."""
        if self._transport is not None:
            self._transport.abort()

    def _end_turn(self) -> None:
        self._end_due = False
        if self._at_turn_end:
            callbacks, self._at_turn_end = self._at_turn_end, []
            self._dispatching = True  # what they send leaves in the write below
            for callback in callbacks:
                self._guard(callback)
            self._run_deferred()
            self._dispatching = False
        if self._out:
            self._flush()

    def _run_deferred(self) -> None:
        while self._deferred:
            deferred, self._deferred = self._deferred, []
            for callback in deferred:
                self._guard(callback)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if not out or self._transport is None or self._transport.is_closing():
            return
        if sum(map(len, out)) <= _JOIN_LIMIT_BYTES:
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(out)

    # Events of the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server speaks first."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits for this connection any more."""
        self._transport = None
        error: OSError = ConnectionError("the connection to nats-server was lost")
        if isinstance(exc, ssl.SSLError):  # so the server tells that our certificate is missing, or is none it takes
            error = exc
        for waiter in (self.greeted, self.established, *self._pongs):
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # whoever still cares awaits it; nobody has to
        self._pongs.clear()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """Dispatches every whole message received so far. Never raises.

        A callback that fails, or a malformed message, costs the other messages nothing. The connection is closed where
        the bytes do not say how long a message is; the owner then connects again.
        """
        if self._is_broken:
            return
        if self._chunks:
            self._chunks.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data = b"".join(self._chunks)
            self._chunks = []
        # What callbacks publish leaves in one write when all of them have run, without another turn of the loop.
        self._dispatching = True
        try:
            rest, self._need = self._parse(data)
        except _FramingLost as error:
            rest = len(data)
            self._break_off(str(error))
        self._run_deferred()
        self._dispatching = False
        if self._out:
            self._flush()
        if rest < len(data):
            self._chunks = [data[rest:] if rest else data]
            self._have = len(data) - rest

    def _break_off(self, reason: str) -> None:
        self._is_broken = True
        logger.error("closing the connection to nats-server: what it sent is not the NATS protocol: %s", reason)
        if self._transport is not None:
            self._transport.abort()

    def _parse(self, data: bytes) -> tuple[int, int]:
        """(where the first incomplete message begins, how many bytes are needed to go on). Raises _FramingLost."""
        position, end = 0, len(data)
        callbacks = self._callbacks
        while position < end:
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                if end - position > _MAX_LINE_BYTES:
                    raise _FramingLost(f"a line of more than {_MAX_LINE_BYTES} bytes")
                return position, 0
            kind = data[position]
            if kind == _M:
                fields = data[position + 4 : line_end].split()
                start = line_end + 2
                stop = start + _size(fields)
                if stop + 2 > end:
                    return position, stop + 2 - position
                count = len(fields)
                if count == 3 or count == 4:
                    callback = callbacks.get(fields[1])
                    if callback is not None:
                        reply = fields[2].decode("utf-8", "replace") if count == 4 else ""
                        subject = fields[0].decode("utf-8", "replace")
                        self._call(callback, Message(subject, reply, data[start:stop], ""))
                else:
                    self._skip(data[position:line_end])
                position = stop + 2
            elif kind == _H:
                fields = data[position + 5 : line_end].split()
                headers = line_end + 2
                stop = headers + _size(fields)
                if stop + 2 > end:
                    return position, stop + 2 - position
                count = len(fields)
                start = headers + (_number(fields[-2]) if count == 4 or count == 5 else -1)
                if headers <= start <= stop:
                    callback = callbacks.get(fields[1])
                    if callback is not None:
                        reply = fields[2].decode("utf-8", "replace") if count == 5 else ""
                        subject = fields[0].decode("utf-8", "replace")
                        block = data[headers:start]
                        status = "" if block.startswith(b"NATS/1.0\r\n") else _status(block)
                        self._call(callback, Message(subject, reply, data[start:stop], status, block))
                else:
                    self._skip(data[position:line_end])
                position = stop + 2
            else:
                self._on_line(kind, data[position:line_end])
                position = line_end + 2
        return position, 0

    def _skip(self, line: bytes) -> None:
        self.malformed_messages += 1
        _limiter.warning(
            "malformed message", "skipped a message from nats-server with a malformed first line: %r", line[:100]
        )

    def _call(self, callback: Callback, message: Message) -> None:
        try:
            callback(message)
        except Exception as error:  # noqa: BLE001 - contained: one message must not cost the others
            report("bus.nats_protocol: dispatching a message", error)

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:  # noqa: BLE001 - contained: one message must not cost the others
            report("bus.nats_protocol: running what a message has deferred", error)

    def _on_line(self, kind: int, line: bytes) -> None:
        if kind == _P and line == b"PING":
            self.send((b"PONG\r\n",))
        elif kind == _P and line == b"PONG":
            if self._pongs:
                pong = self._pongs.popleft()
                if not pong.done():
                    pong.set_result(None)
            if not self.established.done():
                self.established.set_result(None)
        elif kind == _I:
            self._on_info_line(line)
        elif kind == _MINUS:
            self._on_error(line[5:].decode(errors="replace").strip("'"))
        elif kind != _PLUS:
            raise _FramingLost(f"a line that begins with {line[:20]!r}")

    def _on_info_line(self, line: bytes) -> None:
        try:
            info = json.loads(line[5:])
        except (ValueError, RecursionError):
            info = None
        if not isinstance(info, dict):
            raise _FramingLost(f"an INFO line that is not a JSON object: {line[:100]!r}")
        self.info = info
        if not self.greeted.done():
            self.greeted.set_result(None)
            return
        try:
            self._on_info(info)
        except Exception as error:  # noqa: BLE001 - contained: one message must not cost the others
            report("bus.nats_protocol: learning of the cluster's servers", error)

    def _on_error(self, text: str) -> None:
        self.last_error = text
        if not self.established.done():
            kind = BrokerRefused if is_refusal(text) else ConnectionError
            self.established.set_exception(kind(f"nats-server refused the connection: {text}"))
            return
        now_s = time.monotonic()
        if now_s - self._complaints.get(text, -_COMPLAINT_EVERY_S) >= _COMPLAINT_EVERY_S:
            if len(self._complaints) >= _MAX_COMPLAINTS:
                self._complaints.clear()
            self._complaints[text] = now_s
            logger.error("nats-server: %s", text)


def _size(fields: list[bytes]) -> int:
    """The size at the end of a message's first line, in bytes. Raises _FramingLost where there is none."""
    size = _number(fields[-1]) if fields else -1
    if size < 0:
        raise _FramingLost(f"a first line of a message without a size: {b' '.join(fields)[-100:]!r}")
    return size


def _number(digits: bytes) -> int:
    """A size in bytes; -1 for what is not one, or is larger than any message."""
    if len(digits) > _MAX_SIZE_DIGITS or not digits.isdigit():
        return -1
    return int(digits)


def _status(header_block: bytes) -> str:
    """The status in the first line, if there is one: "NATS/1.0 503 No Responders"."""
    first = header_block.split(b"\r\n", 1)[0].split(None, 2)
    return first[1].decode("latin-1") if len(first) > 1 else ""

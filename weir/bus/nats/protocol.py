"""`NatsProtocol`: one TCP connection to nats-server, which parses, dispatches, and writes once a turn of the event loop.

nats-py passes a message through a stream reader, a queue and a task, which costs 10 us to receive one and more to publish.
Here a message goes from the socket to its callback, and messages that are published in one turn of the loop leave in one
write. `weir.bus.nats.connection` reconnects and restores subscriptions.
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
from typing import Any

from weir.bus.message import Callback, Message
from weir.bus.nats.access import BrokerRefused, is_refusal
from weir.bus.turn import Turn
from weir.runtime.containment import report
from weir.runtime.log_limiter import LogLimiter

logger = logging.getLogger("weir.bus")
_limiter = LogLimiter(logger)

_JOIN_LIMIT_BYTES = 128 * 1024
_M, _H, _P, _I, _MINUS, _PLUS = b"MHPI-+"
_MAX_LINE_BYTES = 1 << 20  # an INFO line names every server of a cluster
_MAX_SIZE_DIGITS = 10  # of a message's size in bytes; nats-server accepts no `max_payload` of more digits
_REPEAT_LOG_S = 60.0  # for the same error: each message on a forbidden subject causes one
_MAX_LOGGED_ERRORS = 100


class _FramingLost(Exception):
    """It can't be determined where in the received bytes the next message begins."""


def connect_options(name: str, identity: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The options of CONNECT: what this client supports, its `name`, and its credentials (`weir.bus.nats.access`)."""
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
    """One connection. `callbacks` (by subscription id) belongs to the owner, `on_lost` is called when the connection ends.

    `on_info` is called with each later INFO of the server, as when its cluster changes. The server sends the first INFO:
    then `greeted` is done, and the server waits for `introduce`; `established` is done when it has accepted the client.
    """

    def __init__(
        self,
        callbacks: dict[bytes, Callback],
        turn: Turn,
        on_lost: Callable[[], None],
        on_info: Callable[[Mapping[str, Any]], None] = lambda info: None,
    ) -> None:
        self._callbacks = callbacks
        self._turn = turn
        self._on_lost = on_lost
        self._on_info = on_info
        self._transport: asyncio.Transport | None = None
        self._chunks: list[bytes] = []  # received, and less than one message
        self._have = 0
        self._need = 0
        self._out: list[bytes] = []
        self._pongs: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self.established: asyncio.Future[None] = self._loop.create_future()
        self.info: dict[str, Any] = {}
        self.last_error = ""  # that the server sent, as before it ends the connection
        self._logged_errors: dict[str, float] = {}
        self._is_broken = False
        self.malformed_messages = 0
        """Messages skipped because their first line does not name a subject, a subscription and sizes that fit."""

    def secure(self, transport: asyncio.BaseTransport) -> None:
        """Uses `transport`, which encrypts, from now on."""
        self._transport = transport  # type: ignore[assignment]

    def introduce(self, options: Mapping[str, Any]) -> None:
        """Sends CONNECT with the options of `connect_options`."""
        self.send((b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n",))

    # Sending

    def publish(self, subject: str, data: bytes, reply: str, header_block: bytes = b"") -> None:
        """Sends a message within this turn of the loop."""
        if header_block:
            size = len(header_block)
            line = f"HPUB {subject} {reply} {size} {size + len(data)}\r\n".encode()
            pieces: tuple[bytes, ...] = line, header_block, data, b"\r\n"
        else:
            pieces = f"PUB {subject} {reply} {len(data)}\r\n".encode(), data, b"\r\n"
        if not self._out:
            self._turn.at_write(self._flush)
        self._out += pieces

    def send(self, pieces: tuple[bytes, ...]) -> None:
        """Sends protocol lines within this turn of the loop."""
        if not self._out:
            self._turn.at_write(self._flush)
        self._out += pieces

    def ping(self) -> asyncio.Future[None]:
        """Done when the server has processed everything sent before."""
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
        """Bytes that the server has not read yet, without those of this turn of the loop."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Sends what is queued and closes."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """Closes at once, because the server does not respond."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if not out or self._transport is None or self._transport.is_closing():
            return
        if sum(map(len, out)) <= _JOIN_LIMIT_BYTES:
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(out)

    # Receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for the server's INFO."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails everything that waits for the connection."""
        self._transport = None
        error: OSError = ConnectionError("the connection to nats-server was lost")
        if isinstance(exc, ssl.SSLError):  # the server rejects the client certificate, or requires one
            error = exc
        for waiter in (self.greeted, self.established, *self._pongs):
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # retrieved here, because no caller has to await it
        self._pongs.clear()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """Dispatches every complete message received so far. Never raises.

        A callback that fails and a malformed message do not affect other messages. The connection is closed where the
        length of a message can't be read; the owner then reconnects.
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
        self._turn.run(self._receive, data)

    def _receive(self, data: bytes) -> None:
        try:
            rest, self._need = self._parse(data)
        except _FramingLost as error:
            rest = len(data)
            self._break_off(str(error))
        if rest < len(data):
            self._chunks = [data[rest:] if rest else data]
            self._have = len(data) - rest

    def _break_off(self, reason: str) -> None:
        self._is_broken = True
        logger.error("closing the connection to nats-server, which does not follow the NATS protocol: %s", reason)
        if self._transport is not None:
            self._transport.abort()

    def _parse(self, data: bytes) -> tuple[int, int]:  # noqa: C901, PLR0912 - one loop without calls, run for each message
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
        except Exception as error:  # noqa: BLE001 - contained: an exception affects one message only
            report("weir.bus.nats.protocol: dispatching a message", error)

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
        except Exception as error:  # noqa: BLE001 - contained: an exception affects one message only
            report("weir.bus.nats.protocol: learning of the cluster's servers", error)

    def _on_error(self, text: str) -> None:
        self.last_error = text
        if not self.established.done():
            kind = BrokerRefused if is_refusal(text) else ConnectionError
            self.established.set_exception(kind(f"nats-server refused the connection: {text}"))
            return
        now_s = time.monotonic()
        if now_s - self._logged_errors.get(text, -_REPEAT_LOG_S) >= _REPEAT_LOG_S:
            if len(self._logged_errors) >= _MAX_LOGGED_ERRORS:
                self._logged_errors.clear()
            self._logged_errors[text] = now_s
            logger.error("nats-server: %s", text)


def _size(fields: list[bytes]) -> int:
    """The size in bytes at the end of a message's first line. Raises _FramingLost without one."""
    size = _number(fields[-1]) if fields else -1
    if size < 0:
        raise _FramingLost(f"a first line of a message without a size: {b' '.join(fields)[-100:]!r}")
    return size


def _number(digits: bytes) -> int:
    """A size in bytes; -1 for other bytes, and for more than any message has."""
    if len(digits) > _MAX_SIZE_DIGITS or not digits.isdigit():
        return -1
    return int(digits)


def _status(header_block: bytes) -> str:
    """The status in the first line, as in "NATS/1.0 503 No Responders"; "" without one."""
    first = header_block.split(b"\r\n", 1)[0].split(None, 2)
    return first[1].decode("latin-1") if len(first) > 1 else ""

"""A connection on a real socket: back-pressure, keepalive, age, and ends of all kinds."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.support.gateway.grpc_frontend import Loop
from tests.support.gateway.http2_peer import (
    GREETING,
    REQUEST,
    Echoes,
    Wire,
    data,
    frame,
    headers,
    settings_frame,
    window_update,
)
from tests.support.waiting import wait_until
from weir.gateway.http2 import keepalive as lifetime
from weir.gateway.http2.connection import TURN_WORK, Connection
from weir.gateway.http2.frames import MAX_WINDOW, Flag, FrameType, Setting
from weir.gateway.http2.options import Http2Options
from weir.gateway.http2.protocol import Http2Protocol
from weir.http_server.connection_cap import IDLE_S, ConnectionCap
from weir.http_server.read_turns import TURN_BYTES
from weir.runtime.memory_ledger import MemoryLedger

SILENT = [*REQUEST[:2], (b":path", b"/silent")]


class Server:
    """A server of echoes on a free port."""

    def __init__(self, loop: Loop, options: Http2Options, connections: int = 100) -> None:
        self.application = Echoes()
        self.connections: set[Http2Protocol] = set()
        self.cap = ConnectionCap(connections)
        self._loop = loop
        self._options = options
        self.server: asyncio.Server = loop.run(self._listen())
        self.port: int = self.server.sockets[0].getsockname()[1]

    async def _listen(self) -> asyncio.Server:
        make = partial(Http2Protocol, self.application, self._options, self.connections, MemoryLedger(), self.cap)
        return await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)

    def close(self) -> None:
        self._loop.run(self._close())
        wait_until(lambda: not self.connections)

    async def _close(self) -> None:
        self.server.close()
        for connection in list(self.connections):
            connection.abort()


@contextmanager
def serving(loop: Loop, connections: int = 100, **options: float) -> Iterator[Server]:
    server = Server(loop, Http2Options(**options), connections)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()


def test_other_connections_have_their_turn_while_a_large_request_arrives(
    grpc_loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [0]
    data_received = Http2Protocol.data_received

    def spy(protocol: Http2Protocol, received: bytes) -> None:
        turns[-1] += len(received)
        data_received(protocol, received)
        time.sleep(0.002)  # the client is faster: there is always more to read than a turn takes

    async def count_turns() -> None:
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    monkeypatch.setattr(Http2Protocol, "data_received", spy)
    content = b"".join([headers(1), *(data(1, bytes(16_000)) for _ in range(1000)), data(1, b"", end=True)])
    with serving(grpc_loop) as server, Wire(server.port) as wire:
        counting = grpc_loop.spawn(count_turns())
        wire.send(settings_frame(Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW), window_update(0, MAX_WINDOW - 65_535))
        sender = threading.Thread(target=wire.send, args=(content,))
        sender.start()
        assert len(wire.response(1)[1]) == 16_000_000
        sender.join()
        counting.cancel()
    assert sum(turns) > len(content)
    assert max(turns) < 2 * TURN_BYTES, "a read that begins before the limit may end after it"


def test_other_connections_have_their_turn_while_many_headers_arrive(
    grpc_loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [0]
    on_frame = Connection._on_frame

    def spy(connection: Connection, *of: Any) -> None:
        turns[-1] += 1
        on_frame(connection, *of)

    async def count_turns() -> None:
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    monkeypatch.setattr(Connection, "_on_frame", spy)
    count = 600
    with serving(grpc_loop) as server, Wire(server.port) as wire:
        counting = grpc_loop.spawn(count_turns())
        content = [headers(2 * number + 1, [*REQUEST, (b"n", b"%d" % number)], end=True) for number in range(count)]
        wire.send(*content)
        assert wire.response(2 * count - 1)
        counting.cancel()
        assert len(server.application.exchanges) == count
    fields = len(REQUEST) + 1
    assert max(turns) <= TURN_WORK // (fields + 1) + 1


def test_twenty_megabytes_pass_both_ways(grpc_loop: Loop) -> None:
    body = bytes(range(256)) * 80_000
    with serving(grpc_loop) as server, Wire(server.port) as wire:
        wire.send(settings_frame(Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW), window_update(0, MAX_WINDOW - 65_535))

        def send() -> None:
            parts = [data(1, body[start : start + 16_000]) for start in range(0, len(body), 16_000)]
            wire.send(headers(1), *parts, data(1, b"", end=True))

        sender = threading.Thread(target=send)
        sender.start()
        assert wire.response(1)[1] == body
        sender.join()
        assert server.application.exchanges[0].closings == 1


def test_a_client_that_does_not_read_is_not_read_either(grpc_loop: Loop) -> None:
    with serving(grpc_loop) as server, Wire(server.port) as wire:
        wire.send(settings_frame(Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW), window_update(0, MAX_WINDOW - 65_535))
        wire.socket.settimeout(0.5)
        sent = send_until_stuck(wire)
        assert sent < 100 * 1_600_000
        (protocol,) = server.connections
        assert protocol.connection.send_buffer.unsent_bytes <= sent


def send_until_stuck(wire: Wire) -> int:
    """Requests 1.6 GB without reading anything; returns about how many bytes were sent in the end."""
    sent = 0
    for stream_id in range(1, 2001, 2):
        sent += 1_600_000
        try:
            wire.send(headers(stream_id), data(stream_id, bytes(16_000)) * 100, data(stream_id, b"", end=True))
        except TimeoutError:
            break
    return sent


def test_a_connection_that_is_not_http2_is_closed_with_goaway(grpc_loop: Loop) -> None:
    with serving(grpc_loop) as server, Wire(server.port, b"GET / HTTP/1.1\r\n\r\n") as wire:
        assert wire.is_closed()
        wait_until(lambda: not server.connections)


def test_a_lost_connection_ends_its_exchanges(grpc_loop: Loop) -> None:
    with serving(grpc_loop) as server:
        with Wire(server.port) as wire:
            wire.send(headers(1, SILENT), headers(3, SILENT))
            wait_until(lambda: len(server.application.exchanges) == 2)
        wait_until(lambda: [exchange.closings for exchange in server.application.exchanges] == [1, 1])


def test_a_client_without_settings_is_closed(grpc_loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "HANDSHAKE_TIMEOUT_S", 0.05)
    with serving(grpc_loop) as server:
        with Wire(server.port, GREETING[:20]) as wire:
            assert wire.is_closed()
            assert server.cap.ended["silent"] == 1
        with Wire(server.port) as wire:
            wire.send(headers(1, end=True))
            wire.response(1)


def test_a_new_connection_takes_the_room_of_an_idle_one_and_never_that_of_a_busy_one(grpc_loop: Loop) -> None:
    with serving(grpc_loop, connections=4) as server:
        with Wire(server.port, b"") as silent, Wire(server.port) as greeted, Wire(server.port) as busy:
            for number, wire in enumerate((greeted, busy), 1):
                wire.send(headers(1, SILENT))
                wait_until(lambda number=number: len(server.application.exchanges) == number)
            greeted.send(frame(FrameType.RST_STREAM, 0, 1, bytes(4)))
            wait_until(lambda: server.application.exchanges[0].closings == 1)
            with Wire(server.port) as third:
                assert silent.is_closed()
                third.send(headers(1, SILENT))
                wait_until(lambda: len(server.application.exchanges) == 3)
                with Wire(server.port) as fourth:
                    assert fourth.is_closed()  # `greeted` was busy a moment ago
                for protocol in server.connections:
                    protocol._keepalive.last_received_s -= IDLE_S
                with Wire(server.port) as fifth:
                    assert greeted.read_until(FrameType.GOAWAY)
                    fifth.send(headers(1, end=True))
                    fifth.response(1)
            assert server.cap.ended == {"silent": 0, "displaced": 2, "rejected": 1}
            assert server.application.exchanges[1].closings == 0
        wait_until(lambda: not server.cap.open)


def test_silent_clients_with_open_streams_are_pinged_and_closed_without_a_reply(grpc_loop: Loop) -> None:
    with serving(grpc_loop, keepalive_time_s=0.05, keepalive_timeout_s=0.05) as server, Wire(server.port) as wire:
        wire.send(headers(1, SILENT))
        wire.read_until(FrameType.PING)
        assert wire.is_closed()
        wait_until(lambda: server.application.exchanges[0].closings == 1)


def test_clients_that_response_pings_stay_and_are_not_pinged_again_before_they_are_answered(grpc_loop: Loop) -> None:
    with (
        serving(grpc_loop, keepalive_time_s=0.02, keepalive_timeout_s=1, max_pings_without_data=1) as server,
        Wire(server.port) as wire,
    ):
        wire.send(headers(1, SILENT))
        ping = next(one for one in wire.read_until(FrameType.PING) if one[0] == FrameType.PING)
        wire.send(frame(FrameType.PING, Flag.ACK, 0, ping[3]))
        wire.socket.settimeout(1.2)
        with pytest.raises(TimeoutError):
            wire.read_until(FrameType.PING)
        wire.socket.settimeout(10)
        wire.send(headers(3, end=True))
        wire.read_until(FrameType.PING)


def test_clients_without_calls_are_not_pinged(grpc_loop: Loop) -> None:
    with serving(grpc_loop, keepalive_time_s=0.02, keepalive_timeout_s=0.02) as server, Wire(server.port) as wire:
        wire.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            wire.read_until(FrameType.PING)


def test_an_old_connection_is_drained_and_closed_after_its_grace(grpc_loop: Loop) -> None:
    with serving(grpc_loop, max_age_s=0.1, max_age_grace_s=0.1) as server, Wire(server.port) as wire:
        wire.send(headers(1, SILENT))
        assert any(kind == FrameType.GOAWAY for kind, *_ in wire.read_until(FrameType.PING))
        assert not server.application.exchanges[0].closings
        assert wire.is_closed()
        assert server.application.exchanges[0].closings == 1


def test_a_half_closed_socket_ends_the_connection(grpc_loop: Loop) -> None:
    with serving(grpc_loop) as server, Wire(server.port) as wire:
        wire.send(headers(1, SILENT))
        wait_until(lambda: server.application.exchanges)
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.is_closed()
        wait_until(lambda: server.application.exchanges[0].closings == 1)

"""The timers of a connection: handshake, keepalive, and maximum age."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from weir.gateway.http2 import keepalive
from weir.gateway.http2.keepalive import KeepaliveManager
from weir.gateway.http2.options import Http2Options


class FakeConnection:
    """Records what the timers do to it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.streams: dict[int, object] = {1: object()}
        self.has_responded = False
        self.has_handshake = True

    def ping(self, _payload: bytes) -> None:
        self.events.append("ping")

    def drain(self) -> None:
        self.events.append("drain")

    def close(self, *_reason: object) -> None:
        self.events.append("close")


def run(options: Http2Options, seconds: float, connection: FakeConnection | None = None) -> FakeConnection:
    connection = connection or FakeConnection()

    async def scenario() -> None:
        add = connection.events.append
        manager = KeepaliveManager(cast(Any, connection), options, lambda: add("abort"), lambda: add("silent"))
        await asyncio.sleep(seconds)
        manager.end()

    asyncio.run(scenario())
    return connection


def test_a_silent_client_with_calls_is_pinged_and_aborted() -> None:
    options = Http2Options(keepalive_time_s=0.02, keepalive_timeout_s=0.02)
    assert run(options, 0.1).events[:2] == ["ping", "abort"]


def test_without_calls_a_client_is_not_pinged() -> None:
    connection = FakeConnection()
    connection.streams.clear()
    assert run(Http2Options(keepalive_time_s=0.01), 0.05, connection).events == []
    permitted = Http2Options(keepalive_time_s=0.01, keepalive_timeout_s=5, keepalive_permit_without_calls=True)
    assert run(permitted, 0.05, connection).events == ["ping"]


def test_a_connection_without_settings_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "HANDSHAKE_TIMEOUT_S", 0.01)
    connection = FakeConnection()
    connection.has_handshake = False
    assert run(Http2Options(), 0.05, connection).events == ["silent", "close"]


def test_an_old_connection_is_drained_and_then_closed() -> None:
    assert run(Http2Options(max_age_s=0.01, max_age_grace_s=0.01), 0.08).events == ["drain", "close"]
    assert run(Http2Options(max_age_s=0.01), 0.05).events == ["drain"]


def test_ended_timers_do_nothing() -> None:
    assert run(Http2Options(max_age_s=0.02, keepalive_time_s=0.02), 0.0).events == []

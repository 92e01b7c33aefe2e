"""The service API of NATS: descriptions and counters of the NATS frontend."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weir.gateway.nats.discovery import Endpoint, MicroService


class FakeBus:
    def __init__(self) -> None:
        self.listeners: dict[str, Callable[[Any], None]] = {}
        self.published: list[tuple[str, Any]] = []

    async def subscribe(self, subject: str, listener: Callable[[Any], None]) -> Callable[[], None]:
        self.listeners[subject] = listener
        return lambda: cast(None, self.listeners.pop(subject))

    def publish(self, subject: str, data: bytes) -> None:
        self.published.append((subject, json.loads(data)))

    def query(self, subject: str, reply: str = "_INBOX.a") -> Any:
        self.published.clear()
        self.listeners[subject](SimpleNamespace(reply=reply, subject=subject, header_block=b""))
        return self.published[0][1] if self.published else None


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint("infer", "infer.*")


async def test_a_service_answers_by_kind_name_and_id(endpoint: Endpoint) -> None:
    bus = FakeBus()
    await MicroService(cast(Any, bus), "g1", "1.2.3", [endpoint]).start()
    for subject in ("$SRV.PING", "$SRV.PING.weir", "$SRV.PING.weir.g1"):
        assert bus.query(subject)["id"] == "g1"
    info = bus.query("$SRV.INFO.weir")
    assert (info["version"], info["endpoints"][0]["subject"]) == ("1.2.3", "infer.*")


async def test_statistics_count_requests_and_errors(endpoint: Endpoint) -> None:
    bus = FakeBus()
    await MicroService(cast(Any, bus), "g1", "1.2.3", [endpoint]).start()
    endpoint.requests = 2
    endpoint.count(1000, "")
    endpoint.count(3000, "400:bad")
    (stats,) = bus.query("$SRV.STATS.weir.g1")["endpoints"]
    assert (stats["num_requests"], stats["num_errors"], stats["last_error"]) == (2, 1, "400:bad")
    assert (stats["processing_time"], stats["average_processing_time"]) == (4000, 2000)


async def test_a_reserved_reply_subject_gets_no_answer(endpoint: Endpoint) -> None:
    bus = FakeBus()
    await MicroService(cast(Any, bus), "g1", "1.2.3", [endpoint]).start()
    assert bus.query("$SRV.PING", "") is None


async def test_a_stopped_service_is_not_discovered(endpoint: Endpoint) -> None:
    bus = FakeBus()
    service = MicroService(cast(Any, bus), "g1", "1.2.3", [endpoint])
    await service.start()
    service.stop()
    assert not bus.listeners

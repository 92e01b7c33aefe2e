"""A recreated stream of live requests is detected, and looked for only while a request waits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weir.calls import outbox as live_stream_watch
from weir.calls.outbox import LiveStreamWatch


class Broker:
    live_layout = SimpleNamespace(streams=2)
    losses = 0

    def __init__(self) -> None:
        self.made = {"LIVE": "1", "LIVE_1": "1"}
        self.jetstream = self
        self.asked = 0
        self.doubts: list[str] = []
        self.is_away = self.is_learnt = False

    async def find_stream(self, stream: str) -> dict[str, str] | None:
        self.asked += 1
        if self.is_away and self.is_learnt:
            raise TimeoutError
        created = self.made.get(stream)
        return {"created": created} if created else None

    def suspect_loss(self, why: str) -> None:
        self.doubts.append(why)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    async def nothing(bus: object) -> None:
        pass

    monkeypatch.setattr(live_stream_watch, "ensure_live_streams", nothing)
    return Broker()


def looks(broker: Broker, *rounds: list[int]) -> None:
    waiting: list[Any] = []
    watch = LiveStreamWatch(cast(Any, broker), cast(Any, waiting))

    async def run() -> None:
        made, broker.made = broker.made, {"LIVE": "1", "LIVE_1": "1"}
        await watch.ensure()
        broker.made, broker.asked, broker.is_learnt = made, 0, True
        for keys in rounds:
            waiting[:] = keys
            await watch.check()

    asyncio.run(run())


def test_streams_are_not_queried_while_requests_proceed(broker: Broker) -> None:
    looks(broker, [1, 2], [3], [], [], [4, 5])
    assert broker.asked == 0


@pytest.mark.parametrize("gone", ["LIVE", "LIVE_1"])
@pytest.mark.parametrize("made_anew", [True, False])
def test_a_recreated_stream_is_detected_once_a_request_waits(broker: Broker, gone: str, made_anew: bool) -> None:
    del broker.made[gone]
    if made_anew:
        broker.made[gone] = "2"
    looks(broker, [1, 2], [2])
    assert not broker.doubts
    looks(broker, [1, 2], [1])
    assert len(broker.doubts) == 1


@pytest.mark.parametrize("is_away", [True, False])
def test_unchanged_streams_and_a_disconnected_broker_are_no_loss(broker: Broker, is_away: bool) -> None:
    broker.is_away = is_away
    looks(broker, [1], [1], [1])
    assert broker.asked == (2 if is_away else 4)
    assert not broker.doubts

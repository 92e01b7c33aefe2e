"""A change waits for the gateways that live, and not for others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.waiting import eventually
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.gateway.admin import peers as module
from weir.gateway.admin.peers import GatewayPeers
from weir.schemas.wire.registry import RoleRecord

OWN = "gateway-0a0a0a0a-00000000"
OTHERS = ["gateway-0a0a0a0a-00000001", "gateway-0a0a0a0a-00000002"]


class Peered(CollectingBus):
    """A bus on which other gateways announce themselves, and answer when the test says so."""

    def on_reconnect(self, listener: object) -> None:
        pass

    def announce(self, id: str, leaving: bool = False) -> None:
        record = RoleRecord(role="gateway", id=id, host="0a0a0a0a", pid=1, since_ms=1, leaving=leaving)
        self._callbacks[subjects.presence("gateway", "*")](
            cast(Any, _Message(subjects.presence("gateway", id), record.pack()))
        )

    def queries(self) -> list[str]:
        """The reply subjects of all queries so far."""
        return [reply for subject, _, reply in self.published if subject == subjects.PEER_QUERY]


class _Message:
    def __init__(self, subject: str, data: bytes, reply: str = "") -> None:
        self.subject, self.data, self.reply, self.status = subject, data, reply, ""


@pytest.fixture
async def bus() -> Peered:
    return Peered()


@pytest.fixture
async def peers(bus: Peered) -> GatewayPeers:
    made = GatewayPeers(cast(Bus, bus), OWN)
    await made.start()
    bus.announce(OWN)
    return made


async def test_a_lone_gateway_waits_for_nobody(bus: Peered, peers: GatewayPeers) -> None:
    await peers.synchronise()
    assert bus.queries() == []


async def test_a_change_waits_for_each_of_the_others(bus: Peered, peers: GatewayPeers) -> None:
    for id in OTHERS:
        bus.announce(id)
    change = asyncio.create_task(peers.synchronise())
    await eventually(bus.queries)
    (reply,) = bus.queries()
    for id in (OWN, "a stranger", OTHERS[0], OTHERS[0]):
        bus.deliver(reply, id.encode())
        await asyncio.sleep(0)
        assert not change.done()
    bus.deliver(reply, OTHERS[1].encode())
    await change


async def test_a_gateway_that_left_is_not_waited_for(bus: Peered, peers: GatewayPeers) -> None:
    for id in OTHERS:
        bus.announce(id)
    bus.announce(OTHERS[1], leaving=True)
    change = asyncio.create_task(peers.synchronise())
    await eventually(bus.queries)
    bus.deliver(bus.queries()[0], OTHERS[0].encode())
    await change


async def test_a_silent_gateway_is_waited_for_in_vain_and_named(
    bus: Peered, peers: GatewayPeers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.01)
    bus.announce(OTHERS[0])
    await peers.synchronise()
    assert f"no answer from {OTHERS[0]}" in caplog.text


async def test_without_a_broker_nothing_is_waited_for(bus: Peered, peers: GatewayPeers) -> None:
    bus.announce(OTHERS[0])
    bus.is_connected = False
    await peers.synchronise()
    assert bus.queries() == []


async def test_a_gateway_answers_with_its_id_and_only_on_subjects_for_answers(bus: Peered, peers: GatewayPeers) -> None:
    bus.deliver(subjects.PEER_QUERY, b"", f"{subjects.peer_answers(OTHERS[0])}.7")
    bus.deliver(subjects.PEER_QUERY, b"", "$KV.models.m")
    assert bus.taken("$KV") == []
    assert bus.taken(subjects.peer_answers(OTHERS[0])) == [OWN.encode()]

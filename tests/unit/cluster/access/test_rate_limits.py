"""Rate limits at a gateway: what it asks the deciding gateway for, and what it does when none answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.collecting_bus import CollectingBus
from weir.access.audit import AuditEvent
from weir.access.gate import Asked, Gate, Shown
from weir.access.keys.ring import KeyRing
from weir.access.limits.refusals import TokensPending
from weir.access.policy.actions import Action
from weir.access.policy.document import parse_policy
from weir.bus.naming import subjects
from weir.cluster.access.rate_limits import LEASE, RateLimits
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.wire.rate_limits import TokenGrant, TokenRequest, TokenResponse

POLICY = "roles: {{caller: {{rules: [{{actions: [infer]}}], limits: {}}}}}"
LIMITED = POLICY.format("{requests_per_s: 10}")


class FakeLeases:
    """Gives a lease when told to."""

    def __init__(self) -> None:
        self.wanted: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {}
        self.is_free = self.sure = True

    def acquire(self, key: str, on_acquired: Callable[[], None], on_lost: Callable[[], None]) -> None:
        self.wanted[key] = on_acquired, on_lost

    def release(self, key: str) -> None:
        self.wanted.pop(key, None)

    def was_free(self, _key: str) -> bool:
        return self.is_free

    def is_sure(self, _key: str) -> bool:
        return self.sure


class Gateway:
    """A gateway `g` without a broker."""

    def __init__(self, background: asyncio.TaskGroup) -> None:
        self.bus = CollectingBus()
        self.leases = FakeLeases()
        self.gate = Gate(time.time)
        ring, key = KeyRing().create("alice", ["caller"], time.time())
        self.gate.use_keys(ring)
        self.shown = Shown(f"Bearer {key}".encode())
        leases: Any = self.leases
        bus: Any = self.bus
        self.limits = RateLimits(bus, "g", self.gate, leases, lambda: 2)
        self._background = background

    async def start(self, policy: str) -> None:
        if policy:
            self.gate.use_policy(parse_policy(policy))
        await self.limits.start(self._background)

    def admit(self) -> None:
        self.gate.admit(self.shown, Asked("http", "x", Action.INFER, "m", size=5))

    def pending(self) -> asyncio.Future[WeirError | None]:
        with pytest.raises(TokensPending) as pending:
            self.admit()
        return pending.value.wait()

    async def asked(self) -> tuple[TokenRequest, str]:
        """What it asks for, and the subject of the reply."""
        await asyncio.sleep(0)
        ((subject, data, reply),) = self.bus.published
        self.bus.published.clear()
        assert subject == subjects.LIMIT_REQUEST
        return TokenRequest.unpack(data), reply


async def test_without_limits_nothing_is_asked_and_no_lease_taken() -> None:
    async with asyncio.TaskGroup() as background:
        for policy in ("", POLICY.format("{}")):
            gateway = Gateway(background)
            await gateway.start(policy)
            gateway.admit()
            assert not gateway.leases.wanted
            assert not gateway.bus.published


async def test_a_policy_with_limits_takes_the_lease_and_one_without_gives_it_back() -> None:
    async with asyncio.TaskGroup() as background:
        gateway = Gateway(background)
        await gateway.start(POLICY.format("{}"))
        gateway.gate.use_policy(parse_policy(LIMITED))
        assert list(gateway.leases.wanted) == [LEASE]
        gateway.gate.use_policy(parse_policy(POLICY.format("{}")))
        assert not gateway.leases.wanted
        gateway.admit()


async def test_requests_wait_for_one_answer_and_share_it() -> None:
    async with asyncio.TaskGroup() as background:
        gateway = Gateway(background)
        await gateway.start(LIMITED)
        first, second, third = (gateway.pending() for _ in range(3))
        request, reply = await gateway.asked()
        assert [(row.owner, row.rates, row.wanted[0]) for row in request.rows] == [("key alice", (10.0, 0.0), 3.0)]
        second.cancel()
        gateway.bus.deliver(reply, TokenResponse([TokenGrant((1.0, 0.0), (2.5, 0.0))]).pack())
        assert first.result() is None
        refusal = third.result()
        assert refusal is not None
        assert (refusal.code, refusal.retry_after_s) == (ErrorCode.RESOURCE_EXHAUSTED, 3)
        assert dict(refusal.headers)["RateLimit-Policy"] == '"requests";q=10;w=1'
        with pytest.raises(WeirError, match="limit of 10 requests/s of 'alice' is used up"):
            gateway.admit()  # no answer is needed for this
        assert gateway.gate.refused == {"requests": 2}


async def test_refused_requests_are_events_of_the_audit_log_whether_they_waited_or_not() -> None:
    class Events(list[AuditEvent]):
        record = list.append

    async with asyncio.TaskGroup() as background:
        gateway = Gateway(background)
        gateway.gate.audits = events = Events()
        await gateway.start(LIMITED)
        first, second = gateway.pending(), gateway.pending()
        _, reply = await gateway.asked()
        gateway.bus.deliver(reply, TokenResponse([TokenGrant((1.0, 0.0), (2.5, 0.0))]).pack())
        assert [first.result() is None, second.result() is None] == [True, False]
        with pytest.raises(WeirError):
            gateway.admit()
        assert [(event.principal, event.allowed) for event in events] == [("alice", False)] * 2
        assert len({event.why for event in events}) == 1  # so the log merges them


async def test_tokens_at_hand_are_used_without_asking() -> None:
    async with asyncio.TaskGroup() as background:
        gateway = Gateway(background)
        await gateway.start(LIMITED)
        waiting = gateway.pending()
        _, reply = await gateway.asked()
        gateway.bus.deliver(reply, TokenResponse([TokenGrant((2.0, 0.0), (0.0, 0.0))]).pack())
        assert waiting.result() is None
        gateway.admit()
        await asyncio.sleep(0)
        assert not gateway.bus.published


@pytest.mark.parametrize(("data", "status"), [(b"", "503"), (b"x", ""), (TokenResponse([]).pack(), "")])
async def test_without_an_answer_the_gateway_goes_on_alone_beginning_with_nothing(data: bytes, status: str) -> None:
    async with asyncio.TaskGroup() as background:
        gateway = Gateway(background)
        await gateway.start(LIMITED)
        waiting = gateway.pending()
        _, reply = await gateway.asked()
        gateway.bus.deliver(reply, data, status=status)
        refusal = waiting.result()
        assert refusal is not None
        assert refusal.retry_after_s == 1


async def test_a_lost_broker_is_not_waited_for() -> None:
    async with asyncio.TaskGroup() as background:
        gateway = Gateway(background)
        await gateway.start(LIMITED)
        gateway.bus.is_connected = False
        waiting = gateway.pending()
        await asyncio.sleep(0)
        assert waiting.done()
        assert not gateway.bus.published


async def test_the_holder_of_the_lease_decides_unless_it_was_paused() -> None:
    async with asyncio.TaskGroup() as background:
        gateway = Gateway(background)
        await gateway.start(LIMITED)
        acquired, lost = gateway.leases.wanted[LEASE]
        acquired()
        waiting = gateway.pending()
        request, reply = await gateway.asked()
        gateway.bus.deliver(subjects.LIMIT_REQUEST, request.pack(), reply)
        ((to, answer, _),) = gateway.bus.published
        assert to == reply
        assert TokenResponse.unpack(answer).grants[0].tokens == (1.0, 1.0 * request.rows[0].wanted[1])
        gateway.bus.published.clear()
        gateway.bus.deliver(subjects.LIMIT_REQUEST, b"malformed", reply)
        gateway.leases.sure = False
        gateway.bus.deliver(subjects.LIMIT_REQUEST, request.pack(), reply)
        gateway.leases.sure = True
        lost()
        gateway.bus.deliver(subjects.LIMIT_REQUEST, request.pack(), reply)
        assert not gateway.bus.published
        assert gateway.limits.malformed == 1
        waiting.cancel()


async def test_a_successor_begins_with_empty_buckets() -> None:
    async with asyncio.TaskGroup() as background:
        gateway = Gateway(background)
        await gateway.start(LIMITED)
        gateway.leases.is_free = False
        gateway.leases.wanted[LEASE][0]()
        gateway.pending().cancel()
        request, reply = await gateway.asked()
        gateway.bus.deliver(subjects.LIMIT_REQUEST, request.pack(), reply)
        assert TokenResponse.unpack(gateway.bus.published[0][1]).grants[0].tokens[0] == 0

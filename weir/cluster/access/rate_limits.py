"""`RateLimits`: the rates that owners of requests may use, over all gateways of a cluster.

One gateway holds the lease of the token buckets and decides (`weir.access.limits.buckets`); each gateway, that one too,
asks it for small slices (`weir.access.limits.leased_buckets`). Another one takes the lease within three seconds after the
holder has died. Nothing of this runs where the policy limits no rate.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from weir.access.gate import Gate
from weir.access.limits.buckets import Buckets
from weir.access.limits.leased_buckets import SLICE_S, LeasedBuckets, Refused
from weir.access.limits.refusals import TokensPending, limit_used_up
from weir.access.policy.rules import Limits
from weir.access.principal import Principal
from weir.bus.kv.leases import Leases
from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.replies import ReplyInbox
from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.rate_limits import KINDS, Amounts, TokenRequest, TokenResponse, TokenRow

logger = logging.getLogger("weir.access")

LEASE = "rate-limits"
"""The lease of the process that decides."""

_ALWAYS_S = 1e9  # in which every bucket has filled

ANSWER_TIMEOUT_S = 0.25
"""How long requests wait for an owner that does not answer. nats-server reports at once that there is none."""


class RateLimits:
    """The rate limits at one gateway. `count_gateways` returns how many there are. Everything runs in one event loop."""

    def __init__(
        self, bus: Bus, gateway_id: str, gate: Gate, leases: Leases, count_gateways: Callable[[], int]
    ) -> None:
        self._bus = bus
        self._gate = gate
        self._leases = leases
        self._count_gateways = count_gateways
        self._replies = ReplyInbox(bus, subjects.limit_replies(gateway_id))
        self._leased = LeasedBuckets(self._on_due)
        self._buckets: Buckets | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._is_wanted = False
        self._is_ticking = False
        self._background: asyncio.TaskGroup | None = None
        self.malformed = 0

    async def start(self, background: asyncio.TaskGroup) -> Callable[[], None]:
        """Applies the limits of the policy, and of each later one; does nothing without a policy. Returns `stop`."""
        self._background = background
        if not self._gate.is_on:
            return self.stop
        await self._replies.start()
        self._gate.rates = self
        self._gate.on_policy = self._look
        self._look()
        return self.stop

    def stop(self) -> None:
        """Decides no more: another gateway does."""
        self._gate.on_policy = lambda: None
        if self._is_wanted:
            self._leave()

    def _look(self) -> None:
        """Takes the lease if the policy limits rates, and leaves it otherwise."""
        if self._gate.limits_rates and not self._is_wanted:
            self._is_wanted = True
            self._leases.acquire(LEASE, self._on_acquired, self._on_lost)
        elif self._is_wanted and not self._gate.limits_rates:
            self._leave()

    def _leave(self) -> None:
        self._is_wanted = False
        self._leases.release(LEASE)
        self._on_lost()

    # Requests

    def take(self, principal: Principal, limits: Limits, size_bytes: int) -> None:
        """Implements `TakesTokens.take`."""
        rates = limits.requests_per_s or 0.0, limits.bytes_per_s or 0.0
        cost: Amounts = 1.0, float(size_bytes)
        outcome = self._leased.take(principal.owner, rates, cost, time.monotonic())
        if outcome is True:
            return
        self._tick_later()
        if outcome is False:
            kind = 0 if rates[0] else 1
            refusal = limit_used_up(Refused(KINDS[kind], rates[kind], 0.0), principal.shown_owner)
            raise TokensPending(refusal, partial(self._wait, principal, cost))
        raise self._refusal(outcome, principal)

    def spend(self, principal: Principal, size_bytes: int) -> None:
        """Implements `TakesTokens.spend`."""
        self._leased.spend(principal.owner, (0.0, float(size_bytes)), time.monotonic())

    def _wait(self, principal: Principal, cost: Amounts, pending: TokensPending) -> asyncio.Future[WeirError | None]:
        settled: asyncio.Future[WeirError | None] = asyncio.get_running_loop().create_future()

        def settle(refused: Refused | None) -> bool:
            if settled.done():
                return False  # the client has disconnected
            error = None if refused is None else self._refusal(refused, principal)
            settled.set_result(error)
            if error is not None:
                pending.on_refused(error)
            return True

        self._leased.wait(principal.owner, cost, settle, time.monotonic())
        return settled

    def _refusal(self, refused: Refused, principal: Principal) -> WeirError:
        self._gate.refused[refused.kind] += 1
        return limit_used_up(refused, principal.shown_owner)

    def _tick_later(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            asyncio.get_running_loop().call_later(SLICE_S, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        self._leased.tick(time.monotonic())
        if not self._leased.is_idle:
            self._tick_later()

    # Asking the owner of the buckets

    def _on_due(self) -> None:
        asyncio.get_running_loop().call_soon(self._ask)

    @contained()
    def _ask(self) -> None:
        rows = self._leased.asks(time.monotonic())
        if not rows:
            return
        if not self._bus.is_connected:
            self._fail(rows)
            return
        timer = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_S, lambda: end(None))

        def end(message: Message | None) -> None:
            timer.cancel()
            self._replies.forget(reply)
            self._on_response(rows, message)

        reply = self._replies.expect(end)
        self._bus.publish(subjects.LIMIT_REQUEST, TokenRequest(rows).pack(), reply)

    def _on_response(self, rows: list[TokenRow], message: Message | None) -> None:
        if message is None or message.status:
            self._fail(rows)
            return
        try:
            grants = TokenResponse.unpack(message.data).grants
        except MalformedMessage:
            self.malformed += 1
            grants = []
        if len(grants) != len(rows):
            self._fail(rows)
            return
        now_s = time.monotonic()
        for row, grant in zip(rows, grants, strict=True):
            self._leased.answered(row, grant, now_s)

    def _fail(self, rows: list[TokenRow]) -> None:
        now_s, gateways = time.monotonic(), self._count_gateways()
        for row in rows:
            self._leased.failed(row, gateways, now_s)

    # The owner of the buckets

    def _on_acquired(self) -> None:
        now_s = time.monotonic()
        is_first = self._leases.was_free(LEASE)
        self._buckets = Buckets(now_s - _ALWAYS_S if is_first else now_s)
        logger.info("this gateway decides about rate limits%s", "" if is_first else ", after another one")
        if self._background is not None:
            self._background.create_task(self._serve())

    async def _serve(self) -> None:
        unsubscribe = await self._bus.subscribe(subjects.LIMIT_REQUEST, self._on_request)
        if self._buckets is None:
            unsubscribe()
        else:
            self._unsubscribe()
            self._unsubscribe = unsubscribe

    def _on_lost(self) -> None:
        # Without a subscriber nats-server says at once that nobody decides.
        self._buckets = None
        self._unsubscribe()

    def _on_request(self, message: Message) -> None:
        if self._buckets is None or not self._leases.is_sure(LEASE):
            return  # a process that was paused does not decide beside its successor
        if not may_reply_to(message, subjects.limit_replies("")):
            return
        try:
            rows = TokenRequest.unpack(message.data).rows
        except MalformedMessage:
            self.malformed += 1
            return
        now_s = time.monotonic()
        grants = [self._buckets.grant(row, now_s) for row in rows]
        self._bus.publish(message.reply, TokenResponse(grants).pack())

"""`LeasedBuckets`: the tokens that one gateway has at hand, and what it asks the owner of the buckets for (sans-IO).

Requests take tokens at hand and wait for nobody. A gateway that uses tokens asks for more before they are used up: for as
many as it has used lately, at most those of `SLICE_S`. A request that finds none waits for one response of the owner at
most, and is refused with the others that came too late. Tokens that are not used within `KEEP_S` go back.

So in any t seconds all gateways together let in no more than rate * t + burst + a slice for each gateway. While no owner
answers, each gateway lets in the rate divided by the number of gateways, beginning with none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from weir.access.limits.token_bucket import TokenBucket
from weir.schemas.wire.rate_limits import KINDS, MAX_ROWS, Amounts, TokenGrant, TokenRow

SLICE_S = 0.05
"""A gateway holds at most the tokens of this time, or one."""

KEEP_S = 0.1
"""How long unused tokens are kept."""

ASK_AGAIN_S = 0.25
"""The time between two requests to an owner that does not answer."""

IDLE_S = 2.0
"""How long it is remembered of an owner of requests that it has none."""

MAX_OWNERS = 10_000
"""Owners with requests within `IDLE_S`; further ones are refused."""

MAX_WAITING = 10_000
"""Requests that wait for tokens; further ones are refused."""

NO_TOKENS: Amounts = (0.0, 0.0)
_KINDS = range(len(KINDS))
_ROUNDING = 1e-6  # of a token: sums of parts of tokens are not exact


class Refused(NamedTuple):
    """Which limit is used up, its value a second, and in how many seconds there may be tokens again."""

    kind: str
    rate: float
    wait_s: float


Settle = Callable[[Refused | None], bool]
"""Lets a waiting request in (None) or refuses it. Returns False if it no longer waits, and takes no tokens then."""


class _Waiting(NamedTuple):
    cost: Amounts
    settle: Settle


class _Held:
    """What is at hand for one owner of requests."""

    __slots__ = (
        "alone",
        "alone_since_s",
        "ask_s",
        "asked",
        "changed_s",
        "empty_s",
        "is_asking",
        "lately",
        "lately_before",
        "least",
        "low",
        "overdrawn",
        "rates",
        "returned",
        "rolls_s",
        "tokens",
        "used_s",
        "waiting",
    )

    def __init__(self, rates: Amounts, now_s: float) -> None:
        self.rates = rates
        self.tokens = [0.0, 0.0]
        self.changed_s = now_s
        """When tokens came last."""
        self.lately = [0.0, 0.0]
        self.lately_before = [0.0, 0.0]
        self.rolls_s = now_s + SLICE_S
        self.low = [0.0, 0.0]
        """With fewer tokens the owner is to be asked for more."""
        self.used_s = now_s
        self.waiting: deque[_Waiting] = deque()
        self.asked = 0
        """How many of those that wait the owner was asked for."""
        self.is_asking = False
        self.empty_s = [now_s, now_s]
        """Until when the owner has no `least` tokens."""
        self.least = [0.0, 0.0]
        self.returned = [0.0, 0.0]
        self.overdrawn = [0.0, 0.0]
        self.alone: list[TokenBucket | None] | None = None
        """The buckets while no owner answers."""
        self.alone_since_s = now_s
        self.ask_s = now_s

    def covers(self, cost: Amounts) -> bool:
        """Whether there are tokens for this."""
        tokens, rates = self.tokens, self.rates
        return (not rates[0] or tokens[0] >= cost[0]) and (not rates[1] or tokens[1] >= cost[1])

    def spend(self, cost: Amounts) -> None:
        """Takes tokens that are at hand."""
        tokens, lately, rates = self.tokens, self.lately, self.rates
        if rates[0]:
            tokens[0] -= cost[0]
            lately[0] += cost[0]
        if rates[1]:
            tokens[1] -= cost[1]
            lately[1] += cost[1]

    def spend_alone(self, cost: Amounts, now_s: float) -> bool:
        """Takes tokens from the buckets of a gateway on its own; False if there are too few."""
        assert self.alone is not None  # noqa: S101 - the caller has looked
        buckets = [(bucket, cost[kind]) for kind, bucket in enumerate(self.alone) if bucket is not None]
        for number, (bucket, wanted) in enumerate(buckets):
            if wanted and not bucket.take(wanted, wanted, now_s):
                for before, taken in buckets[:number]:
                    before.give_back(taken, now_s)
                return False
        for kind in _KINDS:
            self.overdrawn[kind] += cost[kind]  # the next owner that answers is told
        return True

    def roll(self, now_s: float) -> None:
        """Counts what is used lately in times of a slice."""
        if now_s >= self.rolls_s:
            self.lately_before = self.lately if now_s < self.rolls_s + SLICE_S else [0.0, 0.0]
            self.lately = [0.0, 0.0]
            self.rolls_s = now_s + SLICE_S
            if any(self.lately_before):
                self.used_s = now_s
        self.low = [self.target(0) / 4, self.target(1) / 4]

    def target(self, kind: int) -> float:
        """How many tokens to have at hand: as many as were used lately."""
        rate = self.rates[kind]
        return min(max(1.0, rate * SLICE_S), max(self.lately[kind] - 1, self.lately_before[kind])) if rate else 0.0

    def is_low(self) -> bool:
        """Whether more tokens are needed soon."""
        tokens = self.tokens
        return 4 * tokens[0] < self.target(0) or 4 * tokens[1] < self.target(1)

    def refusal(self, cost: Amounts, now_s: float) -> Refused:
        """Why a request of this cost is refused."""
        lacking = [kind for kind in _KINDS if self.rates[kind] and self.tokens[kind] < cost[kind]]
        kind = max(lacking, key=self.empty_s.__getitem__, default=0)
        if self.alone is not None:
            bucket = self.alone[kind]
            wait_s = 0.0 if bucket is None else bucket.wait_s(cost[kind], now_s)
        else:
            wait_s = max(0.0, self.empty_s[kind] - now_s)
        return Refused(KINDS[kind], self.rates[kind], wait_s)

    def is_empty(self, cost: Amounts, now_s: float) -> bool:
        """Whether the owner has said that it has no tokens for this before a time to come."""
        return any(
            self.rates[kind] and self.tokens[kind] < cost[kind] and now_s < self.empty_s[kind] and cost[kind] >= least
            for kind, least in enumerate(self.least)
        )

    def change_rates(self, rates: Amounts, now_s: float) -> None:
        """Goes by other limits from now on. Tokens at hand stay: they are those of a slice."""
        self.rates = rates
        self.empty_s = [now_s, now_s]
        if self.alone is not None:
            self.alone = None
            self.ask_s = now_s

    @property
    def has_returns(self) -> bool:
        """Whether the owner is to be told of tokens that were not used, or used without being given."""
        return any(self.returned) or any(self.overdrawn)


class LeasedBuckets:
    """All times are seconds of one monotonic clock. `on_due` is called when there is something to ask the owner for."""

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._held: dict[str, _Held] = {}
        self._due: dict[str, _Held] = {}
        self._waiting = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is at hand and nothing waits, so that `tick` has nothing to do."""
        return not self._held

    # Requests

    def take(self, owner: str, rates: Amounts, cost: Amounts, now_s: float) -> Refused | bool:
        """Takes what a request costs: True if it may go on, False if it may wait (`wait`), or why it may not.

        `rates` are the limits of its owner a second, 0 for none.
        """
        held = self._held.get(owner)
        if held is not None and now_s < held.rolls_s and held.rates == rates:
            # Most requests: there are enough tokens, and no others wait.
            tokens, low = held.tokens, held.low
            left, left_bytes = tokens[0] - cost[0], tokens[1] - cost[1]
            if (left >= low[0] or not rates[0]) and (left_bytes >= low[1] or not rates[1]) and not held.waiting:
                held.spend(cost)
                return True
        if held is None:
            if len(self._held) >= MAX_OWNERS:
                return Refused(KINDS[0], rates[0], 1.0)
            held = self._held[owner] = _Held(rates, now_s)
        elif held.rates != rates:
            held.change_rates(rates, now_s)
        held.roll(now_s)
        held.used_s = now_s
        if not held.waiting and held.covers(cost):
            held.spend(cost)
            if not held.is_asking and held.is_low():
                self._want(owner, held, now_s)
            return True
        if held.alone is not None:
            self._want(owner, held, now_s)
            return True if held.spend_alone(cost, now_s) else held.refusal(cost, now_s)
        if held.is_empty(cost, now_s) or self._waiting >= MAX_WAITING:
            return held.refusal(cost, now_s)
        return False

    def wait(self, owner: str, cost: Amounts, settle: Settle, now_s: float) -> None:
        """Has a request wait for which `take` has returned False, at the same time."""
        held = self._held[owner]
        held.waiting.append(_Waiting(cost, settle))
        self._waiting += 1
        self._want(owner, held, now_s)

    def spend(self, owner: str, cost: Amounts, now_s: float) -> None:
        """Counts what was used without asking: a body whose size was not announced."""
        held = self._held.get(owner)
        if held is not None:
            for kind in _KINDS:
                held.overdrawn[kind] += cost[kind]
            self._want(owner, held, now_s)

    # The owner of the buckets

    def asks(self, now_s: float) -> list[TokenRow]:
        """What to ask the owner for now. Each row is followed by `answered` or `failed`."""
        rows: list[TokenRow] = []
        while self._due and len(rows) < MAX_ROWS:
            owner, held = self._due.popitem()
            held.is_asking = True
            held.asked = len(held.waiting)
            wanted, least = list(NO_TOKENS), list(NO_TOKENS)
            for kind in _KINDS:
                if held.rates[kind]:
                    waiting = sum(each.cost[kind] for each in held.waiting)
                    wanted[kind] = max(0.0, waiting + held.target(kind) - held.tokens[kind])
                    first = held.waiting[0].cost[kind] - held.tokens[kind] if held.waiting else 1.0
                    least[kind] = min(wanted[kind], max(0.0, first))
            returned, held.returned = (held.returned[0], held.returned[1]), [0.0, 0.0]
            used, held.overdrawn = (held.overdrawn[0], held.overdrawn[1]), [0.0, 0.0]
            alone_s = 0.0 if held.alone is None else now_s - held.alone_since_s
            row = TokenRow(owner, held.rates, (wanted[0], wanted[1]), (least[0], least[1]), returned, used, alone_s)
            rows.append(row)
        if self._due:
            self._on_due()
        return rows

    def answered(self, row: TokenRow, grant: TokenGrant, now_s: float) -> None:
        """The owner has granted these tokens."""
        held = self._held.get(row.owner)
        if held is None:
            return  # the tokens are lost: fewer than allowed are used
        held.is_asking = False
        held.alone = None
        for kind in _KINDS:
            if held.rates[kind]:
                held.tokens[kind] += grant.tokens[kind]
            if grant.wait_s[kind]:
                held.empty_s[kind] = now_s + grant.wait_s[kind]
                held.least[kind] = row.least[kind]
            if grant.tokens[kind]:
                held.changed_s = now_s
        self._settle(row.owner, held, now_s)

    def failed(self, row: TokenRow, gateways: int, now_s: float) -> None:
        """No owner has answered: until one does, this is one of so many gateways that each take their part."""
        held = self._held.get(row.owner)
        if held is None:
            return
        held.is_asking = False
        held.ask_s = now_s + ASK_AGAIN_S
        for kind in _KINDS:
            held.overdrawn[kind] += row.used[kind]  # told again: rather twice than never
        if held.alone is None:
            held.alone_since_s = now_s
            held.alone = [TokenBucket(rate / max(1, gateways), now_s) if rate else None for rate in held.rates]
        self._settle(row.owner, held, now_s)

    def tick(self, now_s: float) -> None:
        """Gives unused tokens back. Called each `SLICE_S`, unless `is_idle`."""
        for owner, held in list(self._held.items()):
            held.roll(now_s)
            if now_s - held.changed_s >= KEEP_S and any(token > _ROUNDING for token in held.tokens):
                for kind in _KINDS:
                    held.returned[kind] += max(0.0, held.tokens[kind])
                    held.tokens[kind] = 0.0
            if held.has_returns:
                self._want(owner, held, now_s)
            elif not held.waiting and not held.is_asking and now_s - held.used_s >= IDLE_S:
                del self._held[owner]
                self._due.pop(owner, None)

    def _want(self, owner: str, held: _Held, now_s: float) -> None:
        """Asks the owner of the buckets soon, unless it is asked already, or has said that it is too early."""
        is_early = held.alone is not None and now_s < held.ask_s
        if not held.waiting and not held.has_returns and held.alone is None:
            is_early = any(now_s < empty_s for empty_s in held.empty_s)
        if held.is_asking or is_early or owner in self._due:
            return
        if not self._due:
            self._on_due()
        self._due[owner] = held

    def _settle(self, owner: str, held: _Held, now_s: float) -> None:
        """Lets in those that wait while there are tokens, and refuses those for which the owner was asked in vain."""
        waiting, asked = held.waiting, held.asked
        held.asked = 0
        while waiting:
            cost, settle = waiting[0]
            is_let_in = held.covers(cost) or (held.alone is not None and held.spend_alone(cost, now_s))
            if not is_let_in and asked <= 0 and held.alone is None and not held.is_empty(cost, now_s):
                break  # it came after the owner was asked, and has its turn with the next response
            waiting.popleft()
            self._waiting -= 1
            asked -= 1
            if not is_let_in:
                settle(held.refusal(cost, now_s))
            elif settle(None) and held.covers(cost):
                held.spend(cost)
        if waiting or held.is_low():
            self._want(owner, held, now_s)

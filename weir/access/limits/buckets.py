"""`Buckets`: the token buckets of all owners of requests, in the one process of a cluster that decides (sans-IO)."""

from __future__ import annotations

from weir.access.limits.token_bucket import TokenBucket
from weir.schemas.wire.rate_limits import TokenGrant, TokenRow

MAX_OWNERS = 100_000
"""Owners whose buckets are kept. Full buckets are dropped first: made again, they are full again."""

LEAST_WAIT_S = 0.005
"""The shortest time after which a gateway is to ask again, so that an empty bucket is not asked for each token."""

_NO_ROOM_WAIT_S = 1.0


class Buckets:
    """Made by the process that became the owner at `since_s`, by the clock of all times (seconds).

    What was granted before is not known, so each bucket counts as empty at that time.
    """

    def __init__(self, since_s: float) -> None:
        self._since_s = since_s
        self._buckets: dict[str, list[TokenBucket | None]] = {}
        self._dropped_s = since_s

    def grant(self, row: TokenRow, now_s: float) -> TokenGrant:
        """Decides one row of a gateway's request."""
        buckets = self._of(row, now_s)
        if buckets is None:
            return TokenGrant((0.0, 0.0), (_NO_ROOM_WAIT_S, _NO_ROOM_WAIT_S))
        (requests, requests_wait), (bytes_, bytes_wait) = (
            self._granted(bucket, row, kind, now_s) for kind, bucket in enumerate(buckets)
        )
        return TokenGrant((requests, bytes_), (requests_wait, bytes_wait))

    def __len__(self) -> int:
        return len(self._buckets)

    def _of(self, row: TokenRow, now_s: float) -> list[TokenBucket | None] | None:
        """The buckets of the row's owner, with the rates of the row; None where there is no room for more."""
        buckets = self._buckets.get(row.owner)
        if buckets is None:
            if len(self._buckets) >= MAX_OWNERS and not self._drop_full(now_s):
                return None
            buckets = self._buckets[row.owner] = [None, None]
        for kind, rate in enumerate(row.rates):
            bucket = buckets[kind]
            if not rate:
                buckets[kind] = None
            elif bucket is None:
                buckets[kind] = TokenBucket(rate, now_s, rate * (now_s - self._since_s))
            elif bucket.rate != rate:
                bucket.change_rate(rate, now_s)
        return buckets

    def _drop_full(self, now_s: float) -> bool:
        """Drops the owners with full buckets, once a second; returns whether there were any."""
        if now_s < self._dropped_s + _NO_ROOM_WAIT_S:
            return False
        self._dropped_s = now_s
        full = [
            owner
            for owner, buckets in self._buckets.items()
            if all(bucket is None or bucket.level(now_s) >= bucket.burst for bucket in buckets)
        ]
        for owner in full:
            del self._buckets[owner]
        return bool(full)

    def _granted(self, bucket: TokenBucket | None, row: TokenRow, kind: int, now_s: float) -> tuple[float, float]:
        """The tokens of one kind, and the time after which to ask again; 0 where all that was wanted is granted."""
        wanted, least = row.wanted[kind], row.least[kind]
        if bucket is None:
            return wanted, 0.0
        if row.returned[kind]:
            bucket.give_back(row.returned[kind], now_s)
        if row.used[kind]:
            # What was used before this process became the owner was never in its buckets.
            part = min(1.0, (now_s - self._since_s) / row.alone_s) if row.alone_s else 1.0
            bucket.spend(part * row.used[kind], now_s)
        if not wanted:
            return 0.0, 0.0
        tokens = bucket.take(wanted, least, now_s)
        return tokens, 0.0 if tokens >= wanted else max(LEAST_WAIT_S, bucket.wait_s(least, now_s))

"""The errors of requests beyond the limits of their owner, with the headers from which clients learn when to come again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import ceil, floor

from weir.access.limits.leased_buckets import Refused
from weir.access.principal import NOBODY
from weir.schemas.core.errors import ErrorCode, WeirError, invalid, retry_after_s

_UNITS = {"requests": "", "bytes": ';qu="content-bytes"'}


def limit_used_up(refused: Refused, who: str) -> WeirError:
    """The RESOURCE_EXHAUSTED error (HTTP 429) for a request beyond a rate. `who` is the owner of the limit, for people.

    Source: draft-ietf-httpapi-ratelimit-headers (`RateLimit`, `RateLimit-Policy`). The reset of `X-RateLimit-*`, which more
    clients know, is in seconds from now.
    """
    kind, rate, wait_s = refused
    seconds = retry_after_s(wait_s * 1e6)
    quota, window_s = (floor(rate), 1) if rate >= 1 else (1, ceil(1 / rate))
    error = WeirError(ErrorCode.RESOURCE_EXHAUSTED, f"limit of {_shown(rate)} {kind}/s of '{who}' is used up", seconds)
    error.headers = (
        ("RateLimit", f'"{kind}";r=0;t={seconds}'),
        ("RateLimit-Policy", f'"{kind}";q={quota};w={window_s}{_UNITS[kind]}'),
        ("X-RateLimit-Limit", str(quota)),
        ("X-RateLimit-Remaining", "0"),
        ("X-RateLimit-Reset", str(seconds)),
    )
    return error


def body_too_large(size_bytes: int, limit_bytes: int, who: str) -> WeirError:
    """The INVALID_ARG error for a body that is larger than its owner may send."""
    return invalid(f"request of {size_bytes} bytes exceeds the limit of {limit_bytes} bytes of '{who}'")


class TokensPending(WeirError):
    """The request finds no tokens at hand, and may wait for one response of the owner of the buckets.

    A door that does not `wait` refuses it with this error, and takes no tokens.
    """

    def __init__(self, refusal: WeirError, wait: Callable[[TokensPending], asyncio.Future[WeirError | None]]) -> None:
        super().__init__(refusal.code, refusal.message, refusal.retry_after_s)
        self.headers = refusal.headers
        self._wait = wait
        self.principal = NOBODY
        """Who sends the request."""
        self.on_refused: Callable[[WeirError], None] = lambda _error: None
        """Called with the error if the request is refused after it has waited."""

    def wait(self) -> asyncio.Future[WeirError | None]:
        """Waits for tokens: None once the request has them, or the error that refuses it. May be cancelled."""
        return self._wait(self)


def _shown(rate: float) -> str:
    return str(int(rate)) if rate == int(rate) else f"{rate:.6g}"

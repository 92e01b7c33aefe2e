"""`DurableRetryPolicy`: what follows from one attempt at a durable request.

| the attempt ended with | class | outcome |
|---|---|---|
| a response | | succeeded |
| any other error than those below, after the request's deadline, or once it is older than its queue keeps requests \
| LATE | expired |
| an error of class LATE: the request's own timeout has passed | LATE | expired |
| CANCELLED | CANCELLED | cancelled |
| an error that is independent of the request: a full queue, an unavailable broker | SERVER | retried without a limit; \
the attempt does not count |
| an unknown model or version | UNKNOWN_MODEL | as SERVER for `UNKNOWN_MODEL_TIMEOUT_MS`, because its worker may be \
starting; then dead-lettered |
| the death of each worker that ran it (the scheduler has retried it) | POISON | dead-lettered |
| an error that would come again | FINAL | failed |
| a transient error | TRANSIENT | retried up to `max_attempts` attempts in all; then dead-lettered |

`weir.calls.error_classes` assigns the classes. The delay before a retry is 0.1 s, doubled each time up to 30 s, with a
jitter that is a function of the request's id. The policy depends on its arguments alone, so its decisions can be
replayed.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import msgspec

from weir.calls.error_classes import ErrorClass, classify_error
from weir.schemas.core.errors import WeirError
from weir.schemas.wire.terminal import Attempt, Outcome

FIRST_DELAY_MS = 100
MAX_DELAY_MS = 30_000

UNKNOWN_MODEL_TIMEOUT_MS = 30_000
"""How long a model may be unknown: as long as the scheduler waits for an instance of a known model."""

MAX_HISTORY = 16
"""Failed attempts that are remembered of one request, the latest ones."""

TIMEOUT_EXPIRED = "Request timeout expired"

_JITTER = 0.25  # of the delay, to either side
_RETRIED = (ErrorClass.SERVER, ErrorClass.UNKNOWN_MODEL, ErrorClass.TRANSIENT)


class AttemptHistory(msgspec.Struct, gc=False):
    """The attempts at one durable request, and its limits. Times are unix milliseconds, 0 for none.

    `has_timeout`: the request has a timeout of its own (KServe's parameter). `attempts` counts the attempts that count,
    `waits` the consecutive ones that do not, `history` holds the failed ones, oldest first.
    """

    id: str
    accepted_ms: int
    deadline_ms: int = 0
    max_age_ms: int = 0
    has_timeout: bool = False
    attempts: int = 0
    waits: int = 0
    unknown_since_ms: int = 0
    history: list[Attempt] = msgspec.field(default_factory=list)

    @property
    def expires_ms(self) -> int:
        """When the request expires; 0 for never."""
        old_ms = self.accepted_ms + self.max_age_ms if self.max_age_ms else 0
        deadline_ms = self.deadline_ms
        return min(deadline_ms, old_ms) if deadline_ms and old_ms else deadline_ms or old_ms

    def is_expired(self, now_ms: int) -> bool:
        """Whether its response would be of no use any more."""
        return 0 < self.expires_ms <= now_ms

    def add_failure(self, now_ms: int, reason: str) -> None:
        """Notes an attempt that failed at `now_ms`; the oldest one is dropped beyond `MAX_HISTORY`."""
        self.history.append(Attempt(now_ms, reason))
        del self.history[:-MAX_HISTORY]


class RetryDecision(NamedTuple):
    """What happens next: the request ends with `outcome`, or (None) is retried at `at_ms`; and why."""

    outcome: Outcome | None
    at_ms: int = 0
    reason: str = ""


_SUCCEEDED = RetryDecision(Outcome.SUCCEEDED)


class DurableRetryPolicy:
    """Decides by the table of the module's description. The maximum age is part of a request's `AttemptHistory`."""

    def __init__(self, max_attempts: int, unknown_model_timeout_ms: int = UNKNOWN_MODEL_TIMEOUT_MS) -> None:
        self._max_attempts = max_attempts
        self._unknown_model_timeout_ms = unknown_model_timeout_ms

    def before(self, now_ms: int, attempts: AttemptHistory) -> RetryDecision | None:
        """The end of a request whose turn it is, if it has expired; None where it may run."""
        if not attempts.is_expired(now_ms):
            return None
        return RetryDecision(Outcome.EXPIRED, reason=expiry_reason(now_ms, attempts))

    def after(self, now_ms: int, error: WeirError | None, attempts: AttemptHistory) -> RetryDecision:
        """What follows from an attempt that ended with `error` (None: with a response), which is added to `attempts`."""
        if error is None:
            attempts.attempts += 1
            return _SUCCEEDED
        kind = classify_attempt(now_ms, error, attempts)
        self._add(now_ms, error, kind, attempts)
        if kind is ErrorClass.LATE:
            return RetryDecision(Outcome.EXPIRED, reason=expiry_reason(now_ms, attempts))
        if kind is ErrorClass.CANCELLED:
            return RetryDecision(Outcome.CANCELLED, reason=error.message)
        if kind is ErrorClass.FINAL:
            return RetryDecision(Outcome.FAILED, reason=error.message)
        if kind is ErrorClass.POISON or self._is_unknown_for_long(now_ms, kind, attempts):
            return RetryDecision(Outcome.DEAD_LETTERED, reason=error.message)
        if kind is ErrorClass.TRANSIENT and attempts.attempts >= self._max_attempts:
            reason = f"gave up after {attempts.attempts} attempts: {error.message}"
            return RetryDecision(Outcome.DEAD_LETTERED, reason=reason)
        return RetryDecision(None, self._next_ms(now_ms, kind, attempts), error.message)

    def _is_unknown_for_long(self, now_ms: int, kind: ErrorClass, attempts: AttemptHistory) -> bool:
        unknown_ms = now_ms - attempts.unknown_since_ms
        return kind is ErrorClass.UNKNOWN_MODEL and unknown_ms >= self._unknown_model_timeout_ms

    def _add(self, now_ms: int, error: WeirError, kind: ErrorClass, attempts: AttemptHistory) -> None:
        if kind is not ErrorClass.UNKNOWN_MODEL:
            attempts.unknown_since_ms = 0
        elif not attempts.unknown_since_ms:
            attempts.unknown_since_ms = now_ms
        if kind is ErrorClass.SERVER or kind is ErrorClass.UNKNOWN_MODEL:
            attempts.waits += 1
            # An error that repeats for days takes one entry, with the time of the latest.
            if attempts.history and attempts.history[-1].reason == error.message:
                attempts.history.pop()
        else:
            attempts.waits = 0
            attempts.attempts += 1
        attempts.add_failure(now_ms, error.message)

    def _next_ms(self, now_ms: int, kind: ErrorClass, attempts: AttemptHistory) -> int:
        number = attempts.attempts if kind is ErrorClass.TRANSIENT else attempts.waits
        at_ms = now_ms + retry_delay_ms(attempts.id, number)
        if kind is ErrorClass.UNKNOWN_MODEL:
            until_ms = attempts.unknown_since_ms + self._unknown_model_timeout_ms
            at_ms = min(at_ms, max(until_ms, now_ms + FIRST_DELAY_MS))
        expires_ms = attempts.expires_ms
        if not expires_ms or at_ms < expires_ms:
            return at_ms
        # The delay exceeds the time that is left: one more attempt runs after half of it, unless too little is left.
        return min(expires_ms, max(now_ms + (expires_ms - now_ms) // 2, now_ms + FIRST_DELAY_MS))


def classify_attempt(now_ms: int, error: WeirError, attempts: AttemptHistory) -> ErrorClass:
    """The class of `error`, with which an attempt ended at `now_ms`."""
    kind = classify_error(error, attempts.has_timeout)
    return ErrorClass.LATE if kind in _RETRIED and attempts.is_expired(now_ms) else kind


def retry_delay_ms(id: str, number: int) -> int:
    """The delay before the `number`th consecutive retry (from 1) of the request with this id."""
    delay = min(FIRST_DELAY_MS << min(number - 1, 20), MAX_DELAY_MS)
    share = zlib.crc32(f"{number}:{id}".encode()) / 0xFFFFFFFF  # 0 to 1
    return min(int(delay * (1 - _JITTER + 2 * _JITTER * share)), MAX_DELAY_MS)


def expiry_reason(now_ms: int, attempts: AttemptHistory) -> str:
    """Why a request has expired, as its record states it."""
    if 0 < attempts.deadline_ms <= now_ms or not attempts.is_expired(now_ms):
        return TIMEOUT_EXPIRED
    return f"the request has waited for longer than {attempts.max_age_ms / 1000:g} s"

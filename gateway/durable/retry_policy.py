"""`RetryPolicy`: what becomes of a durable request after one try of it.

| what came back | class | what becomes of it |
|---|---|---|
| an answer | | succeeded |
| anything, after its deadline, or when it is older than its queue keeps requests | LATE | expired |
| TIMED_OUT, and the request itself named a timeout | LATE | expired |
| CANCELLED | CANCELLED | cancelled |
| the queue or a gateway is full; no version is there, or ready; the server stops; the broker is away or full | NOBODYS | \
tried again, for ever, and doesn't count |
| the model, or its version, is unknown | UNKNOWN | as NOBODYS for some time, for whoever has it may be starting; \
then dead-lettered |
| its worker or process died each time it ran (the scheduler has tried it several times) | POISON | dead-lettered |
| a sequence whose state is lost or that has ended; content in a client's memory that is gone | FINAL | failed |
| any other UNAVAILABLE or RESOURCE_EXHAUSTED, as a model may answer | PASSING | tried again, \
at most `max_attempts` times in all; then dead-lettered |
| any other error | FINAL | failed |

Errors are told by their `Reason`; errors of models have none, whatever they say. Between two tries lie 0.1 s, doubling up
to 30 s, with a jitter that follows from the request's id alone: what decides here are the arguments, so it can be replayed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from schemas.errors import ErrorCode, Reason, WeirError
from schemas.terminal import Attempt, Outcome

FIRST_DELAY_MS = 100
MAX_DELAY_MS = 30_000

UNKNOWN_PATIENCE_MS = 30_000
"""How long a model may be unknown: as long as the scheduler waits for an instance of one that is known."""

MAX_HISTORY = 16
"""Tries that are remembered of one request, the last ones."""

_JITTER = 0.25  # of the delay, to either side


class ErrorClass(Enum):
    """See the table of the module."""

    LATE = "late"
    CANCELLED = "cancelled"
    NOBODYS = "nobody's fault"
    UNKNOWN = "unknown model"
    POISON = "poison"
    PASSING = "passing"
    FINAL = "final"


TIMEOUT_EXPIRED = "Request timeout expired"

NOBODYS_REASONS = frozenset(
    {Reason.QUEUE_FULL, Reason.NOT_READY, Reason.STOPPING, Reason.BROKER_AWAY, Reason.BROKER_FULL}
)
"""Reasons that say nothing of the request."""

FINAL_REASONS = frozenset({Reason.SEQUENCE_LOST, Reason.NOT_REPEATABLE})
"""Reasons for which the same request would fail again."""


@dataclass(slots=True)
class Trials:
    """One durable request, as far as it matters to what becomes of it. Times are unix milliseconds, 0 for none.

    `names_timeout` says that the request has a timeout of its own (KServe's parameter). `attempts` counts the tries that
    count, `waits` those in a row that don't, `history` tells of tries that came to nothing, oldest first.
    """

    id: str
    accepted_ms: int
    deadline_ms: int = 0
    max_age_ms: int = 0
    names_timeout: bool = False
    attempts: int = 0
    waits: int = 0
    unknown_since_ms: int = 0
    history: list[Attempt] = field(default_factory=list)

    @property
    def ends_ms(self) -> int:
        """When it expires; 0 for never."""
        old_ms = self.accepted_ms + self.max_age_ms if self.max_age_ms else 0
        deadline_ms = self.deadline_ms
        return min(deadline_ms, old_ms) if deadline_ms and old_ms else deadline_ms or old_ms

    def is_late(self, now_ms: int) -> bool:
        """Whether nobody wants its answer any more."""
        return 0 < self.ends_ms <= now_ms


class Decision(NamedTuple):
    """What becomes of a request: it ends with `outcome`, or (None) is tried again at `at_ms`, and why."""

    outcome: Outcome | None
    at_ms: int = 0
    reason: str = ""


class RetryPolicy:
    """See the module. A request's `max_age_ms` is with its trials, for it may be its model's own."""

    def __init__(self, max_attempts: int, unknown_patience_ms: int = UNKNOWN_PATIENCE_MS) -> None:
        self._max_attempts = max_attempts
        self._unknown_patience_ms = unknown_patience_ms

    def before(self, now_ms: int, trials: Trials) -> Decision | None:
        """How a request ends that was about to be begun; None where it may begin."""
        return Decision(Outcome.EXPIRED, reason=late_reason(now_ms, trials)) if trials.is_late(now_ms) else None

    def after(self, now_ms: int, error: WeirError | None, trials: Trials) -> Decision:
        """What becomes of a request that was tried, with the `error` that came of it (None: an answer); notes the try."""
        if error is None:
            trials.attempts += 1
            return Decision(Outcome.SUCCEEDED)
        kind = classify_error(now_ms, error, trials)
        self._note(now_ms, error, kind, trials)
        if kind is ErrorClass.LATE:
            return Decision(Outcome.EXPIRED, reason=late_reason(now_ms, trials))
        if kind is ErrorClass.CANCELLED:
            return Decision(Outcome.CANCELLED, reason=error.message)
        if kind is ErrorClass.FINAL:
            return Decision(Outcome.FAILED, reason=error.message)
        if kind is ErrorClass.POISON:
            return Decision(Outcome.DEAD_LETTERED, reason=error.message)
        if kind is ErrorClass.UNKNOWN and now_ms - trials.unknown_since_ms >= self._unknown_patience_ms:
            return Decision(Outcome.DEAD_LETTERED, reason=error.message)
        if kind is ErrorClass.PASSING and trials.attempts >= self._max_attempts:
            return Decision(Outcome.DEAD_LETTERED, reason=f"gave up after {trials.attempts} attempts: {error.message}")
        return Decision(None, self._next_ms(now_ms, kind, trials), error.message)

    def _note(self, now_ms: int, error: WeirError, kind: ErrorClass, trials: Trials) -> None:
        if kind is not ErrorClass.UNKNOWN:
            trials.unknown_since_ms = 0
        elif not trials.unknown_since_ms:
            trials.unknown_since_ms = now_ms
        if kind is ErrorClass.NOBODYS or kind is ErrorClass.UNKNOWN:
            trials.waits += 1
            # What repeats itself for days is told once, as it was last.
            if trials.history and trials.history[-1].reason == error.message:
                trials.history.pop()
        else:
            trials.waits = 0
            trials.attempts += 1
        trials.history.append(Attempt(now_ms, error.message))
        del trials.history[:-MAX_HISTORY]

    def _next_ms(self, now_ms: int, kind: ErrorClass, trials: Trials) -> int:
        at_ms = now_ms + delay_ms(trials.id, trials.attempts if kind is ErrorClass.PASSING else trials.waits)
        if kind is ErrorClass.UNKNOWN:
            at_ms = min(at_ms, max(trials.unknown_since_ms + self._unknown_patience_ms, now_ms + FIRST_DELAY_MS))
        ends_ms = trials.ends_ms
        if not ends_ms or at_ms < ends_ms:
            return at_ms
        # The delay is longer than what is left. Half of that is a chance yet; in the last moments there is none.
        return min(ends_ms, max(now_ms + (ends_ms - now_ms) // 2, now_ms + FIRST_DELAY_MS))


def classify_error(now_ms: int, error: WeirError, trials: Trials) -> ErrorClass:
    """The class of `error`, which a request got at `now_ms`."""
    if error.code is ErrorCode.CANCELLED:
        return ErrorClass.CANCELLED
    if error.reason is Reason.KILLED_WORKERS:
        return ErrorClass.POISON
    if error.reason in NOBODYS_REASONS:
        kind = ErrorClass.NOBODYS
    elif error.reason is Reason.UNKNOWN_MODEL:
        kind = ErrorClass.UNKNOWN
    elif not error.retryable or error.reason in FINAL_REASONS:
        return ErrorClass.FINAL
    elif error.reason is Reason.TIMED_OUT and trials.names_timeout:
        return ErrorClass.LATE
    else:
        kind = ErrorClass.PASSING
    return ErrorClass.LATE if trials.is_late(now_ms) else kind


def delay_ms(id: str, number: int) -> int:
    """How long to wait before a request is tried again, for the `number`th time (from 1) in a row."""
    delay = min(FIRST_DELAY_MS << min(number - 1, 20), MAX_DELAY_MS)
    share = zlib.crc32(f"{number}:{id}".encode()) / 0xFFFFFFFF  # 0 to 1
    return min(int(delay * (1 - _JITTER + 2 * _JITTER * share)), MAX_DELAY_MS)


def late_reason(now_ms: int, trials: Trials) -> str:
    """Why a request expires, as its caller is told."""
    if 0 < trials.deadline_ms <= now_ms or not trials.is_late(now_ms):
        return TIMEOUT_EXPIRED
    return f"the request has waited for longer than {trials.max_age_ms / 1000:g} s"

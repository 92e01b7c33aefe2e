"""`RemoteAnswers`: answers whose outputs lie on other hosts, until those have been brought here.

What else comes for the same request waits behind, in its order; other requests don't. An answer whose outputs can't be
brought, for their worker has gone, was never given: the request may run again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from bus.fetch_plan import Loss, Outcome
from bus.identity import lies_elsewhere
from bus.payload_fetcher import PayloadFetcher
from calls.pending import Pending
from runtime.containment import contained
from schemas.messages import Answer
from schemas.tensors import PayloadRef, Tensor

MAX_HELD = 10_000
"""Answers of all requests that wait; one more is lost."""


class _Held:
    __slots__ = ("answer", "awaited", "fetches", "is_lost", "pending", "version")

    def __init__(self, pending: Pending, version: int, answer: Answer) -> None:
        self.pending = pending
        self.version = version
        self.answer = answer
        self.awaited = 0
        self.is_lost = False


class RemoteAnswers:
    """See the module. `complete(pending, version, answer)` takes an answer that is whole, `lost(pending, answer)` hears of
    one that can't be; `release` gives a slot back, `discard` all those of an answer.

    Without a `fetcher` nothing can be brought.
    """

    def __init__(
        self,
        fetcher: PayloadFetcher | None,
        complete: Callable[[Pending, int, Answer], None],
        lost: Callable[[Pending, Answer], None],
        release: Callable[[PayloadRef], None],
        discard: Callable[[Answer], None],
    ) -> None:
        self._fetcher = fetcher
        self._complete = complete
        self._lost = lost
        self._release = release
        self._discard = discard
        self._lines: dict[int, deque[_Held]] = {}
        self._held = 0

    def holds(self, pending: Pending, version: int, answer: Answer, passes_on: bool) -> bool:
        """Whether the answer waits, and is completed later. Who `passes_on` references reads what lies behind none."""
        line = self._lines.get(pending.key) if self._lines else None
        if line is None:
            if passes_on or not any(map(_is_elsewhere, answer.outputs or ())):
                return False
            line = self._lines[pending.key] = deque()
        elif not answer.run:
            self._discard(answer)  # the request has run twice: one of its answers is being brought
            return True
        held = _Held(pending, version, answer)
        line.append(held)
        self._held += 1
        held.is_lost = self._held > MAX_HELD or self._fetcher is None
        if self._fetcher is not None and not held.is_lost and not passes_on:
            for tensor in answer.outputs or ():
                if _is_elsewhere(tensor) and isinstance(tensor.data, PayloadRef):
                    held.awaited += 1
                    self._fetch(self._fetcher, held, tensor, tensor.data)
        self._go_on(pending.key)
        return True

    @contained(on_error="_fetch_failed")
    def _fetch(self, fetcher: PayloadFetcher, held: _Held, tensor: Tensor, ref: PayloadRef) -> None:
        fetcher.fetch(ref, partial(self._came, held, tensor, ref))

    def _fetch_failed(
        self, _error: Exception, _fetcher: PayloadFetcher, held: _Held, _tensor: Tensor, _ref: PayloadRef
    ) -> None:
        held.awaited -= 1
        held.is_lost = True

    @contained(on_error="_coming_failed")
    def _came(self, held: _Held, tensor: Tensor, ref: PayloadRef, outcome: Outcome) -> None:
        held.awaited -= 1
        if isinstance(outcome, Loss):
            held.is_lost = True
        else:
            tensor.data = outcome
            self._release(ref)
        self._go_on(held.pending.key)

    def _coming_failed(self, _error: Exception, held: _Held, *_: object) -> None:
        held.is_lost = True
        self._go_on(held.pending.key)

    def _go_on(self, key: int) -> None:
        line = self._lines.get(key)
        while line and not line[0].awaited:
            held = line.popleft()
            self._held -= 1
            if not line:
                self._lines.pop(key, None)
            if held.is_lost:
                self._discard(held.answer)
                self._lost(held.pending, held.answer)
            else:
                self._complete(held.pending, held.version, held.answer)


def _is_elsewhere(tensor: Tensor) -> bool:
    return isinstance(tensor.data, PayloadRef) and lies_elsewhere(tensor.data.segment)

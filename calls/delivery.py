"""`Delivery`: answers on their last step, to whoever asked: past the trace, and in order where that is to be preserved."""

from __future__ import annotations

from collections.abc import Callable

from calls.answer_order import AnswerOrder
from calls.in_flight import InFlight
from calls.pending import Line, Pending
from calls.tracing import Tracing
from runtime.containment import contained
from schemas.errors import WeirError, internal, overloaded
from schemas.messages import Moments
from schemas.requests import InferResponse

UNEXPECTED = "an unexpected error occurred while the response was handled; the server's log has the details"

_TOO_MANY_HELD = "too many responses wait for those of earlier requests"

Outcome = InferResponse | WeirError | None
"""A response, an error, or the end of responses alone."""


class Delivery:
    """See the module. `give_up(pending)` is called with a request that is ended from here, `discard` with each response
    that is taken in and given to nobody.

    The order is that of submission among the requests of one version of a model. It is kept here and nowhere else: what
    runs when is none of its business, and the order among different callers can't be seen by anybody.
    """

    def __init__(
        self,
        tracing: Tracing,
        in_flight: InFlight,
        give_up: Callable[[Pending], object],
        discard: Callable[[InferResponse], None],
    ) -> None:
        self._tracing = tracing
        self._in_flight = in_flight
        self._give_up = give_up
        self._discard = discard
        self._order: AnswerOrder[tuple[Pending, Outcome, bool, Moments | None]] = AnswerOrder()
        self._lines_due: list[Line] = []

    def line_up(self, pending: Pending) -> None:
        """A request was submitted whose answers are to wait for those of all before it."""
        pending.line = pending.model.name, pending.request.model_version or pending.model.latest
        self._order.join(pending.line, pending.key)

    def leave(self, pending: Pending) -> bool:
        """A request that was lined up is given up; False when it was over before."""
        line = pending.line
        assert line is not None  # noqa: S101 - it was lined up
        held = self._order.leave(line, pending.key)
        for _, outcome, _, _ in held or ():
            if isinstance(outcome, InferResponse):
                self._discard(outcome)
        self._release(line)
        return held is not None

    def deliver(self, pending: Pending, outcome: Outcome, is_final: bool, moments: Moments | None = None) -> None:
        """An answer has come."""
        if pending.line is not None:
            self._put_in_order(pending.line, pending, outcome, is_final, moments)
        else:
            self._give(pending, outcome, is_final, moments)

    @contained(on_error="_giving_failed")
    def _give(self, pending: Pending, outcome: Outcome, is_final: bool, moments: Moments | None) -> None:
        """Calls `on_answer`, and completes the trace if there is one."""
        pending.moments = moments
        pending.has_ended = is_final
        if pending.trace is None:
            pending.on_answer(outcome, is_final)
        else:
            self._tracing.deliver(pending.trace, pending, outcome, is_final, moments)

    def _giving_failed(
        self, _error: Exception, pending: Pending, _outcome: Outcome, is_final: bool, *_: object
    ) -> None:
        """Ends a request whose response could not be delivered: `on_answer` is called once more, with an internal error.

        The frontends end a call once and ignore what comes after, so a response that was delivered in part stays so.
        """
        pending.has_ended = True
        self._give_up(pending)
        if pending.line is not None and not is_final:
            self.leave(pending)
        pending.on_answer(internal(UNEXPECTED), True)

    def _put_in_order(
        self, line: Line, pending: Pending, outcome: Outcome, is_final: bool, moments: Moments | None
    ) -> None:
        if not is_final and self._order.is_full and not self._order.is_next(line, pending.key):
            self._give_up(pending)
            if isinstance(outcome, InferResponse):
                self._discard(outcome)
            outcome, is_final = overloaded(_TOO_MANY_HELD), True
        self._order.add(line, pending.key, (pending, outcome, is_final, moments), _size_bytes(outcome), is_final)
        self._release(line)

    def _release(self, line: Line) -> None:
        """Gives the answers of a line whose turn it is."""
        self._lines_due.append(line)
        if len(self._lines_due) > 1:
            return  # whoever is just being told has submitted or abandoned something: after him, it goes on below
        try:
            while self._lines_due:
                while (given := self._order.pop(self._lines_due[0])) is not None:
                    self._give(*given)
                self._lines_due.pop(0)
        finally:
            self._lines_due.clear()
            self._in_flight.hold(self._order.held_answers, self._order.held_bytes)


def _size_bytes(outcome: Outcome) -> int:
    return sum(tensor.size_bytes for tensor in outcome.outputs) if isinstance(outcome, InferResponse) else 0

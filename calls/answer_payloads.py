"""The outputs that lie in workers' memory: copied out for the caller, and given back to the worker they belong to."""

from __future__ import annotations

from collections.abc import Callable

from bus.identity import owner_of
from bus.payloads import PayloadReader, StalePayload
from calls.pending import Pending
from runtime.containment import contained
from schemas.errors import WeirError, internal
from schemas.messages import Answer
from schemas.requests import InferResponse
from schemas.tensors import PayloadRef, Tensor


class AnswerPayloads:
    """Makes responses of answers. `give_back(owner, slot)` is called with each slot that is needed no more.

    With `keeps_references` outputs stay where they lie, and whoever gets the response gives them back by `release`.
    """

    def __init__(self, give_back: Callable[[str, tuple[str, int, int]], None], keeps_references: bool = False) -> None:
        self._keeps_references = keeps_references
        self._reader = PayloadReader()
        self._give_back = give_back

    def outcome(self, pending: Pending, version: int, answer: Answer) -> InferResponse | WeirError | None:
        """What the caller of `pending` is told: a response, an error, or None where the answer is only an end."""
        if answer.error is not None or answer.outputs is None:
            return answer.error
        try:
            for tensor in () if self._keeps_references else answer.outputs:
                if isinstance(tensor.data, PayloadRef):
                    self._fetch(tensor, tensor.data)
        except (StalePayload, ValueError):
            return internal("the response was lost before it could be read")
        return InferResponse(pending.model.name, str(version), pending.request.id, answer.outputs, answer.parameters)

    @contained()
    def discard(self, answer: Answer | InferResponse) -> None:
        """Gives back the memory of an answer, or a response, that nobody waits for."""
        for tensor in answer.outputs or ():
            if isinstance(tensor.data, PayloadRef):
                self.release(tensor.data)

    def _fetch(self, tensor: Tensor, ref: PayloadRef) -> None:
        """Copies an output out of the worker's memory, which it gets back at once."""
        tensor.data = self.copy_of(ref)
        self.release(ref)

    def copy_of(self, ref: PayloadRef) -> bytes:
        """The bytes behind a reference. Raises StalePayload; ValueError for one that can't be one of ours."""
        content = bytes(self._reader.view(ref))
        if not self._reader.is_current(ref):
            raise StalePayload("the slot was given to another payload during the copy")
        return content

    def release(self, ref: PayloadRef) -> None:
        """Gives the slot of `ref` back to the worker it belongs to."""
        owner = owner_of(ref.segment)
        if owner:
            self._give_back(owner, (ref.segment, ref.slot, ref.generation))

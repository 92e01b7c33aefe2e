"""The outputs of responses that lie in workers' memory.

`ResponsePayloads` copies outputs of workers on this host and releases their slots. `RemoteOutputFetcher` holds responses
whose outputs lie on other hosts until those have been fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from weir.bus.naming.identity import lies_elsewhere, owner_of
from weir.bus.payloads.arena import PayloadReader, StalePayload
from weir.bus.payloads.fetch_plan import Loss, Outcome
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.calls.in_flight import PendingRequest
from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError, internal, unavailable
from weir.schemas.core.requests import InferResponse
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.calls import ResponseEnvelope

MAX_FETCHING_RESPONSES = 10_000
"""Responses that wait for their outputs; a further one counts as lost."""


class _FetchingResponse:
    """A response with the number of its outputs that are still being fetched."""

    __slots__ = ("fetches", "is_lost", "response", "version")

    def __init__(self, version: int, response: ResponseEnvelope) -> None:
        self.version = version
        self.response = response
        self.fetches = 0
        self.is_lost = False


class RemoteOutputFetcher:
    """Holds responses until their outputs have been fetched from other hosts.

    Later responses to the same request wait behind them. `take(version, response, is_whole)` is called with each response
    whose outputs are here, or are lost with their worker. Without a `fetcher`, all remote outputs are lost.
    """

    def __init__(
        self,
        fetcher: PayloadFetcher | None,
        take: Callable[[int, ResponseEnvelope, bool], None],
        payloads: ResponsePayloads,
    ) -> None:
        self._fetcher = fetcher
        self._take = take
        self._payloads = payloads
        self.by_key: dict[int, deque[_FetchingResponse]] = {}
        """The responses that are held, by the key of their request."""
        self._fetching = 0

    def holds(self, version: int, response: ResponseEnvelope, passes_references: bool) -> bool:
        """Whether the response is held and taken later. A caller that `passes_references` needs no output fetched."""
        is_first = response.key not in self.by_key
        if is_first and (passes_references or not any(map(_is_remote, response.outputs or ()))):
            return False
        if not is_first and not response.run:
            self._payloads.discard(response)  # the request has run twice, and the first response is being fetched
            return True
        fetching = _FetchingResponse(version, response)
        fetching.is_lost = self._fetching >= MAX_FETCHING_RESPONSES or self._fetcher is None
        if self._fetcher is not None and not fetching.is_lost and not passes_references:
            for tensor in response.outputs or ():
                if _is_remote(tensor) and isinstance(tensor.data, PayloadRef):
                    fetching.fetches += 1
                    self._fetcher.fetch(tensor.data, partial(self._on_fetched, fetching, tensor, tensor.data))
        self.by_key.setdefault(response.key, deque()).append(fetching)
        self._fetching += 1
        self._take_fetched(response.key)
        return True

    @contained(on_error="_on_fetched_failed")
    def _on_fetched(self, fetching: _FetchingResponse, tensor: Tensor, ref: PayloadRef, outcome: Outcome) -> None:
        fetching.fetches -= 1
        if outcome is Loss.NO_ADDRESS:  # another run would not help
            response = fetching.response
            self._payloads.discard(response)
            response.outputs, response.error = None, unavailable(f"an output can't be fetched: {outcome.value}")
        elif isinstance(outcome, Loss):
            fetching.is_lost = True
        else:
            tensor.data = outcome
            self._payloads.release(ref)
        self._take_fetched(fetching.response.key)

    def _on_fetched_failed(self, _error: Exception, fetching: _FetchingResponse, *_: object) -> None:
        fetching.is_lost = True
        self._take_fetched(fetching.response.key)

    def _take_fetched(self, key: int) -> None:
        responses = self.by_key.get(key)
        while responses and not responses[0].fetches:
            fetching = responses.popleft()
            self._fetching -= 1
            if not responses:
                self.by_key.pop(key, None)
            self._take(fetching.version, fetching.response, not fetching.is_lost)


def _is_remote(tensor: Tensor) -> bool:
    return isinstance(tensor.data, PayloadRef) and lies_elsewhere(tensor.data.segment)


class ResponsePayloads:
    """Copies outputs from workers' memory. `release_slot(owner, slot)` is called with each slot that was read.

    With `keeps_references`, outputs stay references, and the receiver of the response calls `release` for each.
    """

    def __init__(
        self, release_slot: Callable[[str, tuple[str, int, int]], None], keeps_references: bool = False
    ) -> None:
        self._keeps_references = keeps_references
        self._reader = PayloadReader()
        self._release_slot = release_slot

    def outcome(
        self, pending: PendingRequest, version: int, response: ResponseEnvelope
    ) -> InferResponse | WeirError | None:
        """The outcome for the caller of `pending`: a response, an error, or None where the responses end without one."""
        if response.error is not None or response.outputs is None:
            return response.error
        try:
            for tensor in () if self._keeps_references else response.outputs:
                if isinstance(tensor.data, PayloadRef):
                    self._copy(tensor, tensor.data)
        except (StalePayload, ValueError):
            return internal("the response was lost before it could be read")
        model, id = pending.model.name, pending.request.id
        return InferResponse(model, str(version), id, response.outputs, response.parameters)

    def discard(self, response: ResponseEnvelope | InferResponse) -> None:
        """Releases the payload slots of a response that is dropped."""
        for tensor in response.outputs or ():
            if isinstance(tensor.data, PayloadRef):
                self.release(tensor.data)

    def _copy(self, tensor: Tensor, ref: PayloadRef) -> None:
        """Copies an output out of the worker's memory and releases its slot."""
        tensor.data = self.copy_of(ref)
        self.release(ref)

    def copy_of(self, ref: PayloadRef) -> bytes:
        """The bytes behind a reference. Raises StalePayload, and ValueError for an invalid reference."""
        content = bytes(self._reader.view(ref))
        if not self._reader.is_current(ref):
            raise StalePayload("the slot was allocated to another payload during the copy")
        return content

    def release(self, ref: PayloadRef) -> None:
        """Releases the slot of `ref` to the worker that owns it."""
        owner = owner_of(ref.segment)
        if owner:
            self._release_slot(owner, (ref.segment, ref.slot, ref.generation))

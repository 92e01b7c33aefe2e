"""The rows of a batch of sequences: which are nobody's, which can be run, and where they stand."""

from __future__ import annotations

from copy import copy
from itertools import compress

from schemas.errors import Reason, unavailable
from schemas.messages import NOBODY, BatchEntry, BatchMessage
from schemas.requests import InferRequest
from worker.backend import Result
from worker.implicit_state import ImplicitStates


def fill_rows(positions: list[int], requests: list[InferRequest]) -> frozenset[int]:
    """Puts null rows in the place of entries that can't be run, before others that can; returns their positions."""
    missing = frozenset(range(positions[-1])).difference(positions) if positions else frozenset()
    for position in sorted(missing):
        filler = copy(requests[0])
        filler.inputs = [copy(tensor) for tensor in filler.inputs]  # each is reshaped by itself
        positions.insert(position, position)
        requests.insert(position, filler)
    return missing


def is_null(entry: BatchEntry) -> bool:
    """Whether the row is nobody's: a copy of another that fills the batch."""
    return entry.gateway == NOBODY and entry.place is None


def take_place(request: InferRequest, entry: BatchEntry, is_reference: bool) -> None:
    """The request is what its place in its sequence says. Raises WeirError for one that can't run again."""
    place = entry.place
    assert place is not None  # noqa: S101 - asked by the caller
    request.sequence_flags = place.flags
    request.correlation_id = request.correlation_id or place.run
    if entry.gateway == NOBODY and (is_reference or any(isinstance(tensor.data, tuple) for tensor in request.inputs)):
        # Its caller has its answer: what lies in shared memory may be anything by now.
        raise unavailable("a request whose content lay in shared memory can't run again", Reason.NOT_REPEATABLE)


def accepted(
    states: ImplicitStates,
    batch: BatchMessage,
    positions: list[int],
    requests: list[InferRequest],
    results: list[Result | None],
) -> tuple[list[int], list[InferRequest]]:
    """The positions and requests whose states are there; the results of the others tell why not."""
    refused = states.add_to(batch, [batch.entries[position] for position in positions], requests)
    for position, error in zip(positions, refused, strict=True):
        if error is not None:
            results[position] = Result(error=error)
    kept = [error is None for error in refused]
    return list(compress(positions, kept)), list(compress(requests, kept))

"""From the entries of a batch to the requests that an instance can be given, and the errors of those it can't be."""

from __future__ import annotations

from collections.abc import Mapping

from bus.fetch_plan import Loss, Outcome
from bus.payloads import PayloadReader, StalePayload
from runtime.containment import contained
from schemas.bodies import body_ref, unpack_body
from schemas.errors import Reason, WeirError, internal, overloaded
from schemas.messages import BatchEntry
from schemas.request_errors import given_up
from schemas.requests import InferRequest
from schemas.string_content import MAX_WALKED_BYTES, check_strings
from schemas.tensors import PayloadRef, element_count
from worker.backend import DeviceLost, Result
from worker.batch_tensors import has_gone
from worker.client_memory import ClientMemory
from worker.running_batch import RunningBatch
from worker.sequence_rows import take_place
from worker.statistics import ModelStatistics


def decoded(
    running: RunningBatch, reader: PayloadReader, client_memory: ClientMemory, statistics: ModelStatistics
) -> tuple[list[int], list[InferRequest], list[Result | None]]:
    """The positions in the batch of the requests that can be run, these requests, and the results of the others.

    Content that lies in clients' memory is fetched. Failures are counted.
    """
    decoder = _Decoder(running, reader, client_memory, statistics)
    results: list[Result | None] = [None] * len(running.message.entries)
    requests: list[InferRequest] = []
    positions: list[int] = []
    for position, entry in enumerate(running.message.entries):
        outcome = decoder.decode(position, entry)
        if isinstance(outcome, Result):
            results[position] = outcome
        else:
            requests.append(outcome)
            positions.append(position)
    return positions, requests, results


class _Decoder:
    """Decodes the entries of one batch."""

    __slots__ = ("_client_memory", "_reader", "_running", "_statistics")

    def __init__(
        self, running: RunningBatch, reader: PayloadReader, client_memory: ClientMemory, statistics: ModelStatistics
    ) -> None:
        self._running = running
        self._reader = reader
        self._client_memory = client_memory
        self._statistics = statistics

    @contained(on_error="_failed", passes=(DeviceLost,))
    def decode(self, position: int, entry: BatchEntry) -> InferRequest | Result:
        """The entry's request, or what it ends with where it can't be run."""
        running, batch = self._running, self._running.message
        try:
            if running.cancelled and position in running.cancelled:
                raise StalePayload("the caller has gone")
            if running.has_deadlines and running.is_late(position):
                self._statistics.record_failures(1, "REJECTED", entry.queued_us * 1000)
                return Result(error=overloaded("Request timeout expired", reason=Reason.TIMED_OUT))
            ref = body_ref(entry.body)
            body = entry.body if ref is None else content_of(ref, running, self._reader)
            request = unpack_body(body, batch.model, batch.version)
            if running.fetched:
                put_in_fetched(request, running.fetched)
            if has_gone(request, self._reader):
                raise StalePayload("the request was given up")
            if entry.place is not None:
                take_place(request, entry, is_reference=ref is not None)
            # A null row is a copy of a request of this batch, whose last row is never null.
            self._client_memory.fetch(request, entry.gateway or batch.entries[-1].gateway)
            check_long_strings(request, self._reader)
            return request
        except StalePayload:
            self._statistics.record_failures(1, "CANCELED", entry.queued_us * 1000)
            return Result(error=given_up())
        except WeirError as error:
            return Result(error=error)
        except ValueError as error:  # MalformedMessage among them
            self._statistics.record_failures(1, "OTHER", entry.queued_us * 1000)
            return Result(error=internal(str(error)))

    def _failed(self, error: Exception, _position: int, entry: BatchEntry) -> Result:
        self._statistics.record_failures(1, "OTHER", entry.queued_us * 1000)
        return Result(error=internal(f"the request can't be decoded: {type(error).__name__}: {error}"))


def content_of(ref: PayloadRef, running: RunningBatch, reader: PayloadReader) -> memoryview | bytes:
    """The bytes behind a reference in a batch, on whichever host they lie. Raises StalePayload, ValueError."""
    outcome = running.fetched.get(ref) if running.fetched else None
    if isinstance(outcome, Loss):
        raise StalePayload(outcome.value)
    return reader.view(ref) if outcome is None else outcome


def check_long_strings(request: InferRequest, reader: PayloadReader) -> None:
    """Checks strings that were too long for the caller's event loop. Raises WeirError (INVALID_ARG), StalePayload."""
    for tensor in request.inputs:
        if tensor.datatype == "BYTES" and tensor.size_bytes > MAX_WALKED_BYTES:
            data = tensor.data
            content = reader.view(data) if isinstance(data, PayloadRef) else data
            if not isinstance(content, tuple):  # what lay in a client's memory is here by now, or has no strings
                check_strings(content, element_count(tensor.shape), request.id, tensor.name, request.model_name)


def put_in_fetched(request: InferRequest, fetched: Mapping[PayloadRef, Outcome]) -> None:
    """Puts what was fetched from other hosts in the place of its references. Raises StalePayload where it was lost."""
    for tensor in request.inputs:
        if isinstance(tensor.data, PayloadRef) and (outcome := fetched.get(tensor.data)) is not None:
            if isinstance(outcome, Loss):
                raise StalePayload(outcome.value)
            tensor.data = outcome

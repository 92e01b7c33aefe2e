"""`decode_batch`: from the entries of a batch to the requests that can run, and the errors of the others."""

from __future__ import annotations

from collections.abc import Mapping

from weir.bus.payloads.arena import PayloadReader, StalePayload
from weir.bus.payloads.fetch_plan import Loss, Outcome
from weir.runtime.containment import contained
from weir.schemas.core.errors import Reason, WeirError, internal, overloaded, unavailable
from weir.schemas.core.request_limits import cancelled_error
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import MAX_WALKED_BYTES, PayloadRef, check_strings, element_count
from weir.schemas.wire.batches import BatchEntry
from weir.schemas.wire.request_body import body_ref, unpack_body, unpack_plain
from weir.worker.backend_api.interface import DeviceLost, Result
from weir.worker.execution.batch import Batch
from weir.worker.execution.sequences import apply_position
from weir.worker.execution.shared_memory import SharedMemoryIO
from weir.worker.execution.statistics import ModelStatistics


def decode_batch(
    running: Batch, reader: PayloadReader, shared_memory: SharedMemoryIO, statistics: ModelStatistics
) -> tuple[list[int], list[InferRequest], list[Result | None]]:
    """The positions of the requests that can run, these requests, and a result for each entry that can't (else None).

    Reads inputs that lie in memory shared with clients. Counts failures.
    """
    message = running.message
    results: list[Result | None] = [None] * len(message.entries)
    is_special = running.cancelled or running.has_deadlines or running.fetched
    if not is_special and message.entries[-1].position is None:
        # As most do, all can run, and have all their content in their bodies.
        plain = unpack_plain([entry.body for entry in message.entries], message.model, message.version)
        if plain is not None:
            return list(range(len(plain))), plain, results
    decoder = _Decoder(running, reader, shared_memory, statistics)
    requests: list[InferRequest] = []
    positions: list[int] = []
    for position, entry in enumerate(message.entries):
        outcome = decoder.decode(position, entry)
        if isinstance(outcome, Result):
            results[position] = outcome
        else:
            requests.append(outcome)
            positions.append(position)
    return positions, requests, results


class _Decoder:
    """Decodes the entries of one batch."""

    __slots__ = ("_reader", "_running", "_shared_memory", "_statistics")

    def __init__(
        self, running: Batch, reader: PayloadReader, shared_memory: SharedMemoryIO, statistics: ModelStatistics
    ) -> None:
        self._running = running
        self._reader = reader
        self._shared_memory = shared_memory
        self._statistics = statistics

    @contained(on_error="_failed", passes=(DeviceLost,))
    def decode(self, position: int, entry: BatchEntry) -> InferRequest | Result:
        """The request of the entry, or its result if it can't run."""
        running, batch = self._running, self._running.message
        try:
            if running.cancelled and position in running.cancelled:
                raise StalePayload("the request was cancelled")
            if running.has_deadlines and running.is_late(position):
                self._statistics.record_failures(1, "REJECTED", entry.queued_us * 1000)
                return Result(error=overloaded("Request timeout expired", reason=Reason.TIMED_OUT))
            ref = body_ref(entry.body)
            body = entry.body if ref is None else read_content(ref, running, self._reader)
            request = unpack_body(body, batch.model, batch.version)
            if running.fetched:
                insert_fetched(request, running.fetched)
            has_content = _has_content(request)
            if not has_content and is_payload_stale(request, self._reader):
                raise StalePayload("the payload of the request was released")
            if entry.position is not None:
                apply_position(request, entry, is_reference=ref is not None)
            if not has_content:
                # Padding is a copy of a request of this batch, and the last row of a batch is never padding.
                self._shared_memory.fetch(request, entry.gateway or batch.entries[-1].gateway)
                check_long_strings(request, self._reader)
            return request
        except StalePayload:
            self._statistics.record_failures(1, "CANCELED", entry.queued_us * 1000)
            return Result(error=cancelled_error())
        except WeirError as error:
            return Result(error=error)
        except ValueError as error:  # MalformedMessage among them
            self._statistics.record_failures(1, "OTHER", entry.queued_us * 1000)
            return Result(error=internal(str(error)))

    def _failed(self, error: Exception, _position: int, entry: BatchEntry) -> Result:
        self._statistics.record_failures(1, "OTHER", entry.queued_us * 1000)
        return Result(error=internal(f"the request can't be decoded: {type(error).__name__}: {error}"))


def _has_content(request: InferRequest) -> bool:
    """Whether nothing lies in shared memory and no strings have to be checked, as in most requests."""
    for tensor in request.inputs:
        if type(tensor.data) is not bytes or (tensor.datatype == "BYTES" and len(tensor.data) > MAX_WALKED_BYTES):
            return False
    return not any([output.region is not None for output in request.outputs])  # noqa: C419 - faster than a generator


def is_payload_stale(request: InferRequest, reader: PayloadReader) -> bool:
    """Whether the caller has released content of the request in shared memory, because it was cancelled."""
    for tensor in request.inputs:
        if isinstance(tensor.data, PayloadRef):
            try:
                reader.view(tensor.data)
            except (StalePayload, ValueError):
                return True
    return False


def read_content(ref: PayloadRef, running: Batch, reader: PayloadReader) -> memoryview | bytes:
    """The bytes behind a reference in a batch, from this host or as fetched. Raises StalePayload, ValueError."""
    outcome = running.fetched.get(ref) if running.fetched else None
    return reader.view(ref) if outcome is None else _content(outcome)


def _content(outcome: Outcome) -> memoryview | bytes:
    """What was fetched. Raises StalePayload if it was lost, and WeirError (UNAVAILABLE) if it can't be fetched at all."""
    if outcome is Loss.NO_ADDRESS:
        raise unavailable(f"an input of the request can't be fetched: {outcome.value}")
    if isinstance(outcome, Loss):
        raise StalePayload(outcome.value)
    return outcome


def check_long_strings(request: InferRequest, reader: PayloadReader) -> None:
    """Checks strings that are too long to be checked in a gateway. Raises WeirError (INVALID_ARG), StalePayload."""
    for tensor in request.inputs:
        if tensor.datatype == "BYTES" and tensor.size_bytes > MAX_WALKED_BYTES:
            data = tensor.data
            content = reader.view(data) if isinstance(data, PayloadRef) else data
            if not isinstance(content, tuple):  # a reference to a client's memory: read already, or not strings
                check_strings(content, element_count(tensor.shape), request.id, tensor.name, request.model_name)


def insert_fetched(request: InferRequest, fetched: Mapping[PayloadRef, Outcome]) -> None:
    """Replaces references by the content that was fetched from other hosts. Raises as `_content`."""
    for tensor in request.inputs:
        if isinstance(tensor.data, PayloadRef) and (outcome := fetched.get(tensor.data)) is not None:
            tensor.data = _content(outcome)

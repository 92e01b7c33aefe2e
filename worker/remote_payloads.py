"""`RemotePayloads`: brings what a batch refers to on other hosts, before an instance is given the batch.

Most batches refer to nothing elsewhere, which is seen by the names of their gateways. Others are taken apart here to see
what they refer to, in the event loop; but what is large in them is what is brought, so what is looked at is small. Batches
that came later are not held up. But for those of sequences: an instance runs them in the order in which they came.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from functools import partial

from bus.fetch_plan import Loss, Outcome
from bus.identity import lies_elsewhere, shares_memory
from bus.payload_fetcher import PayloadFetcher
from runtime.containment import contained
from schemas.bodies import body_ref, unpack_body
from schemas.errors import WeirError
from schemas.messages import NOBODY, BatchMessage
from schemas.tensors import PayloadRef
from worker.running_batch import RunningBatch

_MAX_KNOWN = 4096

_segments = re.compile(rb"weir-[A-Za-z0-9_-]+\.[0-9]+").findall

Line = tuple[str, int, int]
"""An instance: model, version, number."""


class RemotePayloads:
    """See the module. Everything runs in the event loop."""

    def __init__(self, fetcher: PayloadFetcher) -> None:
        self._fetcher = fetcher
        self._is_suspect: dict[str, bool] = {}
        self._lines: dict[Line, deque[_Arrival]] = {}

    def hold_up(self, batch: BatchMessage) -> bool:
        """Whether the batch must go through `bring` before it runs."""
        known = self._is_suspect
        for entry in batch.entries:
            suspect = known.get(entry.gateway)
            if suspect is None:
                suspect = self._suspects(entry.gateway)
            if suspect and any(lies_elsewhere(name.decode()) for name in _segments(entry.body)):
                return True
        return bool(self._lines) and _line(batch) in self._lines

    def bring(self, running: RunningBatch, with_tensors: bool, then: Callable[[], None]) -> None:
        """Calls `then`, at once or later, when `running.fetched` has all that the batch refers to on other hosts.

        Without `with_tensors` only bodies are brought.
        """
        arrival = _Arrival(self._fetcher, running, with_tensors, then)
        batch = running.message
        if any(entry.place is not None for entry in batch.entries):
            line = self._lines.setdefault(_line(batch), deque())
            line.append(arrival)
            arrival.begin(partial(self._go_on, _line(batch)))
        else:
            arrival.begin(then)

    def _go_on(self, line: Line) -> None:
        """Those at the head of a line that have all they wait for run."""
        waiting = self._lines.get(line)
        while waiting and waiting[0].is_complete:
            waiting.popleft().then()
        if not waiting:
            self._lines.pop(line, None)

    def _suspects(self, gateway: str) -> bool:
        """Whether requests from there may refer to another host: a worker passes on what it was given."""
        if len(self._is_suspect) >= _MAX_KNOWN:
            self._is_suspect.clear()
        is_worker = gateway.startswith("worker-") or gateway.endswith("-worker")
        suspect = self._is_suspect[gateway] = gateway == NOBODY or is_worker or not shares_memory(gateway)
        return suspect


class _Arrival:
    """One batch that waits."""

    def __init__(
        self, fetcher: PayloadFetcher, running: RunningBatch, with_tensors: bool, then: Callable[[], None]
    ) -> None:
        self.then = then
        self._fetcher = fetcher
        self._running = running
        self._with_tensors = with_tensors
        self._fetched: dict[PayloadRef, Outcome] = {}
        self._awaited: set[PayloadRef] = set()
        self._on_complete: Callable[[], None] = then
        self.is_complete = False

    def begin(self, on_complete: Callable[[], None]) -> None:
        self._on_complete = on_complete
        self._running.fetched = self._fetched
        for entry in self._running.message.entries:
            try:
                ref = body_ref(entry.body)
            except ValueError:
                continue  # which the instance will say
            if ref is None:
                self._look_into(entry.body)
            elif lies_elsewhere(ref.segment):
                self._want(ref, is_body=True)
        self._end_if_complete()

    @contained()
    def _look_into(self, body: bytes | memoryview) -> None:
        if not self._with_tensors:
            return
        message = self._running.message
        try:
            request = unpack_body(body, message.model, message.version)
        except (ValueError, WeirError):
            return  # as above
        for tensor in request.inputs:
            if isinstance(tensor.data, PayloadRef) and lies_elsewhere(tensor.data.segment):
                self._want(tensor.data, is_body=False)

    def _want(self, ref: PayloadRef, is_body: bool) -> None:
        if ref not in self._awaited and ref not in self._fetched:
            self._awaited.add(ref)
            self._fetch(ref, is_body)

    @contained(on_error="_fetch_failed")
    def _fetch(self, ref: PayloadRef, is_body: bool) -> None:
        self._fetcher.fetch(ref, partial(self._came, ref, is_body))

    def _fetch_failed(self, _error: Exception, ref: PayloadRef, _is_body: bool) -> None:
        self._awaited.discard(ref)
        self._fetched[ref] = Loss.UNREACHABLE

    def _came(self, ref: PayloadRef, is_body: bool, outcome: Outcome) -> None:
        self._awaited.discard(ref)
        self._fetched[ref] = outcome
        if is_body and not isinstance(outcome, Loss):
            self._look_into(outcome)
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if not self._awaited and not self.is_complete:
            self.is_complete = True
            self._on_complete()


def _line(batch: BatchMessage) -> Line:
    return batch.model, batch.version, batch.instance

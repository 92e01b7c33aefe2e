"""`RemotePayloads`: fetches the payloads of a batch that lie on other hosts, before the batch runs.

Whether a batch can have such payloads shows in the names of its gateways; most can't. The other batches are decoded in the
event loop to find their references, which is cheap, because whatever is large in them is a reference. A batch that waits
does not delay later ones, except batches of sequences: an instance runs those in the order of their arrival.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from functools import partial

from weir.bus.naming.identity import lies_elsewhere, shares_memory
from weir.bus.payloads.fetch_plan import Loss, Outcome
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError
from weir.schemas.core.tensors import PayloadRef
from weir.schemas.wire.batches import NO_REPLY, BatchMessage
from weir.schemas.wire.request_body import body_ref, unpack_body
from weir.worker.execution.batch import Batch

_MAX_GATEWAYS = 4096

_segments = re.compile(rb"weir-[A-Za-z0-9_-]+\.[0-9]+").findall

InstanceKey = tuple[str, int, int]
"""An instance: model, version, number."""


class RemotePayloads:
    """The batches that wait for payloads. Runs in the event loop."""

    def __init__(self, fetcher: PayloadFetcher) -> None:
        self._fetcher = fetcher
        self._may_be_remote: dict[str, bool] = {}  # by gateway
        self._waiting: dict[InstanceKey, deque[_WaitingBatch]] = {}  # batches of sequences

    def needs_fetch(self, batch: BatchMessage) -> bool:
        """Whether the batch must go through `fetch` before it runs."""
        may_be_remote = self._may_be_remote
        for entry in batch.entries:
            is_suspect = may_be_remote.get(entry.gateway)
            if is_suspect is None:
                is_suspect = self._check_gateway(entry.gateway)
            if is_suspect and any(lies_elsewhere(name.decode()) for name in _segments(entry.body)):
                return True
        return bool(self._waiting) and _instance_key(batch) in self._waiting

    def fetch(self, running: Batch, with_tensors: bool, then: Callable[[], None]) -> None:
        """Calls `then`, at once or later, when `running.fetched` has all payloads of the batch from other hosts.

        Without `with_tensors` only request bodies are fetched.
        """
        waiting = _WaitingBatch(self._fetcher, running, with_tensors, then)
        batch = running.message
        if any(entry.position is not None for entry in batch.entries):
            key = _instance_key(batch)
            self._waiting.setdefault(key, deque()).append(waiting)
            waiting.start(partial(self._run_complete, key))
        else:
            waiting.start(then)

    def _run_complete(self, key: InstanceKey) -> None:
        """Runs the first batches of an instance, up to one whose payloads are missing."""
        waiting = self._waiting.get(key)
        while waiting and waiting[0].is_complete:
            waiting.popleft().then()
        if not waiting:
            self._waiting.pop(key, None)

    def _check_gateway(self, gateway: str) -> bool:
        """Whether requests of this sender may refer to other hosts: workers pass on references that they received."""
        if len(self._may_be_remote) >= _MAX_GATEWAYS:
            self._may_be_remote.clear()
        is_worker = gateway.startswith("worker-") or gateway.endswith("-worker")
        is_suspect = self._may_be_remote[gateway] = gateway == NO_REPLY or is_worker or not shares_memory(gateway)
        return is_suspect


class _WaitingBatch:
    """One batch and the payloads that it waits for."""

    def __init__(self, fetcher: PayloadFetcher, running: Batch, with_tensors: bool, then: Callable[[], None]) -> None:
        self.then = then
        self._fetcher = fetcher
        self._running = running
        self._with_tensors = with_tensors
        self._fetched: dict[PayloadRef, Outcome] = {}
        self._awaited: set[PayloadRef] = set()
        self._on_complete: Callable[[], None] = then
        self.is_complete = False

    def start(self, on_complete: Callable[[], None]) -> None:
        """Starts to fetch; calls `on_complete` at the end."""
        self._on_complete = on_complete
        self._running.fetched = self._fetched
        for entry in self._running.message.entries:
            try:
                ref = body_ref(entry.body)
            except ValueError:
                continue  # the instance reports the error
            if ref is None:
                self._find_tensors(entry.body)
            elif lies_elsewhere(ref.segment):
                self._fetch(ref, True)
        self._check_complete()

    def _find_tensors(self, body: bytes | memoryview) -> None:
        if not self._with_tensors:
            return
        message = self._running.message
        try:
            request = unpack_body(body, message.model, message.version)
        except (ValueError, WeirError):
            return  # the instance reports the error
        for tensor in request.inputs:
            if isinstance(tensor.data, PayloadRef) and lies_elsewhere(tensor.data.segment):
                self._fetch(tensor.data, False)

    @contained(on_error="_fetch_failed")
    def _fetch(self, ref: PayloadRef, is_body: bool) -> None:
        if ref not in self._awaited and ref not in self._fetched:
            self._awaited.add(ref)
            self._fetcher.fetch(ref, partial(self._on_fetched, ref, is_body))

    def _fetch_failed(self, _error: Exception, ref: PayloadRef, _is_body: bool) -> None:
        self._awaited.discard(ref)
        self._fetched[ref] = Loss.UNREACHABLE

    def _on_fetched(self, ref: PayloadRef, is_body: bool, outcome: Outcome) -> None:
        self._awaited.discard(ref)
        self._fetched[ref] = outcome
        try:
            if is_body and not isinstance(outcome, Loss):
                self._find_tensors(outcome)
        finally:
            self._check_complete()  # the instance reports a body that can't be read

    def _check_complete(self) -> None:
        if not self._awaited and not self.is_complete:
            self.is_complete = True
            self._on_complete()


def _instance_key(batch: BatchMessage) -> InstanceKey:
    return batch.model, batch.version, batch.instance

"""`ShadowCopies`: copies of live requests on another version; `ShadowComparisons` compares their responses.

A copy refers to its request's body and runs in the batch lane; no caller gets its response. A `ResponsePair` takes both
responses in any order. It keeps their outputs until both are there, within `MAX_HELD_BYTES` of the process; beyond that,
and for larger outputs, the pair is skipped. A failure here ends the comparison, and never the request. Everything runs in
one event loop, except comparisons of more than `INLINE_BYTES`, which run in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.calls.payload_store import SharedSlot
from weir.calls.traffic.comparison import ComparisonTotals, Difference, compare
from weir.calls.traffic.split import SHADOW, TrafficSplit
from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferResponse, Lane
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.calls import ANYBODY
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.request_body import unpack_body
from weir.schemas.wire.traffic import SampleTensor, ShadowSample

if TYPE_CHECKING:
    from weir.calls.traffic.counters import TrafficCounters

OnResponse = Callable[[InferResponse | WeirError | None, bool], None]

MAX_COPIES = 64
"""Copies of requests for shadow traffic that a caller has in flight; without room, no copy is made."""

MAX_COPIED_BYTES = 64 << 20
"""Their packed bodies together."""

MAX_OUTPUT_BYTES = 4 << 20
"""Outputs of one response that are compared."""

MAX_STRING_BYTES = 64 << 10
"""A BYTES output that is compared: its elements are Python objects, and comparing many of them in a thread would stop the
event loop, too."""

MAX_HELD_BYTES = 64 << 20
"""Outputs of all responses that wait for the other one, or for their comparison."""

INLINE_BYTES = 16 << 10
"""Outputs of both responses that are compared in the event loop, in about 0.1 ms."""

KEPT_SAMPLES = 10
"""Requests of one version whose responses differ most, kept by each process."""

MAX_SAMPLE_BYTES = 1 << 20
"""The size of a request and its two responses together up to which it is kept."""


class ShadowCopies:
    """The copies of one caller, whose `counters` count them. `submit` gives a copy a key, and sends it."""

    def __init__(self, counters: TrafficCounters, submit: Callable[[Any], None]) -> None:
        self._counters = counters
        self._submit = submit
        self._count = 0
        self._bytes = 0

    def make(self, split: TrafficSplit, pending: Any) -> None:
        """Has a copy of a `PendingRequest` run on another version, if `split` asks for one and there is room for it."""
        envelope, size_bytes = pending.envelope, len(pending.envelope.body)
        version = split.shadow_of(pending.request)
        if not version or self._count >= MAX_COPIES or self._bytes + size_bytes > MAX_COPIED_BYTES:
            return
        copied = copy(pending)
        copied.request = request = copy(pending.request)
        request.model_version, request.lane, request.priority = str(version), Lane.BATCH, 0
        copied.envelope = envelope._replace(
            version=version,
            priority=0,
            timeout_us=0,
            deadline_ms=0,
            traceparent="",
            lane=Lane.BATCH,
            **ANYBODY._asdict(),  # a copy is not of its caller's making
        )
        copied.trace, copied.order_key = None, None
        copied.on_response = partial(self._on_response, size_bytes)
        self._counters.count_end(copied, SHADOW)
        if split.compares:
            pair = ResponsePair(self._counters.shadow, (split.model, version), request.id, envelope.body)
            pending.on_response = partial(pair.on_response, pending.on_response, True)
            copied.on_response = partial(pair.on_response, copied.on_response, False)
        copied.slots = pending.slots = [SharedSlot(slot, 2) for slot in pending.slots]
        self._count += 1
        self._bytes += size_bytes
        self._submit(copied)

    def _on_response(self, size_bytes: int, _outcome: object, is_final: bool) -> None:
        if is_final:
            self._count -= 1
            self._bytes -= size_bytes


class WorstRequest(NamedTuple):
    """A sample to keep: it takes the place `slot` of the model's version, instead of what was there."""

    model: str
    version: int
    slot: int
    difference: Difference
    sample: ShadowSample


class ShadowComparisons:
    """The comparisons of one process. `on_change` is called after each; `on_worst` with each sample to keep."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, int], ComparisonTotals] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.on_worst: Callable[[WorstRequest], None] = lambda worst: None
        self.held_bytes = 0
        self._scores: dict[tuple[str, int], list[float]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def of(self, key: tuple[str, int]) -> ComparisonTotals:
        """The sums of one version of a model."""
        totals = self.totals.get(key)
        if totals is None:
            totals = self.totals[key] = ComparisonTotals()
        return totals

    def close(self) -> None:
        """Ends comparisons that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def compare(self, pair: ResponsePair, live: list[Tensor], copied: list[Tensor]) -> None:
        """Compares the outputs of a pair, now or soon."""
        if sum(tensor.size_bytes for tensor in (*live, *copied)) <= INLINE_BYTES:
            self._compared(pair, live, copied, compare(live, copied))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "shadow")
        task = asyncio.get_running_loop().run_in_executor(self._pool, compare, live, copied)
        task.add_done_callback(lambda done: self._take(pair, live, copied, done))

    @contained()
    def _take(
        self, pair: ResponsePair, live: list[Tensor], copied: list[Tensor], done: asyncio.Future[Difference]
    ) -> None:
        if not done.cancelled():
            self._compared(pair, live, copied, done.result())

    def _compared(self, pair: ResponsePair, live: list[Tensor], copied: list[Tensor], difference: Difference) -> None:
        self.of(pair.key).add(difference)
        self.on_change()
        score = difference.score
        scores = self._scores.setdefault(pair.key, [])
        if score <= 0 or (len(scores) >= KEPT_SAMPLES and score <= min(scores)):
            return
        size = len(pair.body) + sum(tensor.size_bytes for tensor in (*live, *copied))
        if size > MAX_SAMPLE_BYTES:
            return
        if len(scores) < KEPT_SAMPLES:
            slot = len(scores)
            scores.append(score)
        else:
            slot = scores.index(min(scores))
            scores[slot] = score
        now_ms = time.time_ns() // 1_000_000
        sample = ShadowSample(pair.request_id, now_ms, _inputs(pair.body), _plain(live), _plain(copied))
        self.on_worst(WorstRequest(*pair.key, slot, difference, sample))


def _inputs(body: bytes | memoryview) -> list[SampleTensor]:
    """The inputs in a packed body; without those whose content lies in shared memory, which may be reused."""
    try:
        request = unpack_body(body, "", 0)
    except MalformedMessage:
        return []
    return _plain([tensor for tensor in request.inputs if not isinstance(tensor.data, tuple)])


def _is_comparable(output: Tensor) -> bool:
    if isinstance(output.data, tuple):
        return False
    return output.datatype != "BYTES" or output.size_bytes <= MAX_STRING_BYTES


def _plain(tensors: list[Tensor]) -> list[SampleTensor]:
    return [
        SampleTensor(tensor.name, tensor.datatype, list(tensor.shape), bytes(tensor.data))  # type: ignore[arg-type]
        for tensor in tensors
    ]


class ResponsePair:
    """The responses of one request and of its copy. `key` is the model's identity, and the version of the copy."""

    __slots__ = ("_comparisons", "_held_bytes", "_is_over", "_outputs", "body", "key", "request_id")

    def __init__(
        self, comparisons: ShadowComparisons, key: tuple[str, int], request_id: str, body: bytes | memoryview
    ) -> None:
        self.key = key
        self.request_id = request_id
        self.body = body
        self._comparisons = comparisons
        self._outputs: dict[bool, list[Tensor]] = {}
        self._held_bytes = 0
        self._is_over = False

    def __del__(self) -> None:
        # A request that was cancelled has no response; then the pair ends with its other reference.
        self._comparisons.held_bytes -= self._held_bytes

    def on_response(
        self, on_response: OnResponse, is_live: bool, outcome: InferResponse | WeirError | None, is_final: bool
    ) -> None:
        """Takes the response of the request, or of the copy, and passes it on."""
        self._take(outcome, is_live)
        on_response(outcome, is_final)

    @contained()
    def _take(self, outcome: InferResponse | WeirError | None, is_live: bool) -> None:
        if self._is_over:
            return
        comparisons = self._comparisons
        if not isinstance(outcome, InferResponse):
            self._end()
            if not is_live:
                comparisons.of(self.key).failed += 1
                comparisons.on_change()
            return
        size = sum(tensor.size_bytes for tensor in outcome.outputs)
        if (
            not all(map(_is_comparable, outcome.outputs))
            or size > MAX_OUTPUT_BYTES
            or comparisons.held_bytes + size > MAX_HELD_BYTES
        ):
            self._end()
            comparisons.of(self.key).skipped += 1
            comparisons.on_change()
            return
        # The caller may change its tensors, and a view may be of memory that is used again.
        self._outputs[is_live] = [
            Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data))  # type: ignore[arg-type]
            for tensor in outcome.outputs
        ]
        self._held_bytes += size
        comparisons.held_bytes += size
        if len(self._outputs) == 2:
            self._is_over = True
            comparisons.compare(self, self._outputs[True], self._outputs[False])

    def _end(self) -> None:
        self._is_over = True
        self._outputs.clear()

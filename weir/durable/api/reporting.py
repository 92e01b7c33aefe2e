"""Counters of durable requests and of gateways, from their processes to the gateway that shows them as metrics.

`read_counters` reads those of this process, `CounterReporter` sends them to gateways, `sum_counters` adds several
readings.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.bus.payloads.fetcher import PayloadFetcher, fetched_bytes
from weir.bus.payloads.server import PayloadServer
from weir.calls.dispatch import RequestDispatcher
from weir.calls.payload_store import PayloadStore
from weir.durable.api.store import DurableStore
from weir.runtime.loop_lag import process_health
from weir.runtime.memory_ledger import MemoryLedger
from weir.runtime.processes.usage import process_usage
from weir.schemas.wire.statistics import (
    ConnectionCounters,
    ConsumerCounters,
    DispatchCounters,
    HealthCounters,
    HistogramCounters,
    LedgerCounters,
    ProcessReading,
    pack_counters,
)

INTAKE_LEASE = "intake."
"""How the names of the leases of models begin."""


def read_counters(  # noqa: PLR0913 - the sources of the counters
    store: DurableStore,
    inference: RequestDispatcher,
    payloads: PayloadStore,
    ledger: MemoryLedger,
    fetcher: PayloadFetcher,
    payload_server: PayloadServer,
) -> ConsumerCounters:
    """All counters of this process."""
    counters = read_consumed(store)
    dispatched = inference.counters
    counters.dispatch = DispatchCounters(
        in_flight=inference.in_flight,
        in_flight_us=dispatched.in_flight_us,
        requests=dispatched.last_key,
        duplicate_responses=inference.duplicate_responses,
        payload_slots=payloads.slots_in_use,
        malformed_messages=inference.malformed_messages,
        rejected=dict(inference.rejected),
        fetched_bytes=dict(fetched_bytes(fetcher)),
        refused_readers=payload_server.refused_readers,
        frame_requests=HistogramCounters(**dispatched.frame_requests.snapshot()),
        frame_bytes=HistogramCounters(**dispatched.frame_bytes.snapshot()),
    )
    counters.ledger = read_ledger(ledger)
    usage = process_usage()
    if usage is not None:
        counters.process = ProcessReading(cpu_s=usage["cpu_s"], resident_bytes=int(usage["resident_bytes"]))
    counters.health = HealthCounters(**process_health())
    return counters


def read_consumed(store: DurableStore) -> ConsumerCounters:
    """The counters of durable requests alone."""
    counters = store.counters
    return ConsumerCounters(
        accepted=[(*key, count) for key, count in counters.accepted.items()],
        ended=[(*key, count) for key, count in counters.ended.items()],
        oldest_ms=[(*key, oldest_ms) for key, oldest_ms in counters.oldest_ms.items()],
        retries=dict(counters.retries),
        redelivered=dict(counters.redelivered),
        conflicts=dict(counters.conflicts),
        malformed=counters.malformed,
        owned_models=sum(key.startswith(INTAKE_LEASE) for key in store.leases.held),
    )


def read_ledger(ledger: MemoryLedger) -> LedgerCounters:
    """The counters of a memory ledger."""
    return LedgerCounters(
        held_bytes=dict(ledger.held_bytes),
        refused=dict(ledger.refused),
        peak_bytes=ledger.peak_bytes,
        limit_bytes=ledger.limit_bytes,
    )


def sum_counters(live: Sequence[ConsumerCounters], departed: Sequence[ConsumerCounters] = ()) -> ConsumerCounters:
    """The sum of several readings. Of processes that have departed only the counts of events are added."""
    everything = [*live, *departed]
    dispatch = [counters.dispatch for counters in everything]
    ledgers = [counters.ledger for counters in live]
    return ConsumerCounters(
        accepted=_labelled(counters.accepted for counters in everything),
        ended=_labelled(counters.ended for counters in everything),
        oldest_ms=_labelled(counters.oldest_ms for counters in live),
        retries=_named(counters.retries for counters in everything),
        redelivered=_named(counters.redelivered for counters in everything),
        conflicts=_named(counters.conflicts for counters in everything),
        malformed=sum(counters.malformed for counters in everything),
        owned_models=sum(counters.owned_models for counters in live),
        dispatch=DispatchCounters(
            in_flight=sum(counters.dispatch.in_flight for counters in live),
            in_flight_us=sum(counters.in_flight_us for counters in dispatch),
            requests=sum(counters.requests for counters in dispatch),
            duplicate_responses=sum(counters.duplicate_responses for counters in dispatch),
            payload_slots=sum(counters.dispatch.payload_slots for counters in live),
            malformed_messages=sum(counters.malformed_messages for counters in dispatch),
            rejected=_named(counters.rejected for counters in dispatch),
            fetched_bytes=_named(counters.fetched_bytes for counters in dispatch),
            refused_readers=sum(counters.refused_readers for counters in dispatch),
            frame_requests=_histogram([counters.frame_requests for counters in dispatch]),
            frame_bytes=_histogram([counters.frame_bytes for counters in dispatch]),
        ),
        ledger=LedgerCounters(
            held_bytes=_named(ledger.held_bytes for ledger in ledgers),
            refused=_named(counters.ledger.refused for counters in everything),
            peak_bytes=sum(ledger.peak_bytes for ledger in ledgers),
            limit_bytes=sum(ledger.limit_bytes for ledger in ledgers),
        ),
        connections=ConnectionCounters(
            open=sum(counters.connections.open for counters in live),
            limit=sum(counters.connections.limit for counters in live),
            ended=_named(counters.connections.ended for counters in everything),
        ),
    )


def _named(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _labelled(counts: Iterable[Sequence[tuple[str, str, int]]]) -> list[tuple[str, str, int]]:
    total: Counter[tuple[str, str]] = Counter()
    for rows in counts:
        for first, second, count in rows:
            total[first, second] += count
    return [(*labels, count) for labels, count in total.items()]


def _histogram(histograms: Sequence[HistogramCounters]) -> HistogramCounters:
    """The sum of histograms by powers of two, which may end at different ones. The last bucket holds all that is above."""
    longest = max(histograms, key=lambda histogram: len(histogram.bounds), default=HistogramCounters())
    counts = [0] * len(longest.counts)
    for histogram in histograms:
        for position, count in enumerate(histogram.counts[:-1]):
            counts[position] += count
        counts[-1] += histogram.counts[-1]
    return HistogramCounters(bounds=longest.bounds, counts=counts, sum=sum(histogram.sum for histogram in histograms))


class CounterReporter:
    """Replies to `statistics.query` with the counters of this process: `read()`, and those of its response cache.

    The process is `weir durable`, a gateway in the `group` of one, or without `read` a gateway that has a cache.
    """

    def __init__(
        self,
        bus: Bus,
        id: str,
        read: Callable[[], ConsumerCounters] | None,
        read_cache: Callable[[], list[dict[str, Any]]],
        group: str = "",
    ) -> None:
        self._bus = bus
        self._id = id
        self._read = read
        self._read_cache = read_cache
        self._group = group
        self._born_ns = time.time_ns()

    async def start(self) -> None:
        """Subscribes to queries, and announces this process as a source of counters."""
        await self._bus.subscribe(subjects.STATISTICS_QUERY, self._on_query)
        self._bus.publish(subjects.LAST_COUNTERS, self._packed())

    def stop(self) -> None:
        """Publishes the final counters, which stay in the sums of gateways."""
        self._bus.publish(subjects.LAST_COUNTERS, self._packed(leaving=True))

    def _on_query(self, message: Message) -> None:
        if may_reply_to(message, subjects.counters("")):
            self._bus.publish(message.reply, self._packed())

    def _packed(self, leaving: bool = False) -> bytes:
        return pack_counters(
            {
                "gateway": self._id,
                "role": "gateway" if self._group else "durable",
                "group": self._group,
                "born_ns": self._born_ns,
                "models": self._read_cache(),
                "leaving": leaving,
                "consumer": self._read and msgspec.to_builtins(self._read()),
            }
        )

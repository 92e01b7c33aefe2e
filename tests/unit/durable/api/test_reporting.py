"""Counters of durable requests: read in one process, summed with those of others for the metrics page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from weir.durable.api.metrics import DurableCounters
from weir.durable.api.reporting import CounterReporter, read_consumed, read_ledger, sum_counters
from weir.runtime.memory_ledger import MemoryLedger
from weir.schemas.core.requests import Lane
from weir.schemas.wire.statistics import (
    ConnectionCounters,
    ConsumerCounters,
    DispatchCounters,
    GatewayCounters,
    HistogramCounters,
    LedgerCounters,
    unpack_counters,
)
from weir.schemas.wire.terminal import Outcome


def test_the_counters_of_a_process_are_read() -> None:
    counters = DurableCounters()
    counters.accept("m", Lane.EVENT)
    counters.end("m", Outcome.SUCCEEDED)
    counters.set_oldest("m", Lane.EVENT, 7)
    store: Any = SimpleNamespace(counters=counters, leases=SimpleNamespace(held=["intake.m", "job.1"]))
    consumed = read_consumed(store)
    assert consumed.accepted == [("m", "event", 1)]
    assert consumed.ended == [("m", "succeeded", 1)]
    assert consumed.oldest_ms == [("m", "event", 7)]
    assert consumed.owned_models == 1


def test_the_ledger_is_read() -> None:
    ledger = MemoryLedger(1000)
    ledger.account("a").charge("http", 300)
    assert read_ledger(ledger) == LedgerCounters(held_bytes={"http": 300}, peak_bytes=300, limit_bytes=1000)


def reading(count: int) -> ConsumerCounters:
    return ConsumerCounters(
        accepted=[("m", "event", count)],
        oldest_ms=[("m", "event", count)],
        retries={"m": count},
        malformed=count,
        owned_models=1,
        dispatch=DispatchCounters(
            in_flight=count,
            requests=count,
            rejected={"stream": count},
            frame_requests=HistogramCounters(bounds=[1.0] * count, counts=[count] * (count + 1), sum=count),
        ),
        ledger=LedgerCounters(held_bytes={"durable": count}, limit_bytes=10),
        connections=ConnectionCounters(open=count, limit=10, ended={"silent": count}),
    )


def test_readings_of_live_processes_are_added() -> None:
    total = sum_counters([reading(1), reading(2)])
    assert total.accepted == [("m", "event", 3)]
    assert (total.retries, total.malformed, total.owned_models) == ({"m": 3}, 3, 2)
    assert (total.dispatch.in_flight, total.dispatch.requests, total.dispatch.rejected) == (3, 3, {"stream": 3})
    assert total.dispatch.frame_requests.counts == [3, 2, 3]
    assert (total.ledger.held_bytes, total.ledger.limit_bytes) == ({"durable": 3}, 20)


def test_a_process_that_has_departed_adds_events_but_no_gauges() -> None:
    total = sum_counters([reading(1)], [reading(2)])
    assert (total.accepted, total.dispatch.requests) == ([("m", "event", 3)], 3)
    assert (total.oldest_ms, total.owned_models) == ([("m", "event", 1)], 1)
    assert (total.dispatch.in_flight, total.ledger.held_bytes) == (1, {"durable": 1})


async def test_gateways_decode_the_reply_as_that_of_a_gateway() -> None:
    published: list[bytes] = []
    bus: Any = SimpleNamespace(publish=lambda _subject, data: published.append(data))
    reporter = CounterReporter(bus, "d", lambda: reading(2), list)
    reporter.stop()
    reply = unpack_counters(published[0])
    assert isinstance(reply, GatewayCounters)
    assert (reply.gateway, reply.leaving, reply.consumer) == ("d", True, reading(2))
    fields = msgspec.msgpack.decode(published[0])
    assert fields["models"] == []
    assert (reply.role, reply.group) == ("durable", "")


def test_a_gateway_reports_as_one_of_a_group() -> None:
    published: list[bytes] = []
    bus: Any = SimpleNamespace(publish=lambda _subject, data: published.append(data))
    CounterReporter(bus, "g", lambda: reading(2), list, "d").stop()
    reply = unpack_counters(published[0])
    assert isinstance(reply, GatewayCounters)
    assert (reply.gateway, reply.role, reply.group) == ("g", "gateway", "d")

"""Leases of observers: what they ask for, their rates, and their ends."""

from __future__ import annotations

from typing import cast

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.waiting import eventually
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.observation import MAX_LEASES, ObservationLeases, Observed
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.observation import (
    LEASE_S,
    MAX_REPORTS,
    BatchEndReport,
    BatchReason,
    BatchReport,
    ObserveRequest,
    TraceReport,
    pack_report,
    pack_reports,
    unpack_reports,
)


def test_a_lease_ends_unless_it_is_renewed() -> None:
    leases = ObservationLeases()
    assert leases.apply(ObserveRequest("c", "m", batches_per_s=10), 0.0)
    assert leases.expire(1.0) == LEASE_S
    assert leases.apply(ObserveRequest("c", "m", batches_per_s=10), 5.0)
    assert leases.expire(12.0) == 5.0 + LEASE_S
    assert leases.observers_of_batch("m", 12.0) == [("c", 0)]
    assert leases.expire(15.1) is None
    assert leases.observers_of_batch("m", 15.1) == []
    assert not leases


def test_a_lease_of_no_time_ends_it() -> None:
    leases = ObservationLeases()
    leases.apply(ObserveRequest("c", "m", batches_per_s=10), 0.0)
    leases.apply(ObserveRequest("c", "m", lease_s=0.0), 1.0)
    assert not leases


def test_batches_beyond_the_rate_are_counted_for_the_next_report() -> None:
    leases = ObservationLeases()
    leases.apply(ObserveRequest("c", batches_per_s=8), 0.0)
    reported = [leases.observers_of_batch("m", 0.0) for _ in range(10)]
    assert reported[:2] == [[("c", 0)], [("c", 0)]]
    assert reported[2:] == [[]] * 8
    assert leases.observers_of_batch("other", 0.0) == [("c", 0)], "each model has its own rate"
    assert leases.observers_of_batch("m", 0.125) == [("c", 8)]
    per_second = sum(bool(leases.observers_of_batch("m", 1 + step / 1000)) for step in range(10_000))
    assert 80 <= per_second <= 83


def test_each_observer_has_its_own_rates_and_models() -> None:
    leases = ObservationLeases()
    leases.apply(ObserveRequest("a", "m", batches_per_s=100, traces_per_s=4), 0.0)
    leases.apply(ObserveRequest("b", "", batches_per_s=100), 0.0)
    assert leases.observers_of_batch("m", 0.0) == [("a", 0), ("b", 0)]
    assert leases.observers_of_batch("n", 0.0) == [("b", 0)]
    assert leases.observers_of_request("m", "", 0.0) == ("a",)
    assert leases.observers_of_request("n", "", 0.0) == ()
    assert leases.wanted_models(0.0) == (frozenset(), 0.25)
    assert leases.wanted_models(0.26) == ({"m"}, None)


def test_a_request_whose_id_is_asked_for_is_always_taken() -> None:
    leases = ObservationLeases()
    leases.apply(ObserveRequest("c", ids=["mine"]), 0.0)
    assert leases.wanted_models(0.0) == ({""}, None)
    assert leases.observers_of_request("any", "mine", 0.0) == ("c",)
    assert leases.observers_of_request("any", "yours", 0.0) == ()


def test_a_renewal_does_not_refill_the_rates() -> None:
    leases = ObservationLeases()
    leases.apply(ObserveRequest("c", traces_per_s=4), 0.0)
    assert leases.observers_of_request("m", "", 0.0) == ("c",)
    leases.apply(ObserveRequest("c", traces_per_s=4), 0.0)
    assert leases.observers_of_request("m", "", 0.0) == ()


def test_leases_are_bounded() -> None:
    leases = ObservationLeases()
    taken = [leases.apply(ObserveRequest(f"c{number}"), 0.0) for number in range(MAX_LEASES + 1)]
    assert taken == [True] * MAX_LEASES + [False]


async def test_a_process_is_observed_until_the_lease_ends() -> None:
    bus = CollectingBus()
    observed = Observed(cast(Bus, bus))
    changes: list[bool] = []
    observed.on_change(lambda: changes.append(observed.is_on))
    await observed.start()
    bus.deliver(subjects.OBSERVE, b"garbage")
    assert (observed.malformed_messages, observed.is_on) == (1, False)
    bus.deliver(subjects.OBSERVE, ObserveRequest("c", "m", lease_s=0.05).pack())
    assert observed.is_on
    await eventually(lambda: not observed.is_on)
    assert changes == [True, False]


@pytest.mark.parametrize(
    "report",
    [
        BatchReport(
            scheduler="s", id=1, model="m", version=2, worker="w", instance=0, sent_us=5, size=1, rows=2,
            reason=BatchReason.DELAY,
        ),
        BatchEndReport(scheduler="s", id=1, ended_us=7, busy_us=2, is_answered=True),
        TraceReport(gateway="g", key=3, model="m", times=[("REQUEST_START", 5)], batch=1),
    ],
)  # fmt: skip
def test_a_report_survives_the_way(report: BatchReport | BatchEndReport | TraceReport) -> None:
    assert unpack_reports(pack_reports([pack_report(report), ("newer", b"?"), pack_report(report)])) == [report, report]


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x91\x92\xa5trace\xc4\x01\x00", b"\x91\x93\x01\x02\x03"])
def test_other_bytes_are_no_reports(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_reports(data)


async def test_reports_of_a_while_travel_together_and_many_at_once() -> None:
    bus = CollectingBus()
    observed = Observed(cast(Bus, bus))
    report = BatchEndReport(scheduler="s", id=1, ended_us=7, busy_us=2, is_answered=True)
    for _ in range(MAX_REPORTS + 5):
        observed.publish(("a",), report)
    observed.publish(("a", "b"), report)
    assert [len(unpack_reports(data)) for data in bus.taken(subjects.observed("a"))] == [MAX_REPORTS]
    await eventually(lambda: len(bus.published) == 2)
    assert [len(unpack_reports(data)) for data in bus.taken(subjects.observed("a"))] == [6]
    assert [len(unpack_reports(data)) for data in bus.taken(subjects.observed("b"))] == [1]

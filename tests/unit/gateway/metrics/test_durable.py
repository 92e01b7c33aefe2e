"""The families of durable requests, from the counters of one process and the broker's backlog."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from weir.durable.api.metrics import DurableCounters
from weir.gateway.metrics.durable import durable_families
from weir.schemas.wire.statistics import ConsumerCounters


def store(ack_is_fsync: bool | None = True, **sizes: Any) -> Any:
    return SimpleNamespace(
        counters=DurableCounters(),
        backlog=SimpleNamespace(dead_letters={"m": 2}, sizes=sizes),
        publisher=SimpleNamespace(stalled={"QUEUE", "RESULT"}),
        durability=SimpleNamespace(result=SimpleNamespace(ack_is_fsync=ack_is_fsync)),
    )


def values(durable: Any, consumed: ConsumerCounters | None = None) -> dict[tuple[str, ...], float]:
    return {
        (family.name, *sample.labels.values()): sample.value
        for family in durable_families(cast(Any, durable), consumed or ConsumerCounters())
        for sample in family.samples
    }


def test_counters_have_their_labels() -> None:
    consumed = ConsumerCounters(
        accepted=[("m", "event", 3)], ended=[("m", "succeeded", 2)], retries={"m": 1}, malformed=4, owned_models=2
    )
    found = values(store(), consumed)
    assert found["weir_durable_accepted", "m", "event"] == 3
    assert found["weir_durable_ended", "m", "succeeded"] == 2
    assert found["weir_durable_retries", "m"] == 1
    assert found["weir_durable_malformed",] == 4
    assert found["weir_durable_dead_letters", "m"] == 2
    assert found["weir_durable_owned_models",] == 2
    assert found["weir_durable_stalled_streams",] == 2


def test_without_a_waiting_request_the_age_is_zero() -> None:
    assert (
        values(store(), ConsumerCounters(oldest_ms=[("m", "event", 0)]))[
            "weir_durable_oldest_age_seconds", "m", "event"
        ]
        == 0
    )


def test_an_empty_stream_has_no_age() -> None:
    found = values(store(QUEUE=SimpleNamespace(messages=0, size_bytes=0, first_s=0.0)))
    assert found["weir_durable_stream_messages", "QUEUE"] == 0
    assert found["weir_durable_stream_oldest_age_seconds", "QUEUE"] == 0


@pytest.mark.parametrize(("ack_is_fsync", "value"), [(True, 1), (False, 0), (None, -1)])
def test_durability_of_acknowledgements(ack_is_fsync: bool | None, value: int) -> None:
    assert values(store(ack_is_fsync))["weir_durable_ack_is_fsync",] == value

"""What is counted of durable requests, and that names which producers make up don't make series without end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weir.bus.streams.durability import NO, NOT_ASKED, YES
from weir.durable.api.metrics import MAX_MODELS, OTHER_MODELS, DurableCounters, StreamSize
from weir.durable.api.reporting import read_consumed
from weir.gateway.metrics.durable import durable_families
from weir.gateway.metrics.text import render
from weir.schemas.core.requests import Lane
from weir.schemas.wire.terminal import Outcome


def page(counters: DurableCounters, durability: Any = NOT_ASKED) -> str:
    durable: Any = SimpleNamespace(
        counters=counters,
        backlog=SimpleNamespace(dead_letters={"m": 2}, sizes={"QUEUE": StreamSize(0, 0, 0.0)}),
        leases=SimpleNamespace(held=["intake.m", "job.1"]),
        publisher=SimpleNamespace(stalled=set()),
        durability=SimpleNamespace(result=durability),
    )
    return render(durable_families(durable, read_consumed(durable))).decode()


def test_each_count_has_its_series() -> None:
    counters = DurableCounters()
    counters.accept("m", Lane.EVENT)
    counters.accept("m", Lane.BATCH)
    counters.end("m", Outcome.DEAD_LETTERED)
    counters.retry("m")
    counters.redeliver("m")
    counters.conflict("m")
    counters.malformed += 3
    counters.set_waiting("m", Lane.EVENT, 5)
    counters.set_in_flight("m", Lane.EVENT, 6)
    counters.set_oldest("m", Lane.EVENT, 0)
    text = page(counters)
    for line in (
        'weir_durable_accepted{model="m",lane="batch"} 1',
        'weir_durable_accepted{model="m",lane="event"} 1',
        'weir_durable_ended{model="m",outcome="dead-lettered"} 1',
        'weir_durable_retries{model="m"} 1',
        'weir_durable_redelivered{model="m"} 1',
        'weir_durable_conflicts{model="m"} 1',
        "weir_durable_malformed 3",
        'weir_durable_waiting{model="m",lane="event"} 5',
        'weir_durable_in_flight{model="m",lane="event"} 6',
        'weir_durable_oldest_age_seconds{model="m",lane="event"} 0',
        'weir_durable_dead_letters{model="m"} 2',
        'weir_durable_stream_bytes{stream="QUEUE"} 0',
        "weir_durable_owned_models 1",
        "weir_durable_ack_is_fsync -1",
    ):
        assert f"\n{line}\n" in text
    assert "\nweir_durable_ack_is_fsync 1\n" in page(counters, YES)
    assert "\nweir_durable_ack_is_fsync 0\n" in page(counters, NO)
    counters.forget("m")
    assert 'weir_durable_waiting{model="m"' not in page(counters)


def test_made_up_names_share_one_series() -> None:
    names = [f"model-{number}" for number in range(100_000)]
    for counters, series in ((DurableCounters(), MAX_MODELS + 1), (DurableCounters(lambda name: name == "model-7"), 2)):
        for name in names:
            counters.accept(name, Lane.EVENT)
            counters.set_waiting(name, Lane.EVENT, 1)
        assert len(counters.accepted) == series
        assert len(counters.waiting) == series - 1  # of several models a gauge says nothing
        assert sum(counters.accepted.values()) == len(names)
        assert counters.accepted[OTHER_MODELS, "event"] == len(names) - series + 1

"""Which requests of a caller are traced for observers, and what the others pay."""

from __future__ import annotations

from typing import cast

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.waiting import eventually
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.calls.trace_feed import TraceFeed
from weir.calls.tracing import OBSERVED, Tracing
from weir.schemas.core.errors import not_found
from weir.schemas.core.requests import InferRequest
from weir.schemas.wire.observation import ObserveRequest, TraceReport, unpack_reports


class Asking:
    def __init__(self, id: str = "", model: str = "m") -> None:
        self.key = 7
        self.request = InferRequest(model, id=id)
        self.request.arrival = ("HTTP_RECV_START", 1), ("HTTP_RECV_END", 2)

    def on_response(self, *_: object) -> None:
        pass


class Caller:
    def __init__(self) -> None:
        self.bus = CollectingBus()
        self.tracing = Tracing()
        self.feed = TraceFeed(cast(Bus, self.bus), "g", self.tracing, "nats")

    def observe(self, request: ObserveRequest) -> None:
        self.bus.deliver(subjects.OBSERVE, request.pack())

    async def ask(self, id: str = "", model: str = "m", fails: bool = False) -> TraceReport | None:
        """Submits a request and answers it; returns what was reported of it."""
        asking = Asking(id, model)
        trace = self.tracing.start(asking.request, model)
        if trace is None:
            return None
        facts = {"BATCH_ID": 4, "BATCH_SIZE": 2, "INSTANCE": 1, "SCHEDULER": "s", "WORKER": "w", "COMPUTE_START": 9}
        self.tracing.deliver(trace, asking, not_found("none") if fails else None, True, dict(facts))
        await eventually(lambda: bool(self.bus.published))
        (message,) = self.bus.taken(subjects.observed("c"))
        (report,) = unpack_reports(message)
        return cast(TraceReport, report)


@pytest.fixture
async def caller() -> Caller:
    made = Caller()
    await made.feed.start()
    return made


async def test_without_an_observer_nothing_is_traced(caller: Caller) -> None:
    assert not caller.tracing.is_on
    assert await caller.ask() is None


async def test_a_traced_request_is_reported_with_its_batch(caller: Caller) -> None:
    caller.observe(ObserveRequest("c", "m", traces_per_s=4))
    report = await caller.ask("mine")
    assert report is not None
    assert (report.gateway, report.key, report.id, report.protocol, report.status) == ("g", 7, "mine", "http", 200)
    assert (report.scheduler, report.batch, report.batch_size, report.worker, report.instance) == ("s", 4, 2, "w", 1)
    assert [name for name, _ in report.times][:3] == ["HTTP_RECV_START", "HTTP_RECV_END", "COMPUTE_START"]


async def test_a_failed_request_has_its_status_and_its_error(caller: Caller) -> None:
    caller.observe(ObserveRequest("c", "m", traces_per_s=4))
    report = await caller.ask(fails=True)
    assert report is not None
    assert (report.status, report.error) == (404, "none")


async def test_while_the_rate_is_used_up_a_request_pays_for_one_attribute(caller: Caller) -> None:
    caller.observe(ObserveRequest("c", "m", traces_per_s=20))
    started = [caller.tracing.start(InferRequest("m"), "m") for _ in range(6)]
    assert [trace is not None for trace in started] == [True] * 2 + [False] * 4
    assert not caller.tracing.is_on
    await eventually(lambda: caller.tracing.is_on)
    assert await caller.ask() is not None
    caller.observe(ObserveRequest("c", "m", lease_s=0.0))
    assert not caller.tracing.is_on


async def test_requests_for_other_models_are_not_wanted(caller: Caller) -> None:
    caller.observe(ObserveRequest("c", "m", traces_per_s=20))
    assert caller.tracing.samples("other", "") == 0
    assert caller.tracing.samples("m", "") == OBSERVED
    assert await caller.ask(model="other") is None


async def test_a_request_is_reported_for_its_id_alone(caller: Caller) -> None:
    caller.observe(ObserveRequest("c", ids=["mine"]))
    assert await caller.ask("yours") is None
    assert await caller.ask("mine", "any") is not None

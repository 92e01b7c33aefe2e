"""A scheduler's reports to gateways about lost durable requests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.scheduling.completions import Outcome
from tests.support.scheduling.requests import part
from tests.unit.scheduler.service.test_service import CANCEL, INBOX, Served, serve
from weir.schemas.wire.calls import Cancellation, Frame, LostAttempts


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = await serve()
    yield served
    served.owned.timer.close()


def test_gateways_receive_reports_of_lost_durable_requests(served: Served):
    lanes = {1: 1, 2: 0}
    served.bus.deliver(INBOX, Frame("gateway", [part(k, lane=lane) for k, lane in lanes.items()]).pack(), "$JS.ACK.1")
    (batch,) = served.batches()
    served.done(batch.batch_id, Outcome.UNANSWERED)
    (again,) = served.batches()
    reported = [LostAttempts.unpack(data) for data in served.bus.taken("lost-attempts.gateway")]
    assert reported == [LostAttempts([1], "its process died")]
    assert len(again.entries) == 2
    served.bus.deliver("lost.scheduler.worker", b"", status="503")
    reported = [LostAttempts.unpack(data) for data in served.bus.taken("lost-attempts.")]
    assert reported == [LostAttempts([1], "worker worker was lost")]


def test_no_loss_is_reported_for_a_cancelled_request(served: Served):
    served.bus.deliver(INBOX, Frame("gateway", [part(1, lane=1)]).pack(), "$JS.ACK.1")
    served.batches()
    served.bus.deliver(CANCEL, Cancellation("gateway", [1]).pack())
    served.bus.deliver("lost.scheduler.worker", b"", status="503")
    assert not served.bus.taken("lost-attempts.")


def test_an_exhausted_request_gets_an_error_and_no_loss_report(served: Served):
    served.bus.deliver(INBOX, Frame("gateway", [part(1, lane=1)]).pack(), "$JS.ACK.1")
    for _ in range(4):
        (batch,) = served.batches()
        served.done(batch.batch_id, Outcome.UNANSWERED)
    assert len(served.bus.taken("lost-attempts.")) == 3
    assert served.unanswered == 0


def test_an_unstarted_request_does_not_count_as_lost(served: Served):
    served.bus.deliver(INBOX, Frame("gateway", [part(1, lane=1), part(2)]).pack(), "$JS.ACK.1")
    (batch,) = served.batches()
    served.done(batch.batch_id, Outcome.NOT_RUN)
    assert served.bus.taken("lost-attempts.") == []

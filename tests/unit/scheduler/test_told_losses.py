"""What a scheduler tells gateways of durable requests that were lost."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from queued import part
from test_service import CANCEL, INBOX, Served, serve

from schemas.lost_attempts import unpack_lost_attempts
from schemas.messages import BatchOutcome, pack_cancel, pack_frame


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = await serve()
    yield served
    served.owned.alarm.close()


def test_gateways_are_told_which_durable_requests_were_lost_and_are_done_again(served: Served):
    lanes = {1: 1, 2: 0}
    served.bus.deliver(INBOX, pack_frame("gateway", [part(k, lane=lane) for k, lane in lanes.items()]), "$JS.ACK.1")
    (batch,) = served.batches()
    served.done(batch.batch_id, BatchOutcome.UNANSWERED)
    (again,) = served.batches()
    told = [unpack_lost_attempts(data) for data in served.bus.taken("lost-attempts.gateway")]
    assert told == [([1], "its process died")]
    assert len(again.entries) == 2
    served.bus.deliver("lost.scheduler.worker", b"", status="503")
    told = [unpack_lost_attempts(data) for data in served.bus.taken("lost-attempts.")]
    assert told == [([1], "worker worker was lost")]


def test_who_has_gone_is_not_told_of_a_loss(served: Served):
    served.bus.deliver(INBOX, pack_frame("gateway", [part(1, lane=1)]), "$JS.ACK.1")
    served.batches()
    served.bus.deliver(CANCEL, pack_cancel("gateway", [1]))
    served.bus.deliver("lost.scheduler.worker", b"", status="503")
    assert not served.bus.taken("lost-attempts.")


def test_a_request_that_is_given_up_is_not_told_of_but_answered(served: Served):
    served.bus.deliver(INBOX, pack_frame("gateway", [part(1, lane=1)]), "$JS.ACK.1")
    for _ in range(4):
        (batch,) = served.batches()
        served.done(batch.batch_id, BatchOutcome.UNANSWERED)
    assert len(served.bus.taken("lost-attempts.")) == 3
    assert served.service.unanswered == 0


def test_what_was_not_begun_was_not_lost(served: Served):
    served.bus.deliver(INBOX, pack_frame("gateway", [part(1, lane=1), part(2)]), "$JS.ACK.1")
    (batch,) = served.batches()
    served.done(batch.batch_id, BatchOutcome.NOT_RUN)
    assert served.bus.taken("lost-attempts.") == []

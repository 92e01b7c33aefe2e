"""Responses that a helper process encodes keep their order among the others of a NATS request."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tests.unit.gateway.nats.test_call import Caller
from weir.calls.inference.call import MAX_WAITING_BYTES
from weir.runtime.offload import Offload
from weir.schemas.core.errors import invalid
from weir.schemas.kserve.response import MAX_WRITTEN_BYTES

LONG = MAX_WRITTEN_BYTES + 1


async def ended(caller: Caller) -> None:
    async with asyncio.timeout(10):
        while not caller.ended:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("window", [0, 9])
async def test_responses_come_in_order(window: int) -> None:
    offload = Offload()
    caller = Caller(window, offload=offload)
    sizes = [3, LONG, 4, LONG + 1, LONG + 2, 5]
    for number, size in enumerate(sizes):
        caller.on_response(size, is_final=number == len(sizes) - 1)
    assert len(caller.sent) == 1
    await ended(caller)
    assert [b'"shape":[%d]' % size in body for size, (_, body, _) in zip(sizes, caller.sent, strict=True)] == [True] * 6
    assert [headers["weir-final"] for headers, _, _ in caller.sent] == ["false"] * 5 + ["true"]
    assert caller.ledger.total_bytes == 0
    offload.close()


async def test_a_model_that_is_faster_than_the_helper_is_not_the_caller_s_fault() -> None:
    offload = Offload()
    caller = Caller(offload=offload)
    count = MAX_WAITING_BYTES // LONG + 2
    for number in range(count):
        caller.on_response(LONG, is_final=number == count - 1)
    await ended(caller)
    assert (len(caller.sent), caller.error) == (count, "")
    offload.close()


async def test_a_caller_that_goes_meanwhile_leaves_nothing_behind() -> None:
    offload = Offload()
    caller = Caller(offload=offload)
    caller.on_response(LONG)
    caller.on_response(LONG)
    caller.call.disconnected()
    await asyncio.sleep(0)  # for the cancelled task
    await asyncio.sleep(0)
    assert (caller.sent, caller.ledger.total_bytes) == ([], 0)
    offload.close()


async def test_what_can_not_be_written_is_an_error_in_its_place() -> None:
    class Refusing:
        def start(self, *_: Any) -> Any:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(invalid("not as JSON"))
            return future

    caller = Caller(offload=cast(Any, Refusing()))
    caller.on_response(LONG)
    caller.on_response(1, is_final=True)
    await ended(caller)
    assert [headers["weir-outcome"] for headers, _, _ in caller.sent] == ["failed", "succeeded"]
    assert b"not as JSON" in caller.sent[0][1]

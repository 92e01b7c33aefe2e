"""Responses of an instance: large outputs in shared memory, small ones in messages, and failures of single ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from weir.bus.naming.identity import own_id
from weir.bus.payloads.arena import INLINE_LIMIT_BYTES, REMOTE_INLINE_LIMIT_BYTES, PayloadReader, StalePayload
from weir.bus.payloads.reach import process_reach
from weir.schemas.core.errors import internal
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.batches import BatchEntry
from weir.schemas.wire.calls import unpack_responses
from weir.worker.backend_api.interface import Result
from weir.worker.execution.response_writer import ResponseWriter, pack_by_gateway, pack_rows
from weir.worker.execution.shared_memory import SharedMemoryAccess, SharedMemoryIO

HERE, ELSEWHERE = own_id("gateway", None), "gateway-01234567-1_1"
LARGE = bytes(INLINE_LIMIT_BYTES + 1)


def entry(gateway: str = HERE, key: int = 1) -> BatchEntry:
    return BatchEntry(gateway, key, 0, b"")


def result(content: bytes) -> Result:
    return Result([Tensor("OUT", "UINT8", [len(content)], content)])


@pytest.fixture
def writer() -> Iterator[ResponseWriter]:
    created = ResponseWriter(own_id("worker", None), SharedMemoryIO(SharedMemoryAccess()))
    yield created
    created.close()


def test_large_outputs_for_this_host_use_slots_until_they_are_released(writer: ResponseWriter) -> None:
    (row,) = unpack_responses(pack_rows(1, [writer.write(entry(), None, result(LARGE))]))[1]
    assert row.outputs is not None
    ref = row.outputs[0].data
    assert isinstance(ref, PayloadRef)
    assert bytes(PayloadReader().view(ref)) == LARGE
    assert writer.slots_held == 1
    writer.release(ref.segment, ref.slot, ref.generation)
    assert writer.slots_held == 0


@pytest.mark.parametrize(("gateway", "content"), [(HERE, b"small"), (ELSEWHERE, LARGE)], ids=["here", "elsewhere"])
def test_small_outputs_and_those_for_other_hosts_travel_in_the_message(
    writer: ResponseWriter, gateway: str, content: bytes
) -> None:
    (row,) = unpack_responses(pack_rows(1, [writer.write(entry(gateway), None, result(content))]))[1]
    assert row.outputs is not None
    assert bytes(row.outputs[0].data) == content  # type: ignore[arg-type]
    assert writer.slots_held == 0


def test_a_response_that_fits_nowhere_is_an_error(writer: ResponseWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_reach(), "message_bytes", 10)
    (row,) = unpack_responses(pack_rows(1, [writer.write(entry(), None, result(bytes(11)))]))[1]
    assert row.error is not None
    assert row.error.message == "the response of 11 bytes is larger than can be sent to the gateway"


def test_outputs_that_another_host_can_t_fetch_travel_in_the_message_as_far_as_they_fit(
    writer: ResponseWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(REMOTE_INLINE_LIMIT_BYTES + 1)
    (row,) = unpack_responses(pack_rows(1, [writer.write(entry(ELSEWHERE), None, result(content))]))[1]
    assert row.outputs is not None
    assert isinstance(row.outputs[0].data, PayloadRef)
    monkeypatch.setattr(process_reach(), "is_served", False)
    (row,) = unpack_responses(pack_rows(1, [writer.write(entry(ELSEWHERE), None, result(content))]))[1]
    assert row.outputs is not None
    assert row.outputs[0].data == content
    monkeypatch.setattr(process_reach(), "message_bytes", len(content) - 1)
    (row,) = unpack_responses(pack_rows(1, [writer.write(entry(ELSEWHERE), None, result(content))]))[1]
    assert row.error is not None
    assert row.error.message.endswith(
        "is larger than can be sent to the gateway, which is on another host: its worker has no --payload-listen"
    )
    (row,) = unpack_responses(pack_rows(1, [writer.write(entry(HERE), None, result(content))]))[1]
    assert row.outputs is not None
    assert isinstance(row.outputs[0].data, PayloadRef)


def test_an_error_is_written_without_outputs(writer: ResponseWriter) -> None:
    (row,) = unpack_responses(pack_rows(1, [writer.write(entry(), None, Result(error=internal("no")))]))[1]
    assert row.error is not None
    assert (row.key, row.error.message) == (1, "no")


def test_a_row_that_can_not_be_encoded_fails_alone(writer: ResponseWriter) -> None:
    broken = result(b"x")
    broken.parameters = {"a": object()}  # type: ignore[dict-item]
    rows = [writer.write(entry(key=1), None, result(b"x")), writer.write(entry(key=2), None, broken)]
    first, second = unpack_responses(pack_rows(1, rows))[1]
    assert first.error is None
    assert second.error is not None
    assert second.error.message.startswith("the response can't be sent: TypeError")


def test_closing_waits_for_readers_and_invalidates_slots(
    writer: ResponseWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = unpack_responses(pack_rows(1, [writer.write(entry(), None, result(LARGE))]))[1]
    assert row.outputs is not None
    ref = row.outputs[0].data
    assert isinstance(ref, PayloadRef)
    closing = threading.Thread(target=writer.close, args=(True,))
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "the slot has not been released"
    writer.release(ref.segment, ref.slot, ref.generation)
    closing.join(5)
    assert not closing.is_alive()
    with pytest.raises((StalePayload, ValueError)):
        PayloadReader().view(ref)
    assert writer.place(HERE, [Tensor("OUT", "UINT8", [len(LARGE)], LARGE)]) is None
    assert writer.slots_held == 0, "later outputs travel in messages"


def test_rows_that_are_together_too_large_for_a_message_travel_in_several(
    writer: ResponseWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_reach(), "message_bytes", 3000)
    rows = [writer.write(entry(key=key), None, result(bytes(1000))) for key in range(5)]
    messages = pack_by_gateway(1, {"near.1": rows, "near.2": rows[:1]})
    assert [gateway for gateway, _ in messages] == ["near.1"] * (len(messages) - 1) + ["near.2"]
    assert max(len(message) for _, message in messages) <= 3000
    keys = [row.key for gateway, message in messages for row in unpack_responses(message)[1] if gateway == "near.1"]
    assert keys == list(range(5))

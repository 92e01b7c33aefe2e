"""Which queue of a model takes a caller's requests: by the sequence, or where fewest are under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bus.naming.live_queues import LiveLayout, LiveQueue
from weir.calls.in_flight import InFlight, PendingRequest
from weir.calls.outbox import Outbox
from weir.calls.payload_store import PayloadStore
from weir.calls.queues import PartitionedQueue, PartitionSelector, destination_of, queue_of_sequence
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import MAX_PARTITIONS, ParameterError, check_partitions, partition_of, partitions_of
from weir.schemas.wire.calls import Cancellation, RequestEnvelope, unpack_frame

PROMISED = [48, 20, 2, 33, 60]


def declaring(text: str, **more: Any) -> ModelConfig:
    parameters = {"weir_partitions": {"string_value": text}}
    return ModelConfig.model_validate({"name": "m", "parameters": parameters, **more})


def test_partitions_that_a_model_declares() -> None:
    assert partitions_of(ModelConfig.model_validate({"name": "m"})) == 1
    assert partitions_of(declaring("64")) == 64
    for text in ("", "0", "65", "-1", "1.5", "four", "٤", "1" * 5000):
        assert partitions_of(declaring(text)) == 1
        with pytest.raises(ParameterError, match="'weir_partitions' must be a whole number from 1 to 64, got"):
            check_partitions(declaring(text))


def test_destinations_of_a_model_s_requests() -> None:
    assert destination_of("ns::m", ModelConfig.model_validate({"name": "m"})) == "ns::m"
    assert destination_of("m", declaring("1")) == "m"
    assert destination_of("m", declaring("4")) == PartitionedQueue("m", 4, 1, False)
    waiting = {"max_batch_size": 8, "dynamic_batching": {"max_queue_delay_microseconds": 100}}
    assert destination_of("m", declaring("4", **waiting)) == PartitionedQueue("m", 4, 8, True)


def test_the_partition_of_a_correlation_id_never_changes() -> None:
    """Gateways of two releases would otherwise send a sequence to two places."""
    assert [partition_of(id, 64) for id in (1, 2, "1", "a", (1 << 64) - 1)] == PROMISED
    spread = [0] * 8
    for id in range(8000):
        spread[partition_of(id, 8)] += 1
    assert min(spread) > 850
    assert queue_of_sequence(PartitionedQueue("m", 64, 1, False), "a") == LiveQueue("m", PROMISED[3])


@given(
    st.integers(1, MAX_PARTITIONS),
    st.integers(1, 16),
    st.booleans(),
    st.lists(st.one_of(st.integers(1, 64), st.none()), max_size=100),
)
def test_requests_go_to_the_partition_with_the_fewest(
    partitions: int, batch: int, waits: bool, events: list[int | None]
) -> None:
    """Each event is so many requests that leave, or (None) the end of the oldest that are under way."""
    choice = PartitionSelector(PartitionedQueue("m", partitions, batch, waits), "gateway")
    under_way: list[tuple[int, int]] = []
    counted = [0] * partitions
    unit = batch if waits else 1
    for requests in events:
        if requests is None:
            if under_way:
                partition, ended = under_way.pop(0)
                counted[partition] -= ended
                for _ in range(ended):
                    choice.release(partition)
        else:
            assert choice.group_size(requests) >= min(requests, batch)
            assert -(-requests // choice.group_size(requests)) <= partitions
            partition = choice.acquire(requests)
            assert counted[partition] // unit == min(counted) // unit
            counted[partition] += requests
            under_way.append((partition, requests))
        assert choice.in_flight() == counted


def test_single_requests_share_one_partition() -> None:
    used = set()
    for caller in range(32):
        choice = PartitionSelector(PartitionedQueue("m", 4, 1, False), f"gateway-{caller}")
        mine = set()
        for _ in range(10):
            mine.add(partition := choice.acquire(1))
            choice.release(partition)
        assert len(mine) == 1
        used |= mine
    assert used == {0, 1, 2, 3}, "not the same one for all callers"


class Broker:
    """Takes what is published; the connection is never lost."""

    losses = 0
    is_connected = True

    def __init__(self) -> None:
        self.live_layout = LiveLayout()
        self.frames: list[tuple[str, list[int]]] = []
        self.cancels: list[tuple[str, list[int]]] = []

    def at_turn_end(self, _callback: object) -> None:
        """The test flushes."""

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        if subject.startswith("live."):
            self.frames.append((subject, [row[0] for row in unpack_frame(data)[1]]))
        else:
            self.cancels.append((subject, list(Cancellation.unpack(data).keys)))


def test_requests_are_cancelled_and_sent_again_in_their_partition() -> None:
    in_flight, broker = InFlight(), Broker()
    payloads = PayloadStore(cast(Any, None), lambda: False)
    outbox = Outbox(cast(Any, broker), "g", payloads, in_flight, lambda *_: None)
    model = SimpleNamespace(name="m", queue=PartitionedQueue("m", 2, 2, False))
    pendings = []
    for key in range(5):
        part = RequestEnvelope(key, -1, 1, "", 0, 0, 0, 0, 0, "", b"body")
        pendings.append(
            PendingRequest(key, cast(Any, model), cast(Any, None), part, cast(Any, None), (), None, model.queue)
        )
        in_flight.add(pendings[-1])
        outbox.add(pendings[-1].queue, part)
    outbox.flush()
    assert sorted(keys for _, keys in broker.frames) == [[0, 1, 2], [3, 4]], "more than a batch: both have some"
    went = {key: subject for subject, keys in broker.frames for key in keys}
    assert set(went.values()) == {"live.m", "live.m=p1"}
    broker.frames.clear()
    outbox.resend_all()
    outbox.flush()
    assert {key: subject for subject, keys in broker.frames for key in keys} == went
    choice = outbox._selectors["m"]
    assert sorted(choice.in_flight()) == [2, 3]
    for pending in pendings:
        in_flight.remove(pending.key)
        for slot in pending.slots:
            slot.free()
        outbox.cancel(pending.queue, pending.key)
    outbox.flush()
    assert {key: subject.replace("cancel", "live") for subject, keys in broker.cancels for key in keys} == went
    assert choice.in_flight() == [0, 0]

"""Batches wait for their payloads from other hosts; batches of sequences also for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.support.contained_sites import fail_for
from weir.bus.naming.identity import own_id
from weir.bus.payloads.fetch_plan import Loss
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.batches import NO_REPLY, BatchEntry, BatchMessage, SequencePosition
from weir.schemas.wire.request_body import pack_body, pack_body_ref
from weir.worker.execution.batch import Batch
from weir.worker.execution.remote_payloads import RemotePayloads

REMOTE = "weir-worker-01234567-1_1.131072"
HERE = own_id("gateway", None)


class Fetcher:
    """Keeps requests for payloads until the test responds to them."""

    def __init__(self) -> None:
        self.callbacks: dict[PayloadRef, Callable[[Any], None]] = {}

    def fetch(self, ref: PayloadRef, callback: Callable[[Any], None]) -> None:
        self.callbacks[ref] = callback

    def respond(self, ref: PayloadRef, outcome: object) -> None:
        self.callbacks.pop(ref)(outcome)


@pytest.fixture
def fetcher() -> Fetcher:
    return Fetcher()


def remote(slot: int) -> PayloadRef:
    return PayloadRef(REMOTE, slot, 1, 0, 4)


def batch(body: bytes, gateway: str = NO_REPLY, position: SequencePosition | None = None) -> BatchMessage:
    return BatchMessage("s", 1, "m", 1, 0, [BatchEntry(gateway, 1, 0, body, 0, position)])


def with_tensor(ref: PayloadRef) -> bytes:
    return pack_body(InferRequest("m", inputs=[Tensor("IN", "FP32", [1], ref)]))


def start(
    payloads: RemotePayloads, message: BatchMessage, done: list[str], name: str, with_tensors: bool = True
) -> Batch:
    running = Batch(message)
    payloads.fetch(running, with_tensors, lambda: done.append(name))
    return running


def test_only_batches_that_refer_to_other_hosts_need_a_fetch(fetcher: Fetcher) -> None:
    payloads = RemotePayloads(cast(Any, fetcher))
    assert payloads.needs_fetch(batch(with_tensor(remote(1))))
    assert not payloads.needs_fetch(batch(pack_body(InferRequest("m", inputs=[Tensor("IN", "FP32", [1], bytes(4))]))))
    assert not payloads.needs_fetch(batch(with_tensor(remote(1)), gateway=HERE)), "a gateway of this host has no others"


def test_a_batch_runs_when_all_its_payloads_have_arrived(fetcher: Fetcher) -> None:
    payloads, done = RemotePayloads(cast(Any, fetcher)), list[str]()
    running = start(payloads, batch(with_tensor(remote(1))), done, "first")
    assert done == []
    fetcher.respond(remote(1), memoryview(b"1234"))
    assert done == ["first"]
    assert running.fetched == {remote(1): b"1234"}


def test_tensors_of_a_body_that_was_fetched_are_fetched_as_well(fetcher: Fetcher) -> None:
    payloads, done = RemotePayloads(cast(Any, fetcher)), list[str]()
    start(payloads, batch(pack_body_ref(remote(1))), done, "first")
    fetcher.respond(remote(1), with_tensor(remote(2)))
    assert done == []
    fetcher.respond(remote(2), Loss.UNREACHABLE)
    assert done == ["first"]


def test_an_ensemble_needs_bodies_only(fetcher: Fetcher) -> None:
    payloads, done = RemotePayloads(cast(Any, fetcher)), list[str]()
    start(payloads, batch(with_tensor(remote(1))), done, "first", with_tensors=False)
    assert done == ["first"]
    assert fetcher.callbacks == {}


def test_a_fetch_that_raises_is_a_lost_payload(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "weir.worker.execution.remote_payloads:_WaitingBatch._fetch")
    payloads, done = RemotePayloads(cast(Any, fetcher)), list[str]()
    running = start(payloads, batch(with_tensor(remote(1))), done, "first")
    assert done == ["first"]
    assert running.fetched == {remote(1): Loss.UNREACHABLE}


def test_batches_of_sequences_run_in_the_order_of_their_arrival(fetcher: Fetcher) -> None:
    payloads, done = RemotePayloads(cast(Any, fetcher)), list[str]()
    place = SequencePosition(0, 0, restore=False, run=1, flags=0)
    first, second = (batch(with_tensor(remote(slot)), position=place) for slot in (1, 2))
    start(payloads, first, done, "first")
    later = batch(pack_body(InferRequest("m")), gateway=HERE, position=place)
    assert payloads.needs_fetch(later), "a batch of the instance waits"
    start(payloads, second, done, "second")
    fetcher.respond(remote(2), memoryview(b"1234"))
    assert done == []
    fetcher.respond(remote(1), memoryview(b"1234"))
    assert done == ["first", "second"]
    assert not payloads.needs_fetch(later)

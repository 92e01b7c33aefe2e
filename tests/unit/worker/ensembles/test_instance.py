"""`EnsembleInstance`: batches and outputs of an ensemble whose step responds as a test requires."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.worker.ensembles.test_request import Calls, ensemble, model
from weir.bus.naming.identity import new_id
from weir.bus.payloads.arena import PayloadReader
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import PayloadRef, RegionRef, Tensor
from weir.schemas.wire.batches import BatchEnded, BatchEntry, BatchLost, BatchMessage, BatchReleased
from weir.schemas.wire.calls import unpack_responses
from weir.schemas.wire.request_body import pack_body
from weir.worker.backend_api.interface import ModelVersion
from weir.worker.ensembles.backend import EnsembleModel
from weir.worker.ensembles.instance import EnsembleInstance
from weir.worker.ensembles.run import EnsemblePlan
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import ModelEnvironment
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.updates import BatchUpdate


class Coordinator:
    """The instance of an ensemble of one step, with requests of a gateway on this host."""

    def __init__(self) -> None:
        config = ensemble("a")
        self.calls = Calls(model("a"))
        self.published: list[BatchUpdate] = []
        version = ModelVersion("e", 1, Path(), config)
        self.instance = EnsembleInstance(
            version,
            EnsembleModel(EnsemblePlan(config), self.calls),  # type: ignore[arg-type]
            "worker-test-ensembles_0",
            ModelStatistics(),
            ModelEnvironment(arena_prefix="worker-test-ensembles", on_update=self.published.append),
        )

    def submit(self, number: int, *outputs: RequestedOutput) -> Batch:
        body = pack_body(InferRequest("e", inputs=[Tensor("IN", "FP32", [1], bytes(4))], outputs=list(outputs)))
        entries = [BatchEntry(new_id("gateway"), number, 0, body)]
        batch = Batch(BatchMessage("s", number, "e", 1, 0, entries))
        self.instance.submit(batch)
        return batch

    @property
    def outcomes(self) -> list[type | None]:
        return [type(update.completions[0]) if update.completions else None for update in self.published]


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    created = Coordinator()
    yield created
    created.instance.stop()


async def test_a_large_response_from_a_cache_travels_in_shared_memory(coordinator: Coordinator) -> None:
    coordinator.submit(1)
    coordinator.calls.answer(b"1234" * (5 << 18))
    await asyncio.sleep(0)  # responses are published at the end of the turn of the event loop
    ((_, message),) = coordinator.published[0].responses
    (answer,) = unpack_responses(message)[1]
    assert answer.error is None
    assert answer.outputs is not None
    ref = answer.outputs[0].data
    assert isinstance(ref, PayloadRef)
    assert bytes(PayloadReader().view(ref)[:4]) == b"1234"
    assert coordinator.instance.slots_held == 1
    coordinator.instance.release(ref.segment, ref.slot, ref.generation)
    assert coordinator.instance.slots_held == 0


async def test_an_output_in_client_memory_is_rejected_if_that_is_not_allowed(coordinator: Coordinator) -> None:
    output = RequestedOutput("OUT", binary=True)
    output.region = RegionRef("region", 1, 0, 4)
    coordinator.submit(1, output)
    await asyncio.sleep(0)  # as above
    ((_, message),) = coordinator.published[0].responses
    (answer,) = unpack_responses(message)[1]
    assert answer.error is not None
    assert answer.error.message == "Client shared memory is disabled on the model's worker."
    assert coordinator.calls.sent == []


async def test_a_batch_without_a_response_is_requeued(coordinator: Coordinator) -> None:
    coordinator.submit(1)
    coordinator.submit(2)
    await asyncio.sleep(0)  # updates are published at the end of the turn of the event loop
    assert coordinator.outcomes == [BatchReleased]
    coordinator.calls.answer(b"1234")
    coordinator.instance.requeue()
    await asyncio.sleep(0)  # responses are published at the end of the turn of the event loop
    assert coordinator.outcomes[1:] == [BatchLost, BatchEnded], "a response is not withdrawn"
    assert len(coordinator.calls.cancelled) == 1

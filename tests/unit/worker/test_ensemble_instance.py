"""`EnsembleInstance`: what becomes of batches and outputs, with steps that answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_ensemble_request import Calls, ensemble, model

from bus.identity import new_id
from bus.payloads import PayloadReader
from schemas.bodies import pack_body
from schemas.messages import BatchEntry, BatchMessage, BatchOutcome, unpack_answers
from schemas.requests import InferRequest, RequestedOutput
from schemas.tensors import PayloadRef, RegionRef, Tensor
from worker.backend import ModelVersion
from worker.batch_execution import FinishedBatch
from worker.ensembles.instance import EnsembleInstance
from worker.ensembles.plan import EnsemblePlan
from worker.model_environment import ModelEnvironment
from worker.running_batch import RunningBatch
from worker.statistics import ModelStatistics


class Coordinator:
    """An instance of an ensemble of one step, asked by a gateway of this host."""

    def __init__(self) -> None:
        config = ensemble("a")
        self.calls = Calls(model("a"))
        self.published: list[FinishedBatch] = []
        version = ModelVersion("e", 1, Path(), config)
        self.instance = EnsembleInstance(
            version,
            EnsemblePlan(config),
            "worker-test-ensembles_0",
            ModelStatistics(),
            self.calls,  # type: ignore[arg-type]
            ModelEnvironment(arena_prefix="worker-test-ensembles", on_finished=self.published.append),
        )

    def submit(self, number: int, *outputs: RequestedOutput) -> RunningBatch:
        body = pack_body(InferRequest("e", inputs=[Tensor("IN", "FP32", [1], bytes(4))], outputs=list(outputs)))
        entries = [BatchEntry(new_id("gateway"), number, 0, body)]
        batch = RunningBatch(BatchMessage("s", number, "e", 1, 0, entries, ["ack"]))
        self.instance.submit(batch)
        return batch

    @property
    def outcomes(self) -> list[BatchOutcome | None]:
        return [None if finished.done is None else finished.done.outcome for finished in self.published]


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator()
    yield made
    made.instance.stop()


async def test_a_large_answer_out_of_a_cache_travels_by_shared_memory(coordinator: Coordinator) -> None:
    coordinator.submit(1)
    coordinator.calls.answer(b"1234" * (5 << 18))
    await asyncio.sleep(0)  # what is answered in one turn of the loop leaves at its end
    ((_, message),) = coordinator.published[0].answers
    (answer,) = unpack_answers(message)[1]
    assert answer.error is None
    assert answer.outputs is not None
    ref = answer.outputs[0].data
    assert isinstance(ref, PayloadRef)
    assert bytes(PayloadReader().view(ref)[:4]) == b"1234"
    assert coordinator.instance.slots_held == 1
    coordinator.instance.release(ref.segment, ref.slot, ref.generation)
    assert coordinator.instance.slots_held == 0


async def test_nothing_is_written_to_clients_where_that_is_not_allowed(coordinator: Coordinator) -> None:
    output = RequestedOutput("OUT", binary=True)
    output.region = RegionRef("region", 1, 0, 4)
    coordinator.submit(1, output)
    await asyncio.sleep(0)  # as above
    ((_, message),) = coordinator.published[0].answers
    (answer,) = unpack_answers(message)[1]
    assert answer.error is not None
    assert answer.error.message == "Client shared memory is disabled on the model's worker."
    assert coordinator.calls.asked == []


async def test_a_batch_that_nobody_has_heard_of_is_handed_back(coordinator: Coordinator) -> None:
    coordinator.submit(1)
    coordinator.submit(2)
    assert coordinator.outcomes == [BatchOutcome.RELEASED]
    coordinator.calls.answer(b"1234")
    coordinator.instance.hand_back()
    await asyncio.sleep(0)  # what is answered in one turn of the loop leaves at its end
    assert coordinator.outcomes[1:] == [BatchOutcome.UNANSWERED, BatchOutcome.ANSWERED], "what was answered stays so"
    assert len(coordinator.calls.abandoned) == 1
    assert coordinator.published[1].acks == ()

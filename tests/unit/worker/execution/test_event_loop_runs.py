"""Batches of fast models run in the event loop that received them; all others run in the instance's thread."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.batches import BatchCompletion, BatchEnded, BatchEntry, BatchMessage
from weir.schemas.wire.request_body import pack_body
from weir.worker.backend_api.interface import Execution, Instance, InstanceDevice, ModelVersion, Result
from weir.worker.devices.host_policy import UNBOUND, HostPolicy
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import InstanceSpec, ModelEnvironment, ModelInstance
from weir.worker.execution.microbatch import FAST_BATCHES, FAST_US, Pace
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.updates import BatchUpdate

CONFIG = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "A", "data_type": "TYPE_FP32", "dims": [-1]}],
}


class Model:
    """An instance whose executions take `takes_s`, and the threads that they ran in."""

    def __init__(self, runs_in_any_thread: bool = True, host_policy: HostPolicy = UNBOUND, **config: object) -> None:
        self.threads: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.published: queue.SimpleQueue[BatchUpdate] = queue.SimpleQueue()
        self.takes_s = 0.0
        outer = self

        class Running:
            def execute(self, requests: Sequence[InferRequest], execution: Execution) -> list[Result]:
                outer.threads.put(threading.get_ident())
                time.sleep(outer.takes_s)
                return [Result([request.inputs[0]]) for request in requests]

            def close(self) -> None:
                pass

        class Loaded:
            def create_instance(self, device: InstanceDevice) -> Instance:
                return Running()

            def unload(self) -> None:
                pass

        loaded = Loaded()
        loaded.runs_in_any_thread = runs_in_any_thread  # type: ignore[attr-defined]
        version = ModelVersion("m", 1, Path(), ModelConfig.model_validate({**CONFIG, **config}))
        self.instance = ModelInstance(
            loaded,
            version,
            InstanceSpec(InstanceDevice("KIND_CPU", 0, "m_0", host_policy), "test"),
            ModelStatistics(),
            ModelEnvironment(arena_prefix="test", on_update=self.published.put),
        )
        self.instance.start()

    def submit(self, width: int = 4, more_follow: bool = False) -> None:
        body = pack_body(InferRequest("m", inputs=[Tensor.from_numpy("A", np.zeros((1, width), np.float32), "FP32")]))
        batch = BatchMessage("scheduler", 1, "m", 1, 0, [BatchEntry("g", 1, 5, body)])
        self.instance.submit(Batch(batch), more_follow)

    def run_ahead(self) -> None:
        """Runs a batch here that others follow, on a machine that may be busy."""
        for _ in range(100 * FAST_BATCHES):
            self.become_fast()
            self.submit(more_follow=True)
            if self.threads.get() == threading.get_ident():
                return
            self.published.get(timeout=10)
        raise AssertionError("the model never stayed fast")

    def runs_here(self, width: int = 4) -> bool:
        """Runs one batch; returns whether it ran in this thread, which stands for the event loop's."""
        self.submit(width)
        update = self.published.get(timeout=10)
        (completion,) = update.completions
        assert type(completion) is BatchEnded
        assert len(update.responses) == 1
        return self.threads.get() == threading.get_ident()

    def become_fast(self, width: int = 4) -> None:
        """Runs batches until one has run here, on a machine that may be busy."""
        for _ in range(100 * FAST_BATCHES):
            if self.runs_here(width):
                return
        raise AssertionError("the model never became fast")


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model()
    yield made
    made.instance.stop()


def test_a_model_is_fast_after_many_fast_batches(model: Model) -> None:
    assert [model.runs_here() for _ in range(FAST_BATCHES)] == [False] * FAST_BATCHES
    model.become_fast()


def test_one_slow_batch_ends_it(model: Model) -> None:
    model.become_fast()
    model.takes_s = 0.01
    model.runs_here()
    assert not model.runs_here()


def test_a_larger_body_than_those_before_runs_in_the_thread(model: Model) -> None:
    model.become_fast(width=4)
    assert not model.runs_here(width=400)


def test_responses_of_requests_that_run_singly_leave_together(model: Model) -> None:
    model.run_ahead()
    assert model.published.empty()
    model.instance.flush()
    assert len(model.published.get(timeout=10).completions) == 1


def test_responses_of_a_formed_batch_leave_before_the_next_batch_runs() -> None:
    model = Model(dynamic_batching={})
    model.run_ahead()
    assert len(model.published.get(timeout=10).completions) == 1
    model.instance.flush()
    assert model.published.empty()
    model.instance.stop()


def test_a_batch_waits_for_the_one_in_the_thread(model: Model) -> None:
    model.become_fast(width=4)
    model.takes_s = 0.05
    model.submit(width=400)
    model.takes_s = 0.0
    model.submit(width=4)
    ends: list[BatchCompletion] = []
    while len(ends) < 2:
        ends += model.published.get(timeout=10).completions
    assert threading.get_ident() not in (model.threads.get(), model.threads.get())


@pytest.mark.parametrize(
    "config",
    [
        {"sequence_batching": {}},
        {"model_transaction_policy": {"decoupled": True}},
    ],
    ids=["sequences", "decoupled"],
)
def test_models_with_more_than_one_response_or_state_never_do(config: dict[str, object]) -> None:
    model = Model(**config)
    assert model.instance._instance is None
    model.instance.stop()


def test_neither_do_those_of_backends_that_do_not_allow_it() -> None:
    model = Model(runs_in_any_thread=False)
    assert not any(model.runs_here() for _ in range(FAST_BATCHES + 2))
    model.instance.stop()


def test_neither_do_those_whose_cores_or_memory_a_host_policy_sets() -> None:
    """The event loop is not bound to them."""
    model = Model(host_policy=HostPolicy(frozenset({min(os.sched_getaffinity(0))})))
    assert model.instance._instance is None
    model.instance.stop()


def test_the_pace_of_an_instance() -> None:
    pace = Pace()
    for _ in range(FAST_BATCHES):
        assert not pace.is_fast(10)
        pace.note(10, FAST_US)
    assert pace.is_fast(10)
    assert not pace.is_fast(11)
    pace.note(10, FAST_US + 1)
    assert not pace.is_fast(10)

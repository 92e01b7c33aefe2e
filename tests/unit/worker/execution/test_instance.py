"""`ModelInstance` on a device: the next batch starts while one runs, and nothing else changes."""

from __future__ import annotations

import queue
import random
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fakes.cuda_device import OUT, config, doubling, fake_cuda_runtime
from weir.bus.naming.identity import SHARED_MEMORY_DIRECTORY, new_id
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, internal
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import RegionRef, Tensor
from weir.schemas.wire.batches import BatchCompletion, BatchEnded, BatchEntry, BatchLost, BatchMessage
from weir.schemas.wire.calls import unpack_responses
from weir.schemas.wire.request_body import pack_body
from weir.worker.backend_api.interface import (
    DeviceLost,
    Execution,
    ExecutionHandle,
    Instance,
    InstanceDevice,
    InstanceDied,
    ModelVersion,
    Result,
)
from weir.worker.cuda.device_instance import DeviceInstance
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import InstanceSpec, ModelEnvironment, ModelInstance
from weir.worker.execution.rate_limiter import Needs, rate_limiter_permits
from weir.worker.execution.shared_memory import SharedMemoryAccess
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.updates import BatchUpdate
from weir.worker.execution.warmup import warm_up_samples

GPU = InstanceDevice("KIND_GPU", 0, "m_0_0")

Make = Callable[[InstanceDevice], Instance]


class Served:
    """An instance with its thread, and its updates."""

    def __init__(self, make: Make, settings: ModelConfig | None = None, **options: Any) -> None:
        self.published: queue.SimpleQueue[BatchUpdate] = queue.SimpleQueue()
        self.batch_of: dict[int, int] = {}  # by key, of requests whose keys are not 100 times their batch
        self._ends: deque[tuple[int, type, list[Any]]] = deque()
        self.statistics = ModelStatistics()
        self.environment = options.pop("environment", None) or ModelEnvironment(
            arena_prefix="test", on_update=self.published.put, **options.pop("shared", {})
        )

        class Loaded:
            def create_instance(self, device: InstanceDevice) -> Instance:
                return make(device)

            def unload(self) -> None:
                pass

        version = ModelVersion("m", 1, Path(), settings or config())
        self.instance = ModelInstance(
            Loaded(),
            version,
            InstanceSpec(GPU, "test", warm_up=warm_up_samples(version), **options),
            self.statistics,
            self.environment,
        )
        self.instance.start()

    def submit(self, number: int, *rows: Sequence[float], deadline_ms: int = 0) -> Batch:
        bodies = [
            pack_body(InferRequest("m", inputs=[Tensor.from_numpy("IN", np.array([row], np.float32), "FP32")]))
            for row in rows or [[float(number)]]
        ]
        entries = [
            BatchEntry("gateway", 100 * number + position, 5, body, deadline_ms) for position, body in enumerate(bodies)
        ]
        batch = Batch(BatchMessage("scheduler", number, "m", 1, 0, entries))
        self.instance.submit(batch)
        return batch

    def left(self) -> tuple[int, type, list[Any]]:
        """(batch, outcome, the output or error of each response) of the next batch that ends."""
        if not self._ends:
            update = self.published.get(timeout=10)
            received: dict[int, list[Any]] = defaultdict(list)
            for row in [row for _, message in update.responses for row in unpack_responses(message)[1]]:
                outcome = row.error.message if row.error else row.outputs[0].to_numpy().tolist()
                received[self.batch_of.get(row.key, row.key // 100)].append(outcome)
            self._ends.extend((end.batch_id, type(end), received[end.batch_id]) for end in update.completions)
        return self._ends.popleft()


class Scripted:
    """An instance whose batches end when the test says so; `events` has its calls in order."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.done: dict[int, queue.SimpleQueue[Exception | None]] = {
            number: queue.SimpleQueue() for number in range(20)
        }
        self.is_sync: set[int] = set()
        self.raises: dict[int, Exception] = {}
        self.under_way = 0

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Any:
        number = int(requests[0].inputs[0].to_numpy().item(0))
        self.events.put(f"begin {number}")
        if number in self.raises:
            raise self.raises[number]
        results = [Result([Tensor.from_numpy("OUT", request.inputs[0].to_numpy() * 2, "FP32")]) for request in requests]
        if number in self.is_sync:
            return results
        self.under_way += 1
        assert self.under_way <= 2
        outer = self

        class Run(ExecutionHandle):
            def results(self) -> Any:
                outer.events.put(f"wait {number}")
                failure = outer.done[number].get(timeout=10)
                outer.under_way -= 1
                if failure is not None:
                    raise failure
                execution.input_ready()
                execution.inferred()
                return results

        return Run()

    def close(self) -> None:
        assert self.under_way == 0
        self.events.put("close")

    def next_event(self) -> str:
        return self.events.get(timeout=10)


@pytest.fixture
def device() -> Scripted:
    return Scripted()


@pytest.fixture
def model(device: Scripted) -> Iterator[Served]:
    served = Served(lambda _: device)
    yield served
    served.instance.stop()


def test_a_second_batch_starts_while_one_runs_but_no_third(model: Served, device: Scripted) -> None:
    model.submit(1)
    assert [device.next_event(), device.next_event()] == ["begin 1", "wait 1"]
    for number in (2, 3, 4):
        model.submit(number)
    device.done[1].put(None)
    assert [device.next_event(), device.next_event()] == ["begin 2", "begin 3"]
    assert device.next_event() == "wait 2"
    device.done[2].put(None)
    assert [device.next_event(), device.next_event()] == ["begin 4", "wait 3"]
    device.done[3].put(None)
    assert device.next_event() == "wait 4"
    device.done[4].put(None)
    assert [model.left() for _ in range(4)] == [(n, BatchEnded, [[[2.0 * n]]]) for n in (1, 2, 3, 4)]
    counted = model.statistics.snapshot()
    assert (counted["success"][0], counted["execution_count"], counted["fail"][0]) == (4, 4, 0)


def test_time_in_which_two_batches_overlap_counts_once(model: Served, device: Scripted) -> None:
    begun_ns = time.monotonic_ns()
    model.submit(1)
    assert [device.next_event(), device.next_event()] == ["begin 1", "wait 1"]
    model.submit(2)
    model.submit(3)
    time.sleep(0.02)  # the time that is counted
    device.done[1].put(None)
    assert [device.next_event() for _ in range(3)] == ["begin 2", "begin 3", "wait 2"]
    time.sleep(0.02)
    device.done[2].put(None)
    device.done[3].put(None)
    for _ in range(3):
        model.left()
    elapsed_ns = time.monotonic_ns() - begun_ns
    assert 0.04e9 < model.statistics.busy_ns <= elapsed_ns
    snapshot = model.statistics.snapshot()
    phases_ns = sum(snapshot[phase][1] for phase in ("compute_input", "compute_infer", "compute_output"))
    assert phases_ns > model.statistics.busy_ns, "batches 2 and 3 ran at the same time"


def test_responses_are_sent_in_order_although_the_later_batch_ends_first(model: Served, device: Scripted) -> None:
    device.is_sync = {3}
    device.raises = {5: internal("broken"), 7: RuntimeError("odd"), 9: InstanceDied("dead")}
    for pending, other in ((2, 3), (4, 5), (6, 7), (8, 9)):
        model.submit(1)
        assert [device.next_event(), device.next_event()] == ["begin 1", "wait 1"]
        model.submit(pending)
        model.submit(other)
        device.done[1].put(None)
        assert [device.next_event(), device.next_event(), device.next_event()] == [
            f"begin {pending}",
            f"begin {other}",
            f"wait {pending}",
        ]
        assert model.left()[0] == 1
        assert model.published.empty()
        device.done[pending].put(None)
        assert model.left() == (pending, BatchEnded, [[[2.0 * pending]]])
        batch, outcome, received = model.left()
        assert batch == other
        assert (outcome, received) == {
            3: (BatchEnded, [[[6.0]]]),
            5: (BatchEnded, ["broken"]),
            7: (BatchEnded, ["RuntimeError: odd"]),
            9: (BatchLost, []),
        }[other]


def test_a_failure_on_the_device_fails_its_batch_only(model: Served, device: Scripted) -> None:
    model.submit(1)
    assert [device.next_event(), device.next_event()] == ["begin 1", "wait 1"]
    for number in (2, 3, 4):
        model.submit(number)
    device.done[1].put(internal("one failed"))
    device.done[2].put(ValueError("two failed"))
    device.done[3].put(InstanceDied("three died"))
    device.done[4].put(None)
    assert [model.left() for _ in range(4)] == [
        (1, BatchEnded, ["one failed"]),
        (2, BatchEnded, ["ValueError: two failed"]),
        (3, BatchLost, []),
        (4, BatchEnded, [[[8.0]]]),
    ]
    counted = model.statistics.snapshot()
    assert (counted["success"][0], counted["failures"]["BACKEND"]) == (1, 2)


def test_cancelled_and_late_requests(model: Served, device: Scripted) -> None:
    first = model.submit(1)
    assert [device.next_event(), device.next_event()] == ["begin 1", "wait 1"]
    second = model.submit(2)
    model.submit(3, deadline_ms=1)
    first.cancel("gateway", [100])  # it runs already, and is counted as given up
    second.cancel("gateway", [200])
    device.done[1].put(None)
    assert model.left() == (1, BatchEnded, [[[2.0]]])
    assert model.left() == (2, BatchEnded, ["the request was cancelled"])
    assert model.left() == (3, BatchEnded, ["Request timeout expired"])
    assert model.statistics.snapshot()["failures"] == {"REJECTED": 1, "CANCELED": 2, "BACKEND": 0, "OTHER": 0}


def test_a_stop_waits_for_running_batches(device: Scripted) -> None:
    served = Served(lambda _: device)
    served.submit(1)
    assert [device.next_event(), device.next_event()] == ["begin 1", "wait 1"]
    served.submit(2)
    stopping = threading.Thread(target=served.instance.stop)
    stopping.start()
    device.done[1].put(None)
    device.done[2].put(None)
    stopping.join(10)
    assert [served.left()[0], served.left()[0]] == [1, 2]
    assert [device.next_event(), device.next_event(), device.next_event()] == ["begin 2", "wait 2", "close"]


def test_permits_and_states_allow_one_batch_at_a_time(device: Scripted) -> None:
    permits = rate_limiter_permits("execution_count", ["R:1"])
    assert permits is not None
    served = Served(lambda _: device, permit=permits.join(Needs({("R", 0): 1})))
    served.submit(1)
    served.submit(2)
    for number in (1, 2):
        assert [device.next_event(), device.next_event()] == [f"begin {number}", f"wait {number}"]
        device.done[number].put(None)
        assert served.left()[0] == number
    served.instance.stop()


def test_busy_time_is_not_counted_twice(model: Served, device: Scripted) -> None:
    start_ns = time.monotonic_ns()
    model.submit(1)
    assert [device.next_event(), device.next_event()] == ["begin 1", "wait 1"]
    model.submit(2)
    model.submit(3)
    device.done[1].put(None)
    assert [device.next_event(), device.next_event(), device.next_event()] == ["begin 2", "begin 3", "wait 2"]
    time.sleep(0.02)  # for which both are under way
    device.done[2].put(None)
    device.done[3].put(None)
    ends: list[BatchCompletion] = []
    while len(ends) < 3:
        ends += model.published.get(timeout=10).completions
    assert 20_000 < sum(end.busy_us for end in ends) < (time.monotonic_ns() - start_ns) / 1000


def test_a_lost_device_runs_and_reports_no_more_batches(device: Scripted) -> None:
    reasons = queue.SimpleQueue[str]()
    served = Served(lambda _: device, shared={"on_device_lost": reasons.put})
    other_device = Scripted()
    other = Served(lambda _: other_device, environment=served.environment)
    served.submit(1)
    assert [device.next_event(), device.next_event()] == ["begin 1", "wait 1"]
    served.submit(2)
    device.done[1].put(None)
    assert [device.next_event(), device.next_event()] == ["begin 2", "wait 2"]
    served.submit(3)
    device.done[2].put(DeviceLost("gone"))
    assert served.left() == (1, BatchEnded, [[[2.0]]])
    assert reasons.get(timeout=10) == "gone"
    other.submit(4)
    served.instance.stop()
    other.instance.stop()
    # Of batches 2 to 4 nothing was sent: the scheduler must not send them again before it sees the end of the process.
    assert served.published.empty()
    assert reasons.empty()
    assert [device.next_event(), other_device.next_event()] == ["close", "close"]


@pytest.mark.parametrize("when", ["create", "warm up"])
def test_a_device_that_is_lost_at_load(device: Scripted, when: str) -> None:
    lost: list[str] = []

    def make(_: InstanceDevice) -> Instance:
        if when == "create":
            raise DeviceLost("gone")
        device.raises[0] = DeviceLost("gone")
        return device

    sample = {
        "name": "s",
        "batch_size": 1,
        "inputs": {"IN": {"data_type": "TYPE_FP32", "dims": [1], "zero_data": True}},
    }
    with pytest.raises(WeirError, match=r"^UNAVAILABLE: gone$"):
        Served(make, config(model_warmup=[sample]), shared={"on_device_lost": lost.append})
    assert lost == ["gone"]


def test_warm_up_samples_run_one_after_another(device: Scripted) -> None:
    sample = {
        "name": "s",
        "batch_size": 1,
        "inputs": {"IN": {"data_type": "TYPE_FP32", "dims": [1], "zero_data": True}},
    }
    for _ in range(2):
        device.done[0].put(None)
    served = Served(lambda _: device, config(model_warmup=[{**sample, "count": 2}]))
    assert [device.next_event() for _ in range(4)] == ["begin 0", "wait 0"] * 2
    assert served.statistics.snapshot()["execution_count"] == 0
    served.instance.stop()


def test_a_failed_batch_runs_again_on_its_own_inputs_from_clients_memory(device: Scripted) -> None:
    path = SHARED_MEMORY_DIRECTORY / f"test_{secrets.token_hex(6)}"
    path.write_bytes(np.arange(8, dtype=np.float32).tobytes())
    gateway = new_id("gateway")

    def submit(served: Served, *values: int) -> None:
        entries = []
        for value in values:
            place = RegionRef(path.name, path.stat().st_ino, 4 * value, 4)
            body = pack_body(InferRequest("m", inputs=[Tensor("IN", "FP32", [1, 1], place)]))
            entries.append(BatchEntry(gateway, value, 5, body))
            served.batch_of[value] = values[0]
        served.instance.submit(Batch(BatchMessage("scheduler", values[0], "m", 1, 0, entries)))

    served = Served(lambda _: device, shared={"shared_memory": SharedMemoryAccess(True)})
    try:
        submit(served, 1, 2)
        assert [device.next_event(), device.next_event()] == ["begin 1", "wait 1"]
        submit(served, 3)  # waits: the first batch is awaited already
        submit(served, 4, 5)
        submit(served, 6, 7)
        device.done[1].put(None)
        assert [device.next_event() for _ in range(3)] == ["begin 3", "begin 4", "wait 3"]
        device.done[3].put(None)
        assert [device.next_event() for _ in range(2)] == ["begin 6", "wait 4"]
        device.is_sync = {4, 5}
        device.done[4].put(internal("broken"))
        assert [device.next_event() for _ in range(2)] == ["begin 4", "begin 5"], "not those of the batch behind it"
        assert device.next_event() == "wait 6"
        device.done[6].put(None)
        assert [served.left()[2] for _ in range(4)] == [
            [[[2.0]], [[4.0]]],
            [[[6.0]]],
            [[[8.0]], [[10.0]]],
            [[[12.0]], [[14.0]]],
        ]
    finally:
        served.instance.stop()
        path.unlink()


batches = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 5)), min_size=1, max_size=15)


@settings(max_examples=25)
@given(batches=batches, seed=st.integers(0, 2**32), failing=st.sets(st.integers(0, 14), max_size=3))
def test_every_request_gets_one_response_in_order(batches: list[tuple[int, int]], seed: int, failing: set[int]) -> None:
    """Random batches on the simulated GPU, some of which fail when they start."""
    with fake_cuda_runtime() as runtime:
        served = Served(lambda device: DeviceInstance(doubling(runtime), device, config(), OUT))
        runtime.DEVICE.hurry = random.Random(seed)
        wanted: list[tuple[int, int, list[Any]]] = []
        for number, (width, requests) in enumerate(batches):
            rows = [[float(number * 10 + at)] * width for at in range(requests)]
            if number in failing and requests > 1:
                rows[1] = rows[1] + [0.0]  # no batch can be made of rows that are not alike, so each runs alone
            served.submit(number, *rows)
            wanted.append((number, BatchEnded, [[[2 * value + 1 for value in row]] for row in rows]))
        assert [served.left() for _ in batches] == wanted
        served.instance.stop()
        assert served.published.empty()


def test_an_instance_holds_its_batches_until_their_ends_are_published(device: Scripted) -> None:
    held: list[int] = []

    def publish(update: BatchUpdate) -> None:
        held.append(served.instance.held)
        served.published.put(update)

    served = Served(lambda _: device, environment=ModelEnvironment(arena_prefix="test", on_update=publish))
    try:
        batches = [served.submit(number) for number in (1, 2, 3)]
        assert served.instance.held == 3
        assert [device.next_event() for _ in range(3)] == ["begin 1", "begin 2", "wait 1"]
        assert served.instance.withdraw() == batches[2:]
        assert served.instance.held == 2, "two have started"
        for number in (1, 2):
            device.done[number].put(None)
            served.left()
        assert held == [1, 0], "whoever has the last update finds the instance free"
    finally:
        served.instance.stop()


@pytest.mark.parametrize(
    ("fields", "loaded"),
    [
        ({"sequence_batching": {}}, {}),
        ({"model_transaction_policy": {"decoupled": True}}, {}),
        ({}, {"is_isolated": True}),
    ],
)
def test_instances_with_state_streams_or_processes_do_not_run_directly(
    fields: dict[str, Any], loaded: dict[str, Any]
) -> None:
    def made(more: dict[str, Any], attributes: dict[str, Any]) -> ModelInstance:
        settings = ModelConfig.model_validate({**config().model_dump(exclude_defaults=True), **more})
        version = ModelVersion("m", 1, Path(), settings)
        environment = ModelEnvironment(arena_prefix="test", on_update=lambda update: None)
        model: Any = SimpleNamespace(**attributes)
        return ModelInstance(model, version, InstanceSpec(GPU, "test"), ModelStatistics(), environment)

    assert made({}, {}).runs_directly
    assert not made(fields, loaded).runs_directly

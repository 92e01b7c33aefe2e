"""Isolated instances: their results, and what remains of them when their process dies."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models.processes import model_processes
from tests.support.models.torch_files import config, request, run
from weir.bus.payloads.arena import PayloadReader
from weir.repository.completion import DescribedModel
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.backend_api.interface import (
    Backend,
    Execution,
    Instance,
    InstanceDevice,
    InstanceDied,
    LoadedModel,
    MicrobatchInstance,
    ModelVersion,
    Result,
)
from weir.worker.backends.custom import BackendFiles, CustomBackend
from weir.worker.backends.isolation.backend import IsolatedBackend, isolate_if_wanted
from weir.worker.backends.onnxruntime.backend import OnnxRuntimeBackend
from weir.worker.backends.python.backend import PythonBackend
from weir.worker.cuda.pinned import PINNED

BACKEND = """
import ctypes, os
import numpy as np
from weir.repository.completion import DescribedModel, DescribedTensor
from weir.schemas.core.errors import invalid, unavailable
from weir.schemas.core.tensors import Tensor
from weir.worker.backends.array import ArrayInstance
from weir.worker.backend_api.interface import DeviceLost
from weir.worker.cuda.pinned import PINNED
from weir.worker.execution.batch_tensors import NamedDatatype


class Runner:
    def __init__(self, model):
        self.runs = 0

    def run(self, inputs):
        self.runs += 1
        x = inputs["x"]
        if x.flat[0] == -1:
            ctypes.string_at(0)
        if x.flat[0] == -2:
            raise invalid("no such number")
        if x.flat[0] == -3:
            raise KeyError("x")
        if x.flat[0] == -4:
            raise DeviceLost("gone")
        if x.flat[0] == -5:
            self.runs = PINNED.total_bytes
        facts = np.array([[os.getpid(), self.runs]] * len(x), np.float64)
        return [x * 2, facts, inputs["s"] + 1] if "s" in inputs else [x * 2, facts]

    def close(self):
        pass


class Backend:
    def describe(self, model):
        if model.config.parameter("fails"):
            raise unavailable("not today")
        rows = [DescribedTensor("x", "TYPE_FP32", [-1, 4])]
        return DescribedModel(rows, [DescribedTensor("y", "TYPE_FP32", [-1, 4])])

    def load(self, model):
        if model.config.parameter("fails") == "oddly":
            raise KeyError("odd")
        if model.config.parameter("fails"):
            raise invalid(f"{model.settings['greeting']} {model.name} in {model.directory.name}")
        self.config = model.config
        return self

    def create_instance(self, device):
        outputs = [NamedDatatype("y", "FP32"), NamedDatatype("facts", "FP64")]
        states = [NamedDatatype("s_out", "FP32")] if self.config.sequence_batching else []
        assert len(self.config.instance_group) == 1 and device.name == self.config.instance_group[0].name
        return ArrayInstance(Runner(self), self.config, outputs, states)

    def unload(self):
        pass
"""


class OfFile(CustomBackend):
    """A user's own backend, as the worker holds it."""

    def __init__(self, file: Path) -> None:
        super().__init__("own", file, BackendFiles())

    def describe(self, model: ModelVersion) -> DescribedModel | ModelConfig | None:
        raise AssertionError("not in this process")

    def load(self, model: ModelVersion) -> LoadedModel:
        raise AssertionError("not in this process")


OUTPUTS = "y:FP32:4 facts:FP64:2"


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    file = tmp_path_factory.mktemp("backend") / "backend.py"
    file.write_text(BACKEND)
    return IsolatedBackend(OfFile(file))


def model(folder: Path, **fields: Any) -> ModelVersion:
    made = config(outputs=OUTPUTS, **fields)
    (folder / "1").mkdir(exist_ok=True)
    return ModelVersion("m", 1, folder, made, settings={"greeting": "hello"})


@contextmanager
def instance(backend: Backend, of: ModelVersion) -> Iterator[Instance]:
    loaded = backend.load(of)
    made = loaded.create_instance(InstanceDevice("KIND_CPU", 0, "m_0"))
    try:
        yield made
    finally:
        made.close()
        loaded.unload()


def x(*values: float, rows: int = 1, columns: int = 4) -> np.ndarray:
    return np.full((rows, columns), values[0], np.float32)


def test_a_batch_is_assembled_and_split_in_the_process(backend: Backend, tmp_path: Path) -> None:
    before = set(model_processes())
    with instance(backend, model(tmp_path)) as made:
        first, second = run(made, request(x=x(1)), request(x=x(2, rows=3), outputs=("y",)))
        assert first["y"].tolist() == [[2] * 4]
        assert second["y"].tolist() == [[4] * 4] * 3
        assert list(second) == ["y"]
        (child,) = set(model_processes()) - before
        assert first["facts"].tolist() == [[child.pid, 1]]
        for size in (100_000, 1_000_000):  # in shared memory, and not the same as the batch before
            large, small = run(made, request(x=x(3, columns=size)), request(x=x(4, columns=size)))
            assert (large["y"] == 6).all()
            assert (small["y"] == 8).all()
    assert set(model_processes()) == before


def test_the_process_may_pin_as_much_memory_as_the_worker(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PINNED, "total_bytes", 12345)
    with instance(backend, model(tmp_path)) as made:
        (result,) = run(made, request(x=x(-5)))
        assert result["facts"][0, 1] == 12345


def test_errors_are_as_in_the_worker_itself(backend: Backend, tmp_path: Path) -> None:
    with instance(backend, model(tmp_path)) as made:
        for value, code, text in (
            (-2, ErrorCode.INVALID_ARG, "no such number"),
            (-3, ErrorCode.INTERNAL, "KeyError: 'x'"),
        ):
            with pytest.raises(WeirError) as raised:
                made.execute([request(x=x(value)), request(x=x(1))], Execution(PayloadReader()))
            assert (raised.value.code, raised.value.message) == (code, text)
        assert run(made, request(x=x(1)))[0]["facts"][0, 1] == 3
    failing = model(tmp_path, parameters={"fails": "yes"})
    with pytest.raises(WeirError) as raised, instance(backend, failing):
        pass
    assert (raised.value.code, raised.value.message) == (ErrorCode.INVALID_ARG, "hello m in 1")
    oddly = model(tmp_path, backend="own", parameters={"fails": "oddly"})
    with (
        pytest.raises(WeirError, match=r"^INTERNAL: backend 'own': KeyError: 'odd'\n\nAt:\n  backend.py"),
        instance(backend, oddly),
    ):
        pass
    with pytest.raises(WeirError) as raised:
        backend.describe(failing)
    assert (raised.value.code, raised.value.message) == (ErrorCode.UNAVAILABLE, "not today")


def test_requests_of_a_microbatch_fail_alone(backend: Backend, tmp_path: Path) -> None:
    with instance(backend, model(tmp_path)) as made:
        assert isinstance(made, MicrobatchInstance)
        microbatch = made.start_microbatch([request(x=x(value)) for value in (1, -2, 3)], Execution(PayloadReader()))
        assert microbatch.wait(10)
        first, second, third = (ended.result for ended in microbatch.ended())
        assert first is not None
        assert first.outputs[0].to_numpy().tolist() == [[2] * 4]
        assert second is not None
        assert second.error is not None
        assert (second.error.code, second.error.message) == (ErrorCode.INVALID_ARG, "no such number")
        assert third is not None
        assert third.outputs[0].to_numpy().tolist() == [[6] * 4]
        microbatch.close()


DECOUPLED = """
from weir.schemas.core.errors import invalid
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import Result


class Backend:
    def load(self, model):
        return self

    def create_instance(self, device):
        return self

    def execute(self, requests, execution):
        execution.respond(0, Result([Tensor("y", "FP32", [1, 1], bytes(4))]), False)
        raise invalid("no more")

    def close(self):
        pass

    def unload(self):
        pass
"""


def test_a_decoupled_instance_that_raises(tmp_path: Path) -> None:
    file = tmp_path / "backend.py"
    file.write_text(DECOUPLED)
    responses: list[tuple[int, bool]] = []

    class Responses(Execution):
        def respond(self, position: int, result: Result | None, is_final: bool) -> None:
            responses.append((position, is_final))

    of = model(tmp_path, model_transaction_policy={"decoupled": True})
    with instance(IsolatedBackend(OfFile(file)), of) as made, pytest.raises(WeirError) as raised:
        made.execute([request(x=x(1)), request(x=x(1))], Responses(PayloadReader()))
    assert (raised.value.code, raised.value.message) == (ErrorCode.INVALID_ARG, "no more")
    assert responses == [(0, False)]


def revived(made: Instance) -> dict[str, np.ndarray]:
    """The first result after the process has died."""
    while True:
        try:
            return run(made, request(x=x(1)))[0]
        except InstanceDied:
            time.sleep(0.02)


def test_a_crash_affects_one_instance_whose_next_batch_runs_in_a_new_process(backend: Backend, tmp_path: Path) -> None:
    with instance(backend, model(tmp_path)) as made, instance(backend, model(tmp_path)) as other:
        (bystander,) = run(other, request(x=x(1)))
        pids = {run(made, request(x=x(1)))[0]["facts"][0, 0]}
        for death in (-1, -4):  # a crash in native code, and a device that can't be used any more
            with pytest.raises(InstanceDied):
                made.execute([request(x=x(death))], Execution(PayloadReader()))
            answer = revived(made)
            assert answer["facts"][0, 1] == 1
            pids.add(answer["facts"][0, 0])
        assert len(pids) == 3
        (after,) = run(other, request(x=x(1)))
        assert after["facts"].tolist() == [[bystander["facts"][0, 0], 2]]


def test_states_come_back_as_states(backend: Backend, tmp_path: Path) -> None:
    state = {"input_name": "s", "output_name": "s_out", "data_type": "TYPE_FP32", "dims": [1]}
    of = model(tmp_path, sequence_batching={"state": [state]})
    with instance(backend, of) as made:
        ones = np.ones((1, 1), np.float32)
        for outputs in ((), ("y",)):
            asked = [request(x=x(1), s=ones * n, outputs=outputs) for n in (1, 2)]
            results = made.execute(asked, Execution(PayloadReader()))
            assert [output.name for output in asked[0].outputs] == list(outputs)
            for n, result in enumerate(results, 2):
                assert result is not None
                assert [tensor.name for tensor in result.outputs] == (["y"] if outputs else ["y", "facts"])
                assert [(tensor.name, tensor.to_numpy().tolist()) for tensor in result.states] == [("s_out", [[n]])]


def test_a_model_is_described_in_a_process(backend: Backend, tmp_path: Path) -> None:
    described = backend.describe(model(tmp_path))
    assert isinstance(described, DescribedModel)
    assert [row[:3] for row in described.inputs] == [("x", "TYPE_FP32", [-1, 4])]
    assert described.can_batch


def test_which_models_are_isolated(tmp_path: Path) -> None:
    def kind(backend: Any, **parameters: str) -> type:
        return type(isolate_if_wanted(backend, model(tmp_path, parameters=parameters)))

    onnx = OnnxRuntimeBackend()
    assert kind(onnx) is kind(onnx, isolation="thread") is OnnxRuntimeBackend
    assert kind(onnx, isolation="process") is IsolatedBackend
    assert kind(PythonBackend(), isolation="process") is PythonBackend
    with pytest.raises(WeirError, match='must be "process" or "thread", found \'container\''):
        kind(onnx, isolation="container")

    class Prefers(OnnxRuntimeBackend):
        def prefers_process(self, model: ModelVersion) -> bool:
            return True

    assert kind(Prefers()) is IsolatedBackend
    assert kind(Prefers(), isolation="thread") is Prefers


def test_names_of_a_models_folder_do_not_get_in_the_way(backend: Backend, tmp_path: Path) -> None:
    for name in ("schemas", "worker", "bus", "isolation"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent("raise RuntimeError('not this one')"))
    with instance(backend, model(tmp_path)) as made:
        assert run(made, request(x=x(1)))[0]["y"].tolist() == [[2] * 4]

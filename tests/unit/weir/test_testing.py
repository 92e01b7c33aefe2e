"""`weir.testing.run_backend`: models of users' backends run by the worker's code, on the CPU and on a simulated GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from examples.backends.linear.test_backend import test_a_batch_of_two_requests as test_the_example_of_the_documentation
from tests.support.fakes.cuda_device import fake_cuda_runtime
from weir.backend import WeirError
from weir.testing import run_backend

BACKENDS = Path(__file__).parents[3] / "examples" / "backends"

assert callable(test_the_example_of_the_documentation)  # and pytest runs it

COUNTING = """
import numpy as np
from weir.backend import ErrorCode, InstanceBackend, WeirError

class Backend(InstanceBackend):
    kinds = ("KIND_CPU", "KIND_GPU")
    def setup(self, model, device):
        self.device = device
    def run(self, inputs):
        count = self.number(inputs["COUNT"])
        if count == 13:
            raise WeirError(ErrorCode.INVALID_ARG, "not thirteen")
        for number in range(count):
            if number == 5:
                raise KeyError("five")
            yield {"OUT": np.array([[number]], np.int32)}
    def number(self, array):
        return int(np.asarray(array).ravel()[0])
"""

DECOUPLED = """
backend: "counting" max_batch_size: 4
input [{ name: "COUNT" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
model_transaction_policy { decoupled: true }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, backend in (("prices", "linear"), ("similar", "nearest")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(f'backend: "{backend}"\n')
    np.savez(tmp_path / "prices/1/weights.npz", weights=np.array([[2.0], [3.0]]), bias=np.array([1.0]))
    np.save(tmp_path / "similar/1/vectors.npy", np.array([[1, 0], [0, 1], [1, 1], [-1, 0]]))
    (tmp_path / "counts" / "1").mkdir(parents=True)
    (tmp_path / "counts" / "config.pbtxt").write_text(DECOUPLED)
    (tmp_path / "counts" / "backend.py").write_text(COUNTING)
    return tmp_path


def test_requests_share_a_batch(repository: Path) -> None:
    with run_backend(repository / "prices", backend_directory=BACKENDS) as model:
        assert model.config.max_batch_size == 4
        assert model.infer({"X": [[1, 1]]})["Y"].tolist() == [[6]]
        one, two = model.batch({"X": [[1, 2]]}, {"X": [[0, 0], [1, 0]]})
        assert not isinstance(one, WeirError)
        assert not isinstance(two, WeirError)
        assert (one["Y"].tolist(), two["Y"].tolist()) == ([[9]], [[1], [3]])
        assert model.instances[0]._runner.statistics.execution_count == 2
        wide = model.infer({"X": np.ones((300_000, 2))})["Y"]  # through shared memory, as in a server
        assert wide.shape == (300_000, 1)
        assert (wide == 6).all()
        assert model.instances[0].slots_held == 0


def test_batches_that_are_submitted_together(repository: Path) -> None:
    with run_backend(repository / "prices", backend_directory=BACKENDS) as model:
        found = model.batches([{"X": [[1, 0]]}, {"X": [[2, 0]]}], [{"X": [[3, 0]]}])
    assert [[one["Y"].item() for one in batch if not isinstance(one, WeirError)] for batch in found] == [[3, 5], [7]]


def test_the_configuration_can_be_replaced(repository: Path) -> None:
    config = '{"backend": "linear", "max_batch_size": 2, "instance_group": [{"count": 3, "kind": "KIND_CPU"}]}'
    with run_backend(repository / "prices", backend_directory=[BACKENDS], config=config) as model:
        assert (model.config.max_batch_size, len(model.instances)) == (2, 3)
        for number in range(4):
            assert model.infer({"X": [[number, 0]]}, outputs=["Y"])["Y"].tolist() == [[2 * number + 1]]


def test_an_error_is_the_outcome_of_its_request(repository: Path) -> None:
    with run_backend(repository / "counts") as model:
        responses = model.streams({"COUNT": [[2]]}, {"COUNT": [[13]]}, {"COUNT": [[0]]}, {"COUNT": [[6]]})
        *counted, error = responses[3]
        assert [one["OUT"].item() for one in responses[0] if not isinstance(one, WeirError)] == [0, 1]
        assert [str(one.message) for one in responses[1] if isinstance(one, WeirError)] == ["not thirteen"]
        assert responses[2] == []
        assert len(counted) == 5
        assert isinstance(error, WeirError)
        assert error.message == "KeyError: 'five'"
        assert [one["OUT"].item() for one in model.stream({"COUNT": [[3]]})] == [0, 1, 2]
        with pytest.raises(WeirError, match="not thirteen"):
            model.stream({"COUNT": [[13]]})
        with pytest.raises(WeirError, match="a request has 3 responses: use `stream` for decoupled models"):
            model.infer({"COUNT": [[3]]})
        with pytest.raises(WeirError, match="model 'counts' has no input 'X', its inputs are: \\['COUNT'\\]"):
            model.infer({"X": [[3]]})


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.pbtxt", 'backend: "nothing" runtime: "other.py"', "unable to find backend library 'other.py'"),
        ("backend.py", "class Backend:\n    def load(self, model):\n        return 1 / 0\n", "ZeroDivisionError"),
        ("1", None, "there is no model folder 'gone'"),
    ],
)
def test_a_model_that_can_not_be_loaded_is_an_error(
    repository: Path, file: str, text: str | None, message: str
) -> None:
    folder = repository / ("counts" if text is not None else "gone")
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(WeirError, match=message), run_backend(folder):
        pass


def test_the_example_finds_neighbours_on_the_cpu(repository: Path) -> None:
    with run_backend(repository / "similar", backend_directory=BACKENDS) as model:
        first, second = model.batch({"QUERY": [[2, 0.1]]}, {"QUERY": [[0, 5], [-1, -0.1]]})
    assert not isinstance(first, WeirError)
    assert not isinstance(second, WeirError)
    assert first["INDEX"].tolist() == [[0, 2, 1]]
    assert second["INDEX"][:, 0].tolist() == [1, 3]
    np.testing.assert_allclose(second["SCORE"][0], [1, 0.5**0.5, 0], atol=1e-6)
    assert "cupy" not in sys.modules


class NumpyAsCupy(ModuleType):
    """CuPy with NumPy's functions: reads device memory of the fake GPU, and computes on the host."""

    def __init__(self, cuda: Any) -> None:
        super().__init__("cupy")
        self.streams: list[int] = []
        outer = self

        class ExternalStream:
            def __init__(self, handle: int) -> None:
                self.handle = handle

            def __enter__(self) -> None:
                outer.streams.append(self.handle)

            def __exit__(self, *_: object) -> None:
                outer.streams.append(-self.handle)

        class Cuda:
            pass

        self.cuda = Cuda()
        self.cuda.ExternalStream = ExternalStream  # type: ignore[attr-defined]
        self._runtime = cuda

    def asarray(self, value: Any) -> np.ndarray:
        if isinstance(value, np.ndarray):
            return value
        assert not self._runtime.cudaStreamSynchronize(self.streams[-1])[0]
        interface = value.__cuda_array_interface__
        array: np.ndarray = self._runtime.array_at(interface["data"][0], interface["typestr"], interface["shape"])
        return array.copy()

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@pytest.fixture
def cuda() -> Iterator[Any]:
    gc.collect()
    with fake_cuda_runtime() as runtime:
        yield runtime


def test_the_example_finds_neighbours_on_a_gpu(repository: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = NumpyAsCupy(cuda)
    cupy.__spec__ = object()  # type: ignore[assignment]  # as of a module that was imported
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with run_backend(repository / "similar", backend_directory=BACKENDS, gpus=[0]) as model:
        assert model.config.instance_group[0].kind == "KIND_GPU"
        before = cuda.DEVICE.calls["cudaMemcpyAsync"]
        first, second = model.batch({"QUERY": [[2, 0.1]]}, {"QUERY": [[0, 5], [-1, -0.1]]})
        assert cuda.DEVICE.calls["cudaMemcpyAsync"] == before + 1, "the queries went to the GPU together"
    assert not isinstance(first, WeirError)
    assert not isinstance(second, WeirError)
    assert first["INDEX"].tolist() == [[0, 2, 1]]
    assert second["INDEX"][:, 0].tolist() == [1, 3]
    assert cupy.streams
    assert set(map(abs, cupy.streams)) <= set(cuda.DEVICE.streams)


def test_without_its_library_for_gpus_the_example_runs_on_the_cpu(repository: Path, cuda: Any) -> None:
    with run_backend(repository / "similar", backend_directory=BACKENDS, gpus=[0]) as model:
        assert model.config.instance_group[0].kind == "KIND_CPU"

"""Custom backends of both forms, as stock clients see them.

Where Triton has the same (Python-based backends, the search for a backend, settings), behaviour and texts were compared
with those of a running Triton 2.51.0.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from examples.own_backends import BACKENDS, build_repository
from tests.support.servers.repository import Repository, serving

COUNTDOWN = """
import numpy as np
import triton_python_backend_utils as pb_utils
from steps import FIRST

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "FROM", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "LEFT", "data_type": "TYPE_INT32", "dims": [1]})
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for left in range(int(request.inputs()[0].as_numpy()[0]) - FIRST, -1, -1):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("LEFT", np.array([left], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

DOUBLES = """
from weir.backend import ArrayBackend

class Backend(ArrayBackend):
    def open(self, model):
        def run(inputs):
            if (inputs["IN"] < 0).any():
                raise ValueError("negative numbers are not doubled")
            return {"OUT": inputs["IN"] * 2}
        return run
"""

SEVERAL = """
import numpy as np
from weir.backend import Result, Tensor

class Backend:
    def load(self, model):
        return Model()

class Model:
    def create_instance(self, device):
        return self
    def unload(self):
        pass
    def execute(self, requests, execution):
        for position, request in enumerate(requests):
            number = float(np.frombuffer(request.inputs[0].data, np.float32)[0])
            if number < 0:
                execution.respond(position, None, is_final=True)
                continue
            for step in range(2):
                output = Tensor.from_numpy("OUT", np.array([number + step], np.float32), "FP32")
                execution.respond(position, Result([output]), is_final=False)
        last = Tensor.from_numpy("OUT", np.array([-1], np.float32), "FP32")
        return [Result([last]) if request.id else None for request in requests]
    def close(self):
        pass
"""

SUMS = """
from weir.backend import ArrayBackend

class Backend(ArrayBackend):
    def open(self, model):
        def run(inputs):
            total = inputs["IN"] + inputs["BEFORE"]
            return {"OUT": total, "AFTER": total}
        return run
"""

STATE = """
sequence_batching {
  state { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_FP32 dims: [ 1 ]
    initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }
}
"""

CONFIG = """
backend: "%s"
runtime: "%s"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    folder = tmp_path_factory.mktemp("own_backends")
    backends = folder / "backends"
    build_repository(folder / "models")
    (folder / "models" / "counting" / "1").mkdir(parents=True)
    (folder / "models" / "counting" / "config.pbtxt").write_text('backend: "countdown"')
    (backends / "countdown").mkdir(parents=True)
    (backends / "countdown" / "model.py").write_text(COUNTDOWN)
    (backends / "countdown" / "steps.py").write_text("FIRST = 1\n")
    (backends / "shared").mkdir()
    (backends / "shared" / "doubling.py").write_text(DOUBLES)
    yield from serving(
        folder,
        "--model-control-mode=explicit",
        "--load-model=prices",
        "--load-model=topics",
        "--load-model=counting",
        f"--backend-directory={BACKENDS}",
        f"--backend-directory={backends}",
        "--backend-config=linear,default-max-batch-size=16",
        "--backend-config=default-max-batch-size=2",
    )


def write_model(repository: Repository, name: str, backend: str, runtime: str, files: dict[str, str]) -> None:
    (repository.root / name / "1").mkdir(parents=True)
    (repository.root / name / "config.pbtxt").write_text(CONFIG % (backend, runtime))
    for path, text in files.items():
        (repository.root / name / path).write_text(text)


def test_a_backend_on_arrays_is_completed_batched_and_asked(repository: Repository) -> None:
    config = repository.http.get_model_config("prices")
    assert config["max_batch_size"] == 16, "its own setting counts, not the one for all"
    assert [(row["name"], row["data_type"], row["dims"]) for row in config["input"]] == [("X", "TYPE_FP32", [2])]
    assert config["dynamic_batching"]["preferred_batch_size"] == [16]
    rows = np.array([[3, 80], [2, 50], [5, 120]], np.float32)
    for module, client in ((tritonclient.http, repository.http), (tritonclient.grpc, repository.grpc)):
        given = module.InferInput("X", rows.shape, "FP32")
        given.set_data_from_numpy(rows)
        answer = client.infer("prices", [given]).as_numpy("Y")
        assert answer.dtype == np.float32
        np.testing.assert_allclose(answer[:, 0], [300.67, 202, 451.33], atol=0.1)


def test_a_python_based_backend_serves_models_that_are_data_alone(repository: Repository) -> None:
    config = repository.http.get_model_config("topics")
    assert (config["backend"], config["runtime"], config["default_model_filename"]) == ("keywords", "model.py", "")
    assert config["max_batch_size"] == 64
    given = tritonclient.http.InferInput("TEXT", [2, 1], "BYTES")
    given.set_data_from_numpy(np.array([[b"a batch, a Batch and a queue"], [b"batch"]], np.object_))
    answer = repository.http.infer("topics", [given]).as_numpy("COUNTS")
    assert answer.tolist() == [[1, 1, 0], [0, 1, 0]]


def test_a_python_based_backend_may_be_decoupled_and_finds_its_own_modules(repository: Repository) -> None:
    answers: queue.SimpleQueue[tuple[object, object]] = queue.SimpleQueue()
    repository.grpc.start_stream(lambda result, error: answers.put((result, error)))
    given = tritonclient.grpc.InferInput("FROM", [1], "INT32")
    given.set_data_from_numpy(np.array([3], np.int32))
    repository.grpc.async_stream_infer("counting", [given])
    left = []
    for _ in range(3):
        result, error = answers.get(timeout=20)
        assert error is None
        left.append(int(result.as_numpy("LEFT")[0]))  # type: ignore[attr-defined]
    repository.grpc.stop_stream()
    assert left == [2, 1, 0]


@pytest.mark.parametrize("place", ["1/mine.py", "mine.py"])
def test_the_file_may_lie_with_the_model(repository: Repository, place: str) -> None:
    name = f"doubling_{place.count('/')}"
    write_model(repository, name, "double", "mine.py", {place: DOUBLES})
    repository.http.load_model(name)
    assert repository.added(name) == 1
    (repository.root / name / place).write_text(DOUBLES.replace("* 2", "* 30"))
    repository.http.load_model(name)
    assert repository.added(name) == 29, "a file that has changed is imported anew"
    assert not list((repository.root / name).rglob("__pycache__"))


def test_what_it_raises_fails_the_request_alone(repository: Repository) -> None:
    write_model(repository, "raising", "shared", "doubling.py", {})
    repository.http.load_model("raising")
    given = tritonclient.http.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.array([-1], np.float32))
    with pytest.raises(tritonclient.http.InferenceServerException, match="negative numbers are not doubled"):
        repository.http.infer("raising", [given])
    assert repository.added("raising") == 1


def streamed(repository: Repository, model: str, number: float, request_id: str, count: int) -> list[float]:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    repository.grpc.start_stream(lambda result, error: answers.put((result, error)))
    given = tritonclient.grpc.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.array([number], np.float32))
    repository.grpc.async_stream_infer(model, [given], request_id=request_id)
    received = []
    for _ in range(count):
        result, error = answers.get(timeout=20)
        assert error is None
        received.append(float(result.as_numpy("OUT")[0]))
    repository.grpc.stop_stream()
    assert answers.empty()
    return received


def test_a_backend_of_weir_s_form_may_be_decoupled(repository: Repository) -> None:
    write_model(repository, "several", "several", "", {"backend.py": SEVERAL})
    with (repository.root / "several" / "config.pbtxt").open("a") as config:
        config.write("model_transaction_policy { decoupled: true }")
    repository.http.load_model("several")
    assert streamed(repository, "several", 5, "with a last one", 3) == [5, 6, -1]
    assert streamed(repository, "several", -5, "", 0) == []


def test_a_backend_on_arrays_may_keep_states(repository: Repository) -> None:
    write_model(repository, "sums", "sums", "", {"backend.py": SUMS})
    with (repository.root / "sums" / "config.pbtxt").open("a") as config:
        config.write(STATE)
    repository.http.load_model("sums")
    given = tritonclient.http.InferInput("IN", [1], "FP32")
    sums = []
    for number in (1, 2, 3):
        given.set_data_from_numpy(np.array([number], np.float32))
        answer = repository.http.infer(
            "sums", [given], sequence_id=7, sequence_start=number == 1, sequence_end=number == 3
        )
        sums.append(float(answer.as_numpy("OUT")[0]))
    assert sums == [1, 3, 6]


@pytest.mark.parametrize(
    ("name", "backend", "runtime", "files", "reason"),
    [
        (
            "unknown",
            "nope",
            "",
            {},
            "Invalid argument: unable to find backend library for backend 'nope', try specifying runtime on the model "
            "configuration. There are ",
        ),
        (
            "no_file",
            "linear",
            "other.py",
            {},
            "Invalid argument: unable to find backend library 'other.py' for model 'no_file', searched: 'no_file/1' "
            "'no_file' 'backends/linear' 'backends/linear'",
        ),
        (
            "not_based",
            "python",
            "model.py",
            {"1/model.py": COUNTDOWN},
            "Invalid argument: unable to find Python backend based backend library 'model.py' for model 'not_based', "
            "searched: 'backends/python' 'backends/python'",
        ),
        (
            "escape",
            "linear",
            "../x.py",
            {},
            "file '../x.py' must stay within the model's folder (escape/config.pbtxt:3, field 'runtime')",
        ),
        ("library", "nope", "libtriton_nope.so", {}, "unable to find backend library for backend 'nope'"),
        ("other_library", "nope", "libmine.so", {}, "its runtime 'libmine.so' is a shared library of Triton's"),
        (
            "no_class",
            "x",
            "x.py",
            {"x.py": COUNTDOWN.partition("import")[0]},
            "x.py has no class 'Backend' with a method",
        ),
        (
            "raises",
            "x",
            "x.py",
            {"x.py": "import math\n\nmath.sqrt(-1)\n"},
            "backend 'x': ValueError: math domain error\n\nAt:\n  x.py(3): <module>\n",
        ),
        (
            "typo",
            "x",
            "x.py",
            {"x.py": "class Backend:\n    def load(self model): ...\n"},
            "SyntaxError: invalid syntax",
        ),
        (
            "load_raises",
            "x",
            "x.py",
            {"x.py": "class Backend:\n    def load(self, model):\n        raise OSError('no weights')\n"},
            "backend 'x': OSError: no weights\n\nAt:\n  x.py(3): load\n",
        ),
    ],
)
def test_a_load_that_fails_says_why(
    repository: Repository, name: str, backend: str, runtime: str, files: dict[str, str], reason: str
) -> None:
    write_model(repository, name, backend, runtime, files)
    status, error = repository.load(name)
    assert status == 400
    assert reason in error
    assert str(repository.root) not in error
    assert repository.http.is_model_ready("prices")

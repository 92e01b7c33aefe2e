"""`weir init`: what it makes of each format is served, and the command that it prints gets a response."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.models import onnx_files
from tests.support.models.torch_files import export, script
from tests.support.own_process import later
from tests.support.servers.forked_commands import COMMAND
from tests.support.servers.weir_server import Server, clean_environment

torch = later("torch")
networks = later("tests.support.models.torch_networks")

pytestmark = pytest.mark.slow  # `make test` serves a generated folder in the test of the page


def fixed_graph() -> onnx.ModelProto:
    """`OUT = IN + W` for one row, whose weights lie in a file of their own."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1024]) for name in ("IN", "OUT")]
    weights = onnx.numpy_helper.from_array(np.ones((1, 1024), np.float32), "W")
    node = helper.make_node("Add", ["IN", "W"], ["OUT"])
    graph = helper.make_graph([node], "graph", tensors[:1], tensors[1:], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def write_files(folder: Path) -> None:
    onnx.save(onnx_files.graph(), folder / "negative.onnx")
    onnx.save(onnx_files.graph(onnx_type=TensorProto.FLOAT16), folder / "halves.onnx")
    onnx.save_model(
        fixed_graph(), folder / "fixed.onnx", save_as_external_data=True, location="fixed.data", size_threshold=0
    )
    script(folder, networks.Scores())
    (folder / "1" / "model.pt").rename(folder / "script.pt")
    export(folder, networks.Scores(), (torch.ones(2, 4),))
    (folder / "1" / "model.pt2").rename(folder / "program.pt2")


MADE = {
    "negative": ("negative.onnx",),
    "halves": ("halves.onnx",),
    "fixed": ("fixed.onnx", "--link"),
    "script": ("script.pt", "--input=x:FP32:-1,4", "--max-batch-size=2"),
    "program": ("program.pt2",),
    "python_model": ("--template=python", "--name=python_model"),
    "own_backend": ("--template=backend", "--name=own_backend"),
}
"""The arguments of `weir init` for each model."""


class Made:
    """A folder with files of models, the models that were made of them, and what was printed for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_files(folder)
        self.printed = {name: self.init(*arguments) for name, arguments in MADE.items()}

    def init(self, *arguments: str) -> str:
        done = subprocess.run(
            [*COMMAND, "init", *arguments],
            cwd=self.folder,
            env=clean_environment(self.folder),
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("init"))


@pytest.fixture(scope="module")
def server(made: Made) -> Iterator[Server]:
    with Server(made.folder, made.folder / "models") as started:
        started.wait_ready()
        yield started


@pytest.mark.parametrize("name", MADE)
def test_the_sample_request_gets_a_response(made: Made, server: Server, name: str) -> None:
    (command,) = re.findall(r"^  (curl .*)$", made.printed[name], re.MULTILINE)
    words = command.replace("localhost:8000", server.http_place).split()
    done = subprocess.run(words, cwd=made.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if name == "halves":  # JSON does not carry FP16
        content = (made.folder / "response.bin").read_bytes()
        assert content.startswith(b'{"model_name":"halves"')
        return
    response = json.loads(done.stdout)
    assert response["model_name"] == name, response
    assert len(response["outputs"]) == 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("negative", "Largest batch 8: The first dimension of every input and output is variable"),
        ("fixed", "Requests run one by one: the first dimension is not variable in IN [1, 1024], OUT [1, 1024]."),
        ("script", "Largest batch 2: Requests are joined to batches of at most this size"),
        ("program", "Largest batch 8: The first dimension of every input and output is variable"),
    ],
)
def test_the_size_of_batches_is_explained(made: Made, name: str, line: str) -> None:
    assert line in made.printed[name]
    comment = (made.folder / "models" / name / "config.pbtxt").read_text().replace("\n# ", " ")
    assert line.partition(": ")[2][:40] in comment


def test_weights_beside_a_model_go_with_it(made: Made) -> None:
    folder = made.folder / "models" / "fixed" / "1"
    assert sorted(path.name for path in folder.iterdir()) == ["fixed.data", "model.onnx"]
    assert all(path.stat().st_nlink == 2 for path in folder.iterdir())


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("net.onnx", "net.onnx can't be read: 'net.onnx' is not an ONNX model"),
        ("weights.pt", "'weights.pt' is neither TorchScript nor written by torch.export nor compiled by AOTInductor"),
    ],
)
def test_files_that_cannot_be_read_are_refused(made: Made, file: str, text: str) -> None:
    (made.folder / "net.onnx").write_bytes(b"no protobuf")
    torch.save(networks.Scores().state_dict(), made.folder / "weights.pt")
    done = subprocess.run(
        [*COMMAND, "init", file, "--name=refused"],
        cwd=made.folder,
        env=clean_environment(made.folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert text in done.stderr
    assert not (made.folder / "models" / "refused").exists()

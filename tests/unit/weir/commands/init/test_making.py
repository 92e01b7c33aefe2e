"""`weir init` with files that need no library: names, files that are refused, and files that can't be read here."""

from __future__ import annotations

from pathlib import Path

import pytest

from weir.commands.app import main
from weir.commands.init.making import InitRequest, make
from weir.commands.init.reading import GivenTensors, given_tensor
from weir.errors import StartError
from weir.repository.config_text import parse_config


@pytest.mark.parametrize(
    ("file", "name"),
    [("resnet.plan", "resnet"), ("my model (2).plan", "my_model_2_"), ("-.plan", "model"), ("nets/model.plan", "nets")],
)
def test_a_model_is_called_as_its_file(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"plan")
    tensors = GivenTensors([given_tensor("--input", "x:FP32:-1,4")], [given_tensor("--output", "y:FP32:-1,4")])
    list(make(InitRequest(file=tmp_path / file, repository=tmp_path / "models", given=tensors)))
    assert [path.name for path in (tmp_path / "models").iterdir()] == [name]


def test_a_plan_that_cannot_be_read_here_is_completed_by_the_server(tmp_path: Path) -> None:
    """No machine of these tests has a GPU and TensorRT; the message of the backend says which is missing."""
    (tmp_path / "net.plan").write_bytes(b"plan")
    printed = list(make(InitRequest(file=tmp_path / "net.plan", repository=tmp_path)))
    text = (tmp_path / "net" / "config.pbtxt").read_text()
    assert "The server adds them, and the size of batches, when it loads the model." in text.replace("\n# ", " ")
    config = parse_config(text.encode(), "config.pbtxt")
    assert (config.backend, config.max_batch_size, config.input) == ("tensorrt", 0, [])
    assert any(line.startswith("note: it has no sample request") for line in printed)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("missing.onnx", "missing.onnx is not a file"),
        ("net.h5", "has the suffix '.h5', expected one of .onnx, .pt, .pth, .pt2, .plan, .engine"),
        ("net", "has the suffix ''"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / "net.h5").touch()
    (tmp_path / "net").touch()
    with pytest.raises(StartError) as raised:
        list(make(InitRequest(file=tmp_path / file, repository=tmp_path / "models")))
    assert text in str(raised.value)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    "text", ["x", "x:FP32", ":FP32:4", "x:FP99:4", "x:FP32:0", "x:FP32:-2", "x:FP32:a", "x:FP32:1.5"]
)
def test_tensors_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(StartError, match="must have the form NAME:DATATYPE:DIMS such as x:FP32:-1,4"):
        given_tensor("--input", text)


@pytest.mark.parametrize(
    ("text", "dims"), [("x:FP32:-1,4", [-1, 4]), ("x:TYPE_FP32:[-1, 4]", [-1, 4]), ("x:fp32:", [])]
)
def test_tensors_are_read(text: str, dims: list[int]) -> None:
    assert given_tensor("--input", text)[:3] == ("x", "TYPE_FP32", dims)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 2, "error: name the model's file, or give --template python or --template backend"),
        (["net.onnx", "--template=python"], 2, "error: name the model's file, or give --template python"),
        (["--template=rust", "--name=m"], 2, "It must be one of python, backend, not 'rust'"),
        (["--template=python"], 1, "error: a template needs a name for its model: --name NAME"),
        (["--template=python", "--name=../m"], 1, "error: invalid model name '../m'"),
        (["--template=python", "--name=m", "--link"], 2, "--template takes no --input, --output and --link"),
        (["--template=backend", "--name=pytorch"], 1, "can't be called pytorch, which is one of Weir's backends"),
    ],
)
def test_wrong_usage_is_explained(
    arguments: list[str], status: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["init", *arguments])
    assert ended.value.code == status
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    request = InitRequest(template="python", name="m", repository=tmp_path / "models", is_dry=True)
    printed = "\n".join(make(request))
    assert "m would have these files:" in printed
    assert 'backend: "python"' in printed
    assert not (tmp_path / "models").exists()

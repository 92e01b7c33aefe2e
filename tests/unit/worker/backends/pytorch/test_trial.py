"""PyTorch models described by running them: datatypes, shapes, and which dimensions follow the batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from weir.schemas.core.errors import ErrorCode, WeirError

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.support.models.torch_files import config, script, version  # noqa: E402
from weir.worker.backends.pytorch.trial import TorchTrial  # noqa: E402
from weir.worker.backends.trial import BATCH, OTHER  # noqa: E402


class Several(torch.nn.Module):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x.sum(1) > 0, ids.double().transpose(0, 1), x[:, :1] * torch.ones(2)


class Named(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": x.mean(0), "half": x.half()}


class Text(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> str:
        return "text"


def described(folder: Path, module: torch.nn.Module, inputs: str) -> list[tuple[str, str, list[int], str]]:
    script(folder, module)
    found = TorchTrial().describe(version(folder, config(inputs=inputs, outputs="", max_batch_size=0)))
    assert found is not None
    return [(row.name, row.data_type, list(row.dims), row.first_symbol) for row in [*found.inputs, *found.outputs]]


def test_outputs_are_found_by_running_the_model(tmp_path: Path) -> None:
    assert described(tmp_path, Several(), "x:FP32:-1,4 ids:INT64:-1,-1") == [
        ("x", "TYPE_FP32", [-1, 4], BATCH),
        ("ids", "TYPE_INT64", [-1, -1], BATCH),
        ("OUTPUT__0", "TYPE_BOOL", [-1], BATCH),
        ("OUTPUT__1", "TYPE_FP64", [-1, -1], OTHER),
        ("OUTPUT__2", "TYPE_FP32", [-1, 2], BATCH),
    ]


def test_outputs_have_the_names_of_a_dictionary(tmp_path: Path) -> None:
    assert described(tmp_path, Named(), "x:FP32:-1,4")[1:] == [
        ("mean", "TYPE_FP32", [4], ""),
        ("half", "TYPE_FP16", [-1, 4], BATCH),
    ]


@pytest.mark.parametrize(
    ("module", "inputs", "text"),
    [
        (Several(), "", r"the file does not contain the datatypes and shapes of its inputs \(x, ids\)"),
        (Several(), "x:FP32:-1,4", "configuration expects 1 inputs, model provides 2"),
        (Text(), "x:FP32:-1,4", "output 'OUTPUT__0' of the model is a str"),
        (torch.nn.Linear(4, 3), "input:FP32:-1,5", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_models_that_cannot_be_run_are_refused(tmp_path: Path, module: torch.nn.Module, inputs: str, text: str) -> None:
    script(tmp_path, module)
    with pytest.raises(WeirError, match=text) as raised:
        TorchTrial().describe(version(tmp_path, config(inputs=inputs, outputs="", max_batch_size=0)))
    assert raised.value.code in (ErrorCode.INVALID_ARG, ErrorCode.INTERNAL)

"""PyTorch models described by running them: datatypes, shapes, and which dimensions follow the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.torch_files import config, script, version
from tests.support.own_process import later
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.backends.pytorch.trial import TorchTrial
from weir.worker.backends.trial import BATCH, OTHER

torch = later("torch")
networks = later("tests.support.models.torch_networks")

pytestmark = pytest.mark.torch


def described(folder: Path, module: torch.nn.Module, inputs: str) -> list[tuple[str, str, list[int], str]]:
    script(folder, module)
    found = TorchTrial().describe(version(folder, config(inputs=inputs, outputs="", max_batch_size=0)))
    assert found is not None
    return [(row.name, row.data_type, list(row.dims), row.first_symbol) for row in [*found.inputs, *found.outputs]]


def test_outputs_are_found_by_running_the_model(tmp_path: Path) -> None:
    assert described(tmp_path, networks.Several(), "x:FP32:-1,4 ids:INT64:-1,-1") == [
        ("x", "TYPE_FP32", [-1, 4], BATCH),
        ("ids", "TYPE_INT64", [-1, -1], BATCH),
        ("OUTPUT__0", "TYPE_BOOL", [-1], BATCH),
        ("OUTPUT__1", "TYPE_FP64", [-1, -1], OTHER),
        ("OUTPUT__2", "TYPE_FP32", [-1, 2], BATCH),
    ]


def test_outputs_have_the_names_of_a_dictionary(tmp_path: Path) -> None:
    assert described(tmp_path, networks.ReturnsDict(), "x:FP32:-1,4")[1:] == [
        ("mean", "TYPE_FP32", [4], ""),
        ("half", "TYPE_FP16", [-1, 4], BATCH),
    ]


@pytest.mark.parametrize(
    ("module", "inputs", "text"),
    [
        (
            lambda: networks.Several(),
            "",
            r"the file does not contain the datatypes and shapes of its inputs \(x, ids\)",
        ),
        (lambda: networks.Several(), "x:FP32:-1,4", "configuration expects 1 inputs, model provides 2"),
        (lambda: networks.Text(), "x:FP32:-1,4", "output 'OUTPUT__0' of the model is a str"),
        (lambda: torch.nn.Linear(4, 3), "input:FP32:-1,5", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_models_that_cannot_be_run_are_refused(
    tmp_path: Path, module: Callable[[], Any], inputs: str, text: str
) -> None:
    script(tmp_path, module())
    with pytest.raises(WeirError, match=text) as raised:
        TorchTrial().describe(version(tmp_path, config(inputs=inputs, outputs="", max_batch_size=0)))
    assert raised.value.code in (ErrorCode.INVALID_ARG, ErrorCode.INTERNAL)

"""Checks of an ensemble against its composing models: batch dimensions, and tensors that meet in a step."""

from __future__ import annotations

from typing import Any

import pytest

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.worker.devices.gpus import WorkerDevices
from weir.worker.ensembles.backend import ComposingModel, check_ensemble_models
from weir.worker.lifecycle.instance_plan import runs_elsewhere


def tensor(name: str, dims: list[int]) -> dict[str, Any]:
    return {"name": name, "data_type": "TYPE_FP32", "dims": dims}


def model(name: str, batch: int, dims: list[int], decoupled: bool = False, inputs: str = "i") -> ComposingModel:
    config = ModelConfig.model_validate(
        {
            "name": name,
            "max_batch_size": batch,
            "input": [tensor(one, dims) for one in inputs],
            "output": [tensor("o", dims)],
            "model_transaction_policy": {"decoupled": decoupled},
        }
    )
    return ComposingModel(config, [1])


def ensemble(batch: int, *steps: tuple[str, dict[str, str], str], **more: Any) -> ModelConfig:
    rows = [
        {"model_name": name, "model_version": -1, "input_map": given, "output_map": {"o": made}}
        for name, given, made in steps
    ]
    fields = {"input": [tensor("x", [16])], "output": [tensor("y", [16])]}
    scheduling = {"step": rows}
    return ModelConfig.model_validate(
        {
            "name": "e",
            "platform": "ensemble",
            "max_batch_size": batch,
            "ensemble_scheduling": scheduling,
            **fields,
            **more,
        }
    )


def test_a_model_without_batches_may_have_the_batch_as_its_first_dimension() -> None:
    config = ensemble(2, ("batches", {"i": "x"}, "t"), ("not", {"i": "t"}, "y"))
    check_ensemble_models(config, {"batches": model("batches", 4, [16]), "not": model("not", 0, [-1, 16])})
    with pytest.raises(
        WeirError, match=r"inconsistent shape: \[-1,16\] is inferred from model batches while \[3,4,16\]"
    ):
        check_ensemble_models(config, {"batches": model("batches", 4, [16]), "not": model("not", 0, [3, 4, 16])})
    with pytest.raises(WeirError, match="contains model not which only allows maximum batch size to be 1"):
        check_ensemble_models(config, {"batches": model("batches", 4, [16]), "not": model("not", 1, [16])})


def test_responses_of_several_decoupled_models_must_not_meet_in_a_step() -> None:
    config = ensemble(
        0,
        ("many", {"i": "x"}, "a"),
        ("many", {"i": "x"}, "b"),
        ("join", {"i": "a", "j": "b"}, "c"),
        ("last", {"i": "c"}, "y"),
    )
    models = {
        "many": model("many", 0, [16], decoupled=True),
        "join": model("join", 0, [16], inputs="ij"),
        "last": model("last", 0, [16]),
    }
    with pytest.raises(
        WeirError, match="in ensemble e, step of model 'join' receives inputs originated from different"
    ):
        check_ensemble_models(config, models)


def test_an_ensemble_is_never_placed_by_devices() -> None:
    config = ensemble(0, ("m", {"i": "x"}, "y"), instance_group=[{"kind": "KIND_GPU", "gpus": [42]}])
    assert not runs_elsewhere(config, WorkerDevices())

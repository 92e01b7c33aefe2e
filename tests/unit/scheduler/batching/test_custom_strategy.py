"""Where a model's batch strategy is found, and that a failing one has no effect."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.scheduling.requests import FormedQueue, keys, request
from weir.scheduler.batching.custom_strategy import PATH_PARAMETER, GuardedStrategy, StrategyFiles
from weir.scheduler.batching.dynamic_former import DynamicFormer
from weir.schemas.config.model_config import ModelConfig

STRATEGY = """
class BatchStrategy:
    def __init__(self, config):
        self.name = config["name"] + "%s"
    def begin(self):
        return []
    def include(self, request, batch):
        batch.append(request.size_bytes)
        return sum(batch) <= 10
"""


def config(path: str = "", **more: Any) -> ModelConfig:
    parameters = {PATH_PARAMETER: {"string_value": path}} if path else {}
    return ModelConfig.model_validate(
        {"name": "m", "max_batch_size": 8, "dynamic_batching": {}, "parameters": parameters, **more}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of model `m`; its repository is the folder around it."""
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    return tmp_path / "models" / "m"


def name_of(found: GuardedStrategy | None) -> str | None:
    return None if found is None else found._strategy.name


def test_the_file_of_the_version_goes_before_that_of_the_model(folder: Path):
    files = StrategyFiles([folder.parent.parent / "empty", folder.parent])
    assert files.find("m", 1, config()) is None
    (folder / "batchstrategy.py").write_text(STRATEGY % " of the model")
    assert name_of(files.find("m", 1, config())) == "m of the model"
    (folder / "1" / "batchstrategy.py").write_text(STRATEGY % " of 1")
    assert name_of(files.find("m", 1, config())) == "m of 1"
    assert name_of(files.find("m", 2, config())) == "m of the model"
    (folder / "named.py").write_text(STRATEGY % " by name")
    assert name_of(files.find("m", 1, config("named.py"))) == "m by name"
    assert not list(folder.rglob("__pycache__"))


def test_a_strategy_file_is_read_again_only_after_a_change(folder: Path):
    path = folder / "batchstrategy.py"
    path.write_text(STRATEGY % "1")
    files = StrategyFiles([folder.parent])
    first = files.find("m", 1, config())
    assert files.find("m", 1, config()) is first
    path.write_text(STRATEGY % "2")
    os.utime(path, ns=(1, 1))
    assert name_of(files.find("m", 1, config())) == "m2"
    path.unlink()
    assert files.find("m", 1, config()) is None


@pytest.mark.parametrize("named", ["absent.py", "../outside.py", "1/../../outside.py", "/absent/strategy.py", "lib.so"])
def test_an_unusable_strategy_file_is_logged_once(folder: Path, named: str, caplog: pytest.LogCaptureFixture):
    (folder.parent / "outside.py").write_text(STRATEGY % "")
    files = StrategyFiles([folder.parent])
    with caplog.at_level(logging.WARNING):
        assert files.find("m", 1, config(named)) is files.find("m", 1, config(named)) is None
    (reported,) = caplog.records
    assert "batch strategy not used, the default rule applies" in reported.getMessage()


def test_an_absolute_path_may_be_anywhere(folder: Path, tmp_path: Path):
    (tmp_path / "say.py").write_text(STRATEGY % " elsewhere")
    assert name_of(StrategyFiles().find("m", 1, config(str(tmp_path / "say.py")))) == "m elsewhere"


def test_names_that_lead_out_of_the_repository_are_not_followed(folder: Path):
    (folder.parent.parent / "batchstrategy.py").write_text(STRATEGY % "")
    assert StrategyFiles([folder.parent]).find("..", 1, config()) is None


def test_sequences_have_rules_of_their_own(folder: Path):
    (folder / "batchstrategy.py").write_text(STRATEGY % "")
    no_batching = config(dynamic_batching=None, sequence_batching={})
    assert StrategyFiles([folder.parent]).find("m", 1, no_batching) is None


@pytest.mark.parametrize(
    "text", ["this is not Python", "x = 1", "BatchStrategy = 3", "def BatchStrategy(config): raise KeyError", "exit()"]
)
def test_a_strategy_file_that_raises_is_logged(folder: Path, text: str, caplog: pytest.LogCaptureFixture):
    (folder / "batchstrategy.py").write_text(text)
    assert StrategyFiles([folder.parent]).find("m", 1, config()) is None
    assert "can not be loaded" in caplog.text


class Sized:
    """At most ten bytes a batch; raises when it meets the number of bytes that it can't stand."""

    def __init__(self, unbearable: int = 0) -> None:
        self.unbearable = unbearable

    def begin(self) -> list[int]:
        return []

    def include(self, request: Any, batch: list[int]) -> bool:
        if request.size_bytes == self.unbearable:
            raise ValueError
        batch.append(request.size_bytes)
        return sum(batch) <= 10


def batches(strategy: GuardedStrategy | None, *sizes: int) -> list[list[int] | None]:
    formed = FormedQueue(DynamicFormer(4, strategy=strategy))
    formed.enqueue([request(key=key, body=bytes(size)) for key, size in enumerate(sizes, 1)])
    found = []
    while len(formed):
        found.append(keys(formed.next_batch(0)))
    return found


def test_a_strategy_ends_batches_earlier_never_later():
    assert batches(GuardedStrategy(Sized(), "s"), 4, 6, 5, 50, 1, 1, 1, 1, 1) == [[1, 2], [3], [4], [5, 6, 7, 8], [9]]


@pytest.mark.parametrize("method", ["begin", "include"])
def test_a_strategy_that_exits_is_not_used(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Sized, method, lambda *_: sys.exit())
    assert batches(GuardedStrategy(Sized(), "s"), 9, 9) == [[1, 2]]


def test_a_strategy_that_raised_is_not_used(caplog: pytest.LogCaptureFixture):
    assert batches(GuardedStrategy(Sized(unbearable=7), "s"), 6, 5, 7, 9, 9, 9) == [[1], [2, 3, 4, 5], [6]]
    assert len(caplog.records) == 1


def test_models_of_one_name_have_the_files_of_their_own_repositories(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name / "m").mkdir(parents=True)
        (tmp_path / name / "m" / "batchstrategy.py").write_text(STRATEGY % f" of {name}")
    files = StrategyFiles([tmp_path / "a", tmp_path / "b"])
    assert [name_of(files.find(f"{tmp_path / name}::m", 1, config())) for name in "ba"] == ["m of b", "m of a"]
    assert files.find(f"{tmp_path / 'c'}::m", 1, config()) is None

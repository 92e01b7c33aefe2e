"""`DependencyWatcher`: what changes of the composing models mean for an ensemble."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weir.repository.layout import FoundModel, ModelRepository
from weir.schemas.config.model_config import ModelConfig
from weir.worker.ensembles.dependencies import DependencyAction, DependencyWatcher

ENSEMBLE = """
platform: "ensemble"
input { name: "X" data_type: TYPE_FP32 dims: [1] }
output { name: "Y" data_type: TYPE_FP32 dims: [1] }
ensemble_scheduling { step { model_name: "part" model_version: -1
  input_map { key: "A" value: "X" } output_map { key: "B" value: "Y" } } }
"""


class Registry:
    """The served models, and a watcher of the ensemble `whole`."""

    def __init__(self, folder: Path, text: str = ENSEMBLE) -> None:
        (folder / "whole" / "1").mkdir(parents=True)
        (folder / "whole" / "config.pbtxt").write_text(text)
        self.found: FoundModel = ModelRepository([folder]).find("whole")
        self.served: dict[str, Any] = {}
        self.changes: list[str] = []
        self.notify: Callable[[str], None] = lambda _name: None
        self.each_second: Callable[[], None] = lambda: None
        client = SimpleNamespace(
            registry=SimpleNamespace(on_model_change=lambda listener: setattr(self, "notify", listener)),
            catalog=SimpleNamespace(served_model=self.served.get, is_wanted=lambda _name: True),
            each_second=lambda listener: setattr(self, "each_second", listener),
            open_soon=lambda: None,
        )
        self.circle = ""
        self.watcher = DependencyWatcher(cast(Any, client), lambda _config, _found: self.circle)
        self.watcher.on_change(self.changes.append)

    def serve(self, versions: tuple[int, ...] = (1,), platform: str = "") -> None:
        config = ModelConfig(name="part", platform=platform)
        self.served["part"] = SimpleNamespace(versions=versions, config=config)

    def load(self) -> None:
        """Loads the ensemble with its composing models as they are now."""
        config = self.watcher.read(self.found, None)
        assert config is not None
        self.watcher.follow(self.found, config, None)
        self.watcher.tried("whole", older_one_serves=False)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


def test_an_ensemble_is_loaded_again_when_a_composing_model_changes(registry: Registry) -> None:
    registry.serve()
    registry.load()
    assert registry.watcher.action("whole", is_serving=True) is DependencyAction.KEEP
    registry.serve(platform="another")
    assert registry.watcher.action("whole", is_serving=True) is DependencyAction.LOAD
    registry.serve(versions=(1, 2))
    assert registry.watcher.action("whole", is_serving=True) is DependencyAction.LOAD
    registry.load()
    assert registry.watcher.action("whole", is_serving=True) is DependencyAction.KEEP


def test_an_ensemble_is_withdrawn_without_a_composing_model_and_returns_with_it(registry: Registry) -> None:
    registry.serve()
    registry.load()
    registry.served.clear()
    assert registry.watcher.action("whole", is_serving=True) is DependencyAction.WITHDRAW
    registry.watcher.withdrawn("whole")
    assert registry.watcher.action("whole", is_serving=False) is DependencyAction.KEEP
    registry.serve()
    assert registry.watcher.action("whole", is_serving=False) is DependencyAction.LOAD


def test_a_required_version_must_be_served(tmp_path: Path) -> None:
    registry = Registry(tmp_path, ENSEMBLE.replace("model_version: -1", "model_version: 2"))
    registry.serve(versions=(1,))
    registry.load()
    assert registry.watcher.action("whole", is_serving=True) is DependencyAction.WITHDRAW
    registry.serve(versions=(1, 2))
    assert registry.watcher.action("whole", is_serving=False) is DependencyAction.LOAD


def test_a_failed_load_is_not_repeated_before_the_models_change(registry: Registry) -> None:
    registry.load()
    assert registry.watcher.action("whole", is_serving=False) is DependencyAction.KEEP
    registry.serve()
    assert registry.watcher.action("whole", is_serving=False) is DependencyAction.LOAD


def test_a_failed_reload_keeps_watching_for_the_older_ensemble(registry: Registry) -> None:
    registry.serve()
    registry.load()
    config = registry.watcher.read(registry.found, None)
    assert config is not None
    registry.watcher.follow(registry.found, config.replace(ensemble_scheduling=None), "{}")
    registry.watcher.tried("whole", older_one_serves=True)
    assert registry.watcher.override("whole") is None
    registry.served.clear()
    assert registry.watcher.action("whole", is_serving=True) is DependencyAction.WITHDRAW


def test_changes_are_reported_for_ensembles_of_the_model_and_once_a_second(registry: Registry) -> None:
    registry.serve()
    registry.load()
    registry.notify("other")
    assert registry.changes == []
    registry.notify("part")
    registry.each_second()
    assert registry.changes == ["whole", "whole"]
    registry.watcher.forget("whole")
    registry.notify("part")
    assert registry.changes == ["whole", "whole"]
    assert registry.watcher.action("whole", is_serving=True) is DependencyAction.KEEP


def test_only_valid_ensembles_are_read(registry: Registry, tmp_path: Path) -> None:
    assert registry.watcher.read(registry.found, "{") is None
    assert registry.watcher.read(registry.found, '{"name": "whole"}') is None
    registry.circle = "whole -> ... -> whole"
    assert registry.watcher.read(registry.found, None) is None

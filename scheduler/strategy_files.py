"""`StrategyFiles`: the files by which models have a say in their batches (`scheduler.batch_strategy`).

A model's file is what its parameter `TRITON_BATCH_STRATEGY_PATH` names (relative to the model's folder, and inside it, or
absolute), else `batchstrategy.py` in the folder of the version, else in that of the model. It is read from the scheduler's
own repository folders: code never travels over the bus.
"""

from __future__ import annotations

import logging
import runpy
from collections.abc import Sequence
from pathlib import Path

from repository.paths import check_model_name, path_inside
from repository.problem import ConfigProblem
from runtime.containment import contained
from scheduler.batch_strategy import GuardedStrategy
from schemas.errors import WeirError
from schemas.model_config import ModelConfig
from schemas.model_identity import namespace_of, plain_name

logger = logging.getLogger("weir.scheduler")

STRATEGY_FILE = "batchstrategy.py"
PATH_PARAMETER = "TRITON_BATCH_STRATEGY_PATH"
CLASS = "BatchStrategy"

_FIELD = f"parameters['{PATH_PARAMETER}']"

_Identity = tuple[Path, int, ModelConfig]


class StrategyFiles:
    """See the module. `repositories` are the folders of models; without any no model has a strategy."""

    def __init__(self, repositories: Sequence[Path] = ()) -> None:
        self._repositories = list(repositories)
        self._read: dict[tuple[str, int], tuple[_Identity, GuardedStrategy | None]] = {}
        self._missing: dict[tuple[str, int], str] = {}  # what was said of a file that is not there: once is enough

    @contained()
    def find(self, name: str, version: int, config: ModelConfig) -> GuardedStrategy | None:
        """The strategy of a version; the same object as before where its file and configuration are the same.

        None where it has none, or none that can be used, which the log says.
        """
        if config.dynamic_batching is None:
            return None  # nothing is put together; sequences have rules of their own
        try:
            path = self._path(name, version, config)
            identity = None if path is None else (path, path.stat().st_mtime_ns, config)
        except (WeirError, OSError) as error:
            self._warn(name, version, str(error))
            return None
        self._missing.pop((name, version), None)
        if path is None or identity is None:
            self._read.pop((name, version), None)
            return None
        known = self._read.get((name, version))
        if known is not None and known[0] == identity:
            return known[1]
        strategy = _load(path, config)
        self._read[name, version] = identity, strategy
        return strategy

    def _path(self, name: str, version: int, config: ModelConfig) -> Path | None:
        """The file of a version, which is there; None where it has none. Raises ConfigProblem for one that can't be."""
        parameter = config.parameters.get(PATH_PARAMETER)
        named = "" if parameter is None else parameter.string_value
        namespace, name = namespace_of(name), plain_name(name)
        check_model_name(name)  # it came over the bus
        repositories = [folder for folder in self._repositories if namespace in ("", str(folder))]
        folders = [folder / name for folder in repositories if (folder / name).is_dir()]
        if not named:
            candidates = [path for folder in folders for path in (folder / str(version), folder)]
            return next((path / STRATEGY_FILE for path in candidates if (path / STRATEGY_FILE).is_file()), None)
        if not named.endswith(".py"):
            raise ConfigProblem(_FIELD, f"'{named}' is not a Python file")
        absolute = Path(named).is_absolute()
        paths = [Path(named)] if absolute else [path_inside(folder, named, _FIELD) for folder in folders]
        for path in paths:
            if path.is_file():
                return path
        raise ConfigProblem(_FIELD, f"there is no file '{named}' where this scheduler looks")

    def _warn(self, name: str, version: int, problem: str) -> None:
        if self._missing.get((name, version)) != problem:
            self._missing[name, version] = problem
            logger.warning("model %s, version %d: batches are formed by the ordinary rule: %s", name, version, problem)


def _load(path: Path, config: ModelConfig) -> GuardedStrategy | None:
    try:
        # Not imported: other models have files of the same name, and a changed file is to be read again.
        strategy = runpy.run_path(str(path), run_name="weir_batch_strategy")[CLASS]
        if not callable(strategy):
            raise TypeError(f"{CLASS} is not a class")
        return GuardedStrategy(strategy(config.model_dump(mode="json")), str(path))
    except (Exception, SystemExit):
        logger.exception("%s can't be used: batches are formed by the ordinary rule", path)
        return None

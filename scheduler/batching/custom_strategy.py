"""Custom batching: `GuardedStrategy` applies a model's own batching rule, `StrategyFiles` finds and loads it.

The rule is a Python file, `batchstrategy.py`, with a class `BatchStrategy`:

    class BatchStrategy:
        def __init__(self, config):              # the model's configuration as a dictionary; called once for each load
            ...
        def begin(self):                         # a new batch is being formed; returns any state to keep about it
            return {"bytes": 0}
        def include(self, request, batch):       # may this request join? also called for the first one, which always may
            batch["bytes"] += request.size_bytes
            return batch["bytes"] <= 100_000

Source: Triton's custom batching (`TRITONBACKEND_ModelBatcherInitialize`, `ModelBatchInitialize` and
`ModelBatchIncludeRequest`; Python makes the two finalizers unnecessary). The rule can only end a batch earlier: the
maximum size, the shapes and the delay apply as without it. It runs in the scheduler's event loop and blocks it.

A model's file is the one that its parameter `TRITON_BATCH_STRATEGY_PATH` names (absolute, or inside the model's
folder), else `batchstrategy.py` in the folder of the version, else in that of the model. It is read from the
scheduler's own repository folders: code never travels over the bus.
"""

from __future__ import annotations

import logging
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weir.repository.paths import check_model_name, path_inside
from weir.repository.problems import ConfigProblem
from weir.scheduler.batching.request import QueuedRequest
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.core.names import namespace_of, plain_name

_logger = logging.getLogger("weir.scheduler")


class RequestFacts(NamedTuple):
    """What a strategy sees of a request; it does not see the tensors.

    `batch_size` is the batch size of the request, `size_bytes` the size of its message (large tensors are not in it),
    `priority` is unchecked, `correlation_id` is 0 without a sequence, `deadline_ms` is unix time or 0.
    """

    batch_size: int
    size_bytes: int
    priority: int
    timeout_us: int
    deadline_ms: int
    correlation_id: int | str


class GuardedStrategy:
    """Calls a model's strategy and disables it when it raises; the failure is logged.

    `strategy` is an object of the model's class `BatchStrategy`, `name` is its name in the log.
    """

    __slots__ = ("_is_on", "_name", "_strategy")

    def __init__(self, strategy: Any, name: str) -> None:
        self._strategy = strategy
        self._name = name
        self._is_on = True

    def begin(self, first: QueuedRequest) -> Any:
        """Starts a batch with this request; returns what the strategy keeps about the batch."""
        batch: Any = None
        if self._is_on:
            try:
                batch = self._strategy.begin()
                self._strategy.include(_facts(first), batch)
            except (Exception, SystemExit):  # noqa: BLE001 - a model's own code, which may raise anything
                self._disable()
        return batch

    def includes(self, request: QueuedRequest, batch: Any) -> bool:
        """Whether this request may join `batch`, as `begin` returned it."""
        if self._is_on:
            try:
                return bool(self._strategy.include(_facts(request), batch))
            except (Exception, SystemExit):  # noqa: BLE001 - see `begin`
                self._disable()
        return True

    def _disable(self) -> None:
        self._is_on = False
        _logger.exception("%s raised an exception: batches are formed by the default rule from now on", self._name)


def _facts(request: QueuedRequest) -> RequestFacts:
    terms = request.terms
    return RequestFacts(
        request.batch_size,
        len(request.body),
        terms.priority,
        terms.timeout_us,
        terms.deadline_ms,
        terms.correlation_id,
    )


STRATEGY_FILE = "batchstrategy.py"
PATH_PARAMETER = "TRITON_BATCH_STRATEGY_PATH"
CLASS = "BatchStrategy"

_FIELD = f"parameters['{PATH_PARAMETER}']"

_Identity = tuple[Path, int, ModelConfig]


class StrategyFiles:
    """Finds the strategies of models in `repositories`, folders of models; without any, no model has a strategy."""

    def __init__(self, repositories: Sequence[Path] = ()) -> None:
        self._repositories = list(repositories)
        self._cache: dict[tuple[str, int], tuple[_Identity, GuardedStrategy | None]] = {}
        self._logged_problems: dict[tuple[str, int], str] = {}  # last logged problem of each version, to log it once

    def find(self, name: str, version: int, config: ModelConfig) -> GuardedStrategy | None:
        """Returns the strategy of a version; the same object as before while its file and configuration are the same.

        None if the version has none, or one that can not be used, which is logged.
        """
        if config.dynamic_batching is None:
            return None  # batches are not combined; sequences have their own rules
        try:
            path = self._path(name, version, config)
            identity = None if path is None else (path, path.stat().st_mtime_ns, config)
        except (WeirError, OSError, ValueError) as error:  # ValueError: a name with a null character
            self._warn(name, version, error.message if isinstance(error, WeirError) else str(error))
            return None
        self._logged_problems.pop((name, version), None)
        if path is None or identity is None:
            self._cache.pop((name, version), None)
            return None
        cached = self._cache.get((name, version))
        if cached is not None and cached[0] == identity:
            return cached[1]
        strategy = _load(path, config)
        self._cache[name, version] = identity, strategy
        return strategy

    def _path(self, name: str, version: int, config: ModelConfig) -> Path | None:
        """Returns the strategy file of a version, or None. Raises ConfigProblem if the configured file can not be used."""
        parameter = config.parameters.get(PATH_PARAMETER)
        named = "" if parameter is None else parameter.string_value
        namespace, name = namespace_of(name), plain_name(name)
        check_model_name(name)  # the name came over the bus
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
        raise ConfigProblem(_FIELD, f"file '{named}' was not found in this scheduler's model repositories")

    def _warn(self, name: str, version: int, problem: str) -> None:
        if self._logged_problems.get((name, version)) != problem:
            self._logged_problems[name, version] = problem
            _logger.warning(
                "model %s, version %d: batch strategy not used, the default rule applies: %s",
                name,
                version,
                problem,
            )


def _load(path: Path, config: ModelConfig) -> GuardedStrategy | None:
    try:
        # Not imported: other models have files of the same name, and a changed file must be read again.
        strategy = runpy.run_path(str(path), run_name="weir_batch_strategy")[CLASS]
        if not callable(strategy):
            raise TypeError(f"{CLASS} is not a class")
        return GuardedStrategy(strategy(config.model_dump(mode="json")), str(path))
    except (Exception, SystemExit):
        _logger.exception("%s can not be loaded: batches are formed by the default rule", path)
        return None

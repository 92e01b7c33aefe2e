"""`ModelLoader`: from a repository's folders to loaded versions.

One broken model never keeps others from loading: what went wrong becomes the `reason` of its record.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from repository.completion import DescribedModel
from repository.layout import FoundModel, ModelRepository, select_versions
from repository.loading import read_config, settle_config
from repository.paths import read_labels
from schemas.errors import ErrorCode, WeirError, invalid
from schemas.model_config import ModelConfig
from schemas.registry import ModelState, VersionRecord
from telemetry.metrics_config import MetricsConfig
from worker.backend import Backend, ModelVersion
from worker.batch_execution import FinishedBatch
from worker.client_memory import ClientMemoryAccess
from worker.config_support import check_supported
from worker.served_version import ServedVersion

logger = logging.getLogger("weir.worker")

BACKENDS = {
    "onnxruntime": "worker.backends.onnxruntime:OnnxRuntimeBackend",
    "python": "worker.backends.python:PythonBackend",
}
"""Backend by its name in `config.pbtxt`; imported when a model first needs it."""


@dataclass(slots=True)
class LoadedResult:
    """What came of loading a model: its configuration if it has one, and each version, loaded or not.

    `labels` are the label files of its outputs, by output.
    """

    name: str
    config: ModelConfig | None = None
    labels: dict[str, list[str]] = field(default_factory=dict)
    served: dict[int, ServedVersion] = field(default_factory=dict)
    records: dict[int, VersionRecord] = field(default_factory=dict)
    reason: str = ""


class ModelLoader:
    """Loads models of one repository; `arena_prefix` is unique to the worker. Blocking: called off the event loop.

    `metrics` says what is observed of the models beyond what is always counted.
    """

    def __init__(
        self,
        repository: ModelRepository,
        auto_complete: bool,
        arena_prefix: str,
        on_finished: Callable[[FinishedBatch], None],
        metrics: MetricsConfig | None = None,
        client_memory: ClientMemoryAccess = ClientMemoryAccess(),  # noqa: B008 - immutable
    ) -> None:
        self._metrics = metrics or MetricsConfig()
        self._repository = repository
        self._auto_complete = auto_complete
        self._arena_prefix = arena_prefix
        self._on_finished = on_finished
        self._client_memory = client_memory
        self._loads = 0

    def scan(self) -> dict[str, FoundModel]:
        """The models that are there."""
        return self._repository.scan()

    def load(self, found: FoundModel) -> LoadedResult:
        """Loads every version that the model's version policy asks for."""
        result = LoadedResult(found.name)
        try:
            backend, result.config, versions = self._configure(found)
            result.labels = read_output_labels(found, result.config)
        except Exception as error:  # noqa: BLE001 - a backend may fail in any way, and the others must load
            result.reason = _reason(error)
            logger.error("failed to load '%s': %s", found.name, result.reason)
            return result
        for number in versions:
            self._load_version(result, backend, found, number)
        return result

    def _configure(self, found: FoundModel) -> tuple[Backend, ModelConfig, list[int]]:
        source = read_config(found)
        backend = backend_for(source.config)
        described: DescribedModel | ModelConfig | None = None
        if self._auto_complete and found.versions:
            first = select_versions(source.config, found.versions)[0]
            described = backend.describe(ModelVersion(found.name, first, found.path, source.config))
        if isinstance(described, ModelConfig):
            source, described = replace(source, config=described), None
        config = settle_config(source, described, gpu_ids=())
        check_supported(config)
        return backend, config, select_versions(config, found.versions)

    def _load_version(self, result: LoadedResult, backend: Backend, found: FoundModel, number: int) -> None:
        config = cast(ModelConfig, result.config)
        logger.info("loading: %s:%d", found.name, number)
        self._loads += 1
        try:
            served = ServedVersion(
                backend,
                ModelVersion(found.name, number, found.path, config),
                f"{self._arena_prefix}_{self._loads}",
                self._on_finished,
                self._metrics,
                self._client_memory,
            )
        except Exception as error:  # noqa: BLE001 - as above
            reason = _reason(error)
            logger.error("failed to load '%s' version %d: %s", found.name, number, reason)
            result.records[number] = VersionRecord(ModelState.UNAVAILABLE, reason)
            return
        result.served[number] = served
        result.records[number] = served.record
        logger.info("successfully loaded '%s' version %d", found.name, number)


def backend_for(config: ModelConfig) -> Backend:
    """The backend that `config` names. Raises WeirError when there is none of that name, or it can't run here."""
    target = BACKENDS.get(config.backend)
    if target is None:
        raise invalid(f"unable to find backend '{config.backend or config.platform}' for model '{config.name}'")
    module, _, name = target.partition(":")
    try:
        return cast(Backend, getattr(importlib.import_module(module), name)())
    except ImportError as error:
        raise WeirError(ErrorCode.UNAVAILABLE, f"backend '{config.backend}' can't run here: {error}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, WeirError):
        return f"{error.code.name}: {error.message}"
    logger.error("a load failed in an unexpected way", exc_info=error)
    return f"{ErrorCode.INTERNAL.name}: {type(error).__name__}: {error}"


def read_output_labels(found: FoundModel, config: ModelConfig) -> dict[str, list[str]]:
    """The labels of each output that has a `label_filename`. Raises WeirError for a file that can't be read."""
    return {o.name: read_labels(found.path, o.label_filename) for o in config.output if o.label_filename}

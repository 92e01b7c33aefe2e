"""`ModelLoader`: from a repository's folders to loaded versions.

One broken model never keeps others from loading: what went wrong becomes the `reason` of its record.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import cast

from repository.completion import DescribedModel
from repository.config_text import located
from repository.fingerprint import Files, Fingerprint, fingerprint
from repository.layout import CONFIG_FILE, FoundModel, ModelRepository, RepositorySnapshot, select_versions
from repository.loading import ConfigSource, read_config, settle_config
from repository.paths import read_labels
from repository.problem import ConfigProblem
from schemas.errors import ErrorCode, WeirError, internal, invalid
from schemas.model_config import ModelConfig
from schemas.registry import UNLOADED, ModelState, VersionRecord
from worker.backend import ModelVersion, VersionLoader
from worker.backend_registry import BackendRegistry
from worker.config_support import check_supported
from worker.ensembles.backend import EnsembleBackend, UnfitEnsemble
from worker.instance_plan import MeantForOthers, check_devices, check_partitions, is_for_others
from worker.isolation.choice import placed
from worker.model_environment import ModelEnvironment
from worker.served_version import Load, ServedVersion
from worker.version_health import VersionHealth

logger = logging.getLogger("weir.worker")


@dataclass(slots=True)
class LoadedResult:
    """What came of loading a model: its configuration if it has one, and each version, loaded or not.

    `labels` are the label files of its outputs, by output. `reason` tells why there is no version at all. `error` is the
    answer to the request to load it, in Triton's words; None when it is loaded. Versions are loaded all or none. `name` is
    the model's identity, `namespace` the one it lies in. With `elsewhere` it failed because all of its instances are meant
    for devices that this worker does not have.
    """

    name: str
    namespace: str = ""
    config: ModelConfig | None = None
    labels: dict[str, list[str]] = field(default_factory=dict)
    served: dict[int, ServedVersion] = field(default_factory=dict)
    records: dict[int, VersionRecord] = field(default_factory=dict)
    reason: str = ""
    error: WeirError | None = None
    fingerprint: Fingerprint | None = None
    elsewhere: bool = False


class ModelLoader:
    """Loads models of one repository. Blocking: called off the event loop.

    A version that fails to load is tried `retries` times more. With `auto_complete` configurations are completed from
    what the models themselves tell. `backends` run them, by default those that are part of Weir.
    """

    def __init__(
        self,
        repository: ModelRepository,
        environment: ModelEnvironment,
        auto_complete: bool = True,
        retries: int = 0,
        backends: BackendRegistry | None = None,
    ) -> None:
        self.repository = repository
        self._environment = environment
        self._auto_complete = auto_complete
        self._retries = retries
        self._backends = backends or BackendRegistry()
        self._loads = count(1)

    def look(self) -> RepositorySnapshot:
        """The models that are there."""
        return self.repository.look()

    def load(self, found: FoundModel, override: str | None = None, serving: LoadedResult | None = None) -> LoadedResult:
        """Loads every version that the model's version policy asks for, with the configuration `override` if given.

        `serving` is what is loaded of the model already: its versions that are the same on disk are taken over, or updated
        in place where only the instances are others (`ServedVersion.take_over` completes that).
        """
        name = found.identity
        result = LoadedResult(name, found.namespace, fingerprint=fingerprint(found))
        try:
            source = read_config(found, override)
        except WeirError as error:
            result.reason = _reason(error)
            result.error = poll_failure(name)
            logger.error("Poll failed for model directory '%s': %s", name, error.message)
            return result
        try:
            versions = select_versions(source.config, found.versions)
        except WeirError as error:
            result.reason = _reason(error)
            result.error = invalid(f"load failed for model '{name}': {error.message}\n")
            logger.error("failed to load model '%s': %s", name, error.message)
            return result
        for number in versions:
            logger.info("loading: %s:%d", name, number)
        try:
            backend, result.config = self._configure(found, source, versions[0])
            result.labels = read_output_labels(found, result.config)
            if isinstance(backend, EnsembleBackend):
                result.labels = backend.labels(result.config) | result.labels
        except UnfitEnsemble as problem:
            result.reason = _reason(problem)
            result.error = invalid(f"load failed for model '{name}': {problem.message}\n")
            logger.error("failed to load model '%s': %s", name, problem.message)
            return result
        except Exception as error:  # noqa: BLE001 - a backend may fail in any way, and the others must load
            reason = _reason(error)
            result.records = {number: VersionRecord(ModelState.UNAVAILABLE, reason) for number in versions}
            devices = self._environment.devices
            result.elsewhere = isinstance(error, MeantForOthers) or is_for_others(source.config, devices)
        else:
            for number in versions:
                self._load_version(result, backend, found, number, serving)
        self._conclude(result, serving)
        return result

    def _configure(
        self, found: FoundModel, source: ConfigSource, first_version: int
    ) -> tuple[VersionLoader, ModelConfig]:
        ensembles = self._environment.ensembles
        if source.config.ensemble_scheduling is not None and ensembles is not None:
            config = settle_config(source, None, self._environment.devices.host_gpus)
            check_supported(config)
            return ensembles, ensembles.settle(config, found)
        written, backends = source.config, self._backends
        try:
            backend = backends.of(written, found.path, first_version)
        except ConfigProblem as problem:
            raise located(problem, source.file, source.text) from problem
        kind = backends.kind_of(backend, written)
        described: DescribedModel | ModelConfig | None = None
        if self._auto_complete:
            settings = backends.settings_of(written.backend, kind)
            model = ModelVersion(found.name, first_version, found.path, written, settings=settings)
            described = placed(backend, model).describe(model)
        if isinstance(described, ModelConfig):
            source, described = replace(source, config=described), None
        default_max_batch_size = backends.default_max_batch_size(written.backend, kind)
        config = settle_config(source, described, self._environment.devices.host_gpus, default_max_batch_size)
        check_supported(config, kind)
        check_devices(config, self._environment.devices)
        check_partitions(config, self._environment.devices)
        return backend, config

    def _load_version(
        self,
        result: LoadedResult,
        backend: VersionLoader,
        found: FoundModel,
        number: int,
        serving: LoadedResult | None,
    ) -> None:
        config = cast(ModelConfig, result.config)
        before = None
        if serving is not None and _has_same_files(serving, result, number):
            before = serving.served[number]
        if before is not None and before.model.config == config:
            served = before
        else:
            settings = self._backends.settings_of(config.backend, self._backends.kind_of(backend, config))
            health = VersionHealth(partial(self._environment.on_health_change, found.identity))
            calls = self._environment.process_calls
            model = ModelVersion(found.name, number, found.path, config, calls, settings, health)
            if before is not None and not _differ_in_instances_alone(before.model.config, config):
                before = None
            if before is not None:  # instances that stay tell it where they told it before
                model = replace(model, health=before.model.health)
            try:
                served = self._try_to_load(backend, model, _load_mark(result, number), before)
            except Exception as error:  # noqa: BLE001 - as above
                result.records[number] = VersionRecord(ModelState.UNAVAILABLE, _reason(error))
                return
        result.served[number] = served
        result.records[number] = served.record

    def _try_to_load(
        self, backend: VersionLoader, model: ModelVersion, load_mark: str, before: ServedVersion | None
    ) -> ServedVersion:
        attempts = 0
        while True:
            load = Load(next(self._loads), load_mark)
            try:
                return ServedVersion(placed(backend, model), model, self._environment, load, before)
            except Exception as error:
                attempts += 1
                if attempts > self._retries:
                    raise
                logger.warning("loading '%s' version %d again: %s", model.name, model.version, _reason(error))

    def _conclude(self, result: LoadedResult, serving: LoadedResult | None) -> None:
        """Logs the outcome; where a version failed, those that did load are given up too."""
        failed = {number: row.reason for number, row in result.records.items() if number not in result.served}
        if not failed:
            logger.info("successfully loaded '%s'", result.name)
            return
        level = logging.INFO if result.elsewhere else logging.ERROR
        for number, reason in failed.items():
            logger.log(level, "failed to load '%s' version %d: %s", result.name, number, reason)
        logger.log(level, "failed to load '%s'", result.name)
        for number, served in result.served.items():
            if serving is None or serving.served.get(number) is not served:
                served.unload()
            result.records[number] = VersionRecord(ModelState.UNAVAILABLE, UNLOADED)
        result.served = {}
        told = "".join(f"version {number} is at UNAVAILABLE state: {reason};\n" for number, reason in failed.items())
        result.error = invalid(f"load failed for model '{result.name}': {told}")


def poll_failure(name: str) -> WeirError:
    """Triton's answer to the request to load a model whose folder or configuration can't be made sense of."""
    return internal(f"failed to load '{name}', failed to poll from model repository")


def _load_mark(result: LoadedResult, number: int) -> str:
    known = result.fingerprint is not None and result.config is not None
    return cast(Fingerprint, result.fingerprint).load_mark(number, cast(ModelConfig, result.config)) if known else ""


def _has_same_files(serving: LoadedResult, new: LoadedResult, number: int) -> bool:
    """Whether this version is loaded already, from these files."""
    before, now = serving.fingerprint, new.fingerprint
    return (
        number in serving.served
        and before is not None
        and now is not None
        and before.path == now.path
        and before.versions.get(number) == now.versions.get(number)
        and _besides_config(before.shared) == _besides_config(now.shared)
    )


def _differ_in_instances_alone(before: ModelConfig, now: ModelConfig) -> bool:
    return not now.is_ensemble and before.replace(instance_group=[]) == now.replace(instance_group=[])


def _besides_config(files: Files) -> Files:
    # What the configuration files say is compared by itself: a comment that was changed is none of a version's business.
    return tuple(row for row in files if row[0] != CONFIG_FILE and not row[0].startswith("configs/"))


def _reason(error: Exception) -> str:
    if isinstance(error, WeirError):
        return f"{error.code.title}: {error.message}"
    if isinstance(error, OSError) and error.strerror:  # its own text has the whole path
        file = f" '{Path(os.fsdecode(error.filename)).name}'" if isinstance(error.filename, (str, bytes)) else ""
        return f"{ErrorCode.INTERNAL.title}: failed to read{file}: {error.strerror}"
    logger.error("a load failed in an unexpected way", exc_info=error)
    return f"{ErrorCode.INTERNAL.title}: {type(error).__name__}: {error}"


def read_output_labels(found: FoundModel, config: ModelConfig) -> dict[str, list[str]]:
    """The labels of each output that has a `label_filename`. Raises WeirError for a file that can't be read."""
    return {o.name: read_labels(found.path, o.label_filename) for o in config.output if o.label_filename}

"""`ModelLoader`: loads the versions of a model from its repository folder.

A model that fails to load never affects others: the error becomes the `reason` of its record.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple, cast

from weir.repository.completion import DescribedModel, completed_fields
from weir.repository.config_text import located
from weir.repository.content_digests import ContentDigests
from weir.repository.layout import (
    CONFIG_FILE,
    Files,
    Fingerprint,
    FoundModel,
    ModelRepository,
    RepositorySnapshot,
    folder_fingerprint,
    poll_failure,
    select_versions,
)
from weir.repository.loading import ConfigSource, read_config, resolve_config
from weir.repository.paths import read_labels
from weir.repository.problems import ConfigProblem
from weir.schemas.config.model_config import InstanceGroup, ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, internal, invalid
from weir.schemas.wire.registry import UNLOADED, ModelState, VersionRecord
from weir.worker.backend_api.config_support import check_supported
from weir.worker.backend_api.interface import Backend, ModelVersion, VersionLoader
from weir.worker.backend_api.version_health import VersionHealth
from weir.worker.backends.isolation.backend import isolate_if_wanted
from weir.worker.backends.registry import BackendRegistry
from weir.worker.ensembles.backend import EnsembleBackend, InvalidEnsemble
from weir.worker.execution.instance import ModelEnvironment
from weir.worker.lifecycle.instance_plan import NotPlacedHere, check_devices, check_partitions, runs_elsewhere
from weir.worker.lifecycle.served_version import ServedVersion
from weir.worker.repository_agents.agents import AppliedAgents

logger = logging.getLogger("weir.worker")


@dataclass(slots=True)
class LoadResult:
    """The outcome of loading a model: its configuration, its loaded versions (`served`) and a record for each version.

    Either all versions are loaded, or none and `error` is the response to the load request, in Triton's words. `reason` is
    set if there is no record of any version. `completed` are the fields of the configuration that its author left out,
    `labels` are the labels of its outputs. `name` is the model's identity. With
    `elsewhere` it failed because all its instances are for devices that this worker does not have. `agents` are the
    repository agents to release once the versions are unloaded.
    """

    name: str
    namespace: str = ""
    config: ModelConfig | None = None
    completed: list[str] = field(default_factory=list)
    labels: dict[str, list[str]] = field(default_factory=dict)
    served: dict[int, ServedVersion] = field(default_factory=dict)
    records: dict[int, VersionRecord] = field(default_factory=dict)
    reason: str = ""
    error: WeirError | None = None
    fingerprint: Fingerprint | None = None
    elsewhere: bool = False
    agents: list[AppliedAgents] = field(default_factory=list)


class LoadPolicy(NamedTuple):
    """Whether configurations are completed from the models' files, how many times a failed version is retried, and the
    folder of repository agents.
    """

    auto_complete: bool = True
    retries: int = 0
    agents: Path | None = None


DEFAULT_POLICY = LoadPolicy()

_AUTO = InstanceGroup()
"""The instance group of a configuration without one."""


class ModelLoader:
    """Loads models of one repository. Blocking: called outside of the event loop.

    `backends` defaults to those that are part of Weir. Without `ensembles`, ensembles can't be loaded.
    """

    def __init__(
        self,
        repository: ModelRepository,
        environment: ModelEnvironment,
        backends: BackendRegistry | None = None,
        ensembles: EnsembleBackend | None = None,
        policy: LoadPolicy = DEFAULT_POLICY,
    ) -> None:
        self.repository = repository
        self._environment = environment
        self._policy = policy
        self._backends = backends or BackendRegistry()
        self._ensembles = ensembles
        self._loads = count(1)
        self._digests = ContentDigests()

    def look(self) -> RepositorySnapshot:
        """The models in the repositories now."""
        return self.repository.snapshot()

    def load(self, found: FoundModel, override: str | None = None, serving: LoadResult | None = None) -> LoadResult:
        """Loads every version that the model's version policy selects, with the configuration `override` if given.

        `serving` is the model as it is loaded already. Versions with the same files are reused, or updated if only their
        instance groups differ; `ServedVersion.take_over` completes that.
        """
        result = LoadResult(found.identity, found.namespace, fingerprint=folder_fingerprint(found))
        try:
            return self._load(result, found, override, serving)
        finally:
            if not result.served:
                release_agents(result.agents)

    def _load(
        self, result: LoadResult, found: FoundModel, override: str | None, serving: LoadResult | None
    ) -> LoadResult:
        name = result.name
        try:
            _check_files(result)
            source = self._read_config(found, override)
            moved = self._apply_agents(result, found, source.config)
            if moved is not None:
                found, source = moved, self._read_config(moved, override)
                serving = None  # its versions were loaded from another folder
        except WeirError as error:
            result.reason = _reason(error)
            result.error = poll_failure(name, error.message)
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
            result.completed = completed_fields(source.config, result.config)
            result.labels = read_output_labels(found, result.config)
            if isinstance(backend, EnsembleBackend):
                result.labels = backend.labels(result.config) | result.labels
        except InvalidEnsemble as problem:
            result.reason = _reason(problem)
            result.error = invalid(f"load failed for model '{name}': {problem.message}\n")
            logger.error("failed to load model '%s': %s", name, problem.message)
            return result
        except Exception as error:  # noqa: BLE001 - a backend may fail in any way, and other models must load
            reason = _reason(error)
            result.records = {number: VersionRecord(ModelState.UNAVAILABLE, reason) for number in versions}
            devices = self._environment.devices
            result.elsewhere = isinstance(error, NotPlacedHere) or runs_elsewhere(source.config, devices)
        else:
            for number in versions:
                self._load_version(result, backend, found, number, serving)
        self._conclude(result, serving)
        return result

    def _read_config(self, found: FoundModel, override: str | None) -> ConfigSource:
        """As `read_config`, but a model without a configuration is an error where none is completed (INTERNAL)."""
        source = read_config(found, override)
        if override is None and not found.config_file and not self._policy.auto_complete:
            raise internal(f"failed to open text file for read {found.name}/{CONFIG_FILE}: No such file or directory")
        return source

    def _apply_agents(self, result: LoadResult, found: FoundModel, config: ModelConfig) -> FoundModel | None:
        """Runs the repository agents. Returns the model in the folder where they have put it, None if they did not."""
        if config.model_repository_agents is None:
            return None
        agents = AppliedAgents(found.name, found.path, config, self._policy.agents)
        result.agents.append(agents)
        if agents.path == found.path:
            return None
        moved = self.repository.model_in(found.name, agents.path, found.is_registered)
        return replace(moved, namespace=found.namespace, is_ambiguous=found.is_ambiguous)

    def _configure(
        self, found: FoundModel, source: ConfigSource, first_version: int
    ) -> tuple[VersionLoader, ModelConfig]:
        ensembles = self._ensembles
        if source.config.ensemble_scheduling is not None and ensembles is not None:
            config = resolve_config(source, None, self._environment.devices.host_gpus)
            check_supported(config)
            return ensembles, ensembles.resolve(config, found)
        written, backends = source.config, self._backends
        try:
            backend = backends.of(written, found.path, first_version)
        except ConfigProblem as problem:
            raise located(problem, source.file, source.text) from problem
        kind = backends.kind_of(backend, written)
        described: DescribedModel | ModelConfig | None = None
        if self._policy.auto_complete:
            settings = backends.settings_of(written.backend, kind)
            gpus = self._environment.devices.own_gpus
            model = ModelVersion(found.name, first_version, found.path, written, settings=settings, own_gpus=gpus)
            described = isolate_if_wanted(backend, model).describe(model)
        if isinstance(described, ModelConfig):
            source, described = replace(source, config=described), None
        default_max_batch_size = backends.default_max_batch_size(written.backend, kind)
        config = resolve_config(
            source,
            described,
            self._environment.devices.host_gpus,
            default_max_batch_size,
            self._uses_gpus(backend, written),
        )
        check_supported(config, kind)
        check_devices(config, self._environment.devices)
        check_partitions(config, self._environment.devices)
        return backend, config

    def _uses_gpus(self, backend: Backend, config: ModelConfig) -> bool:
        """Whether instances of `backend` without a kind are placed on the host's GPUs: where it can run on them here."""
        devices = self._environment.devices
        if not devices.host_gpus or not any(group.kind == "KIND_AUTO" for group in config.instance_group or [_AUTO]):
            return True
        available = backend.availability(devices)
        if "KIND_GPU" in available.runs_on or "KIND_CPU" not in available.runs_on:
            return True  # a backend that runs nowhere states what it misses when it loads the model
        logger.info(
            "model '%s': its instances without a kind run on the CPU, because backend '%s' can't use this machine's GPUs%s",
            config.name,
            config.backend,
            f": {'; '.join(available.problems)}" if available.problems else "",
        )
        return False

    def _load_version(
        self,
        result: LoadResult,
        backend: VersionLoader,
        found: FoundModel,
        number: int,
        serving: LoadResult | None,
    ) -> None:
        config = cast(ModelConfig, result.config)
        before = None
        if serving is not None and _has_same_files(serving, result, number):
            before = serving.served[number]
        if before is not None and _of_one_version(before.model.config) == _of_one_version(config):
            served = before
        else:
            settings = self._backends.settings_of(config.backend, self._backends.kind_of(backend, config))
            health = VersionHealth(partial(self._environment.on_health_change, found.identity))
            calls = self._environment.process_calls
            gpus = self._environment.devices.own_gpus
            model = ModelVersion(found.name, number, found.path, config, calls, settings, health, gpus)
            if before is not None and not _differ_in_instances_alone(before.model.config, config):
                before = None
            if before is not None:  # instances that are taken over report to the health that they know
                model = replace(model, health=before.model.health)
            digest = None
            if result.fingerprint is not None:  # it is computed while the model loads
                digest = self._digests.start(result.fingerprint, number, config)
            try:
                served = self._try_to_load(backend, model, before)
            except Exception as error:  # noqa: BLE001 - as above
                result.records[number] = VersionRecord(ModelState.UNAVAILABLE, _reason(error))
                return
            served.digest = digest.result() if digest is not None else ""
        result.served[number] = served
        result.records[number] = served.record

    def _try_to_load(self, backend: VersionLoader, model: ModelVersion, before: ServedVersion | None) -> ServedVersion:
        attempts = 0
        while True:
            load = next(self._loads)
            try:
                return ServedVersion(isolate_if_wanted(backend, model), model, self._environment, load, before)
            except Exception as error:
                attempts += 1
                if attempts > self._policy.retries:
                    raise
                logger.warning("loading '%s' version %d again: %s", model.name, model.version, _reason(error))

    def _conclude(self, result: LoadResult, serving: LoadResult | None) -> None:
        """Logs the outcome; if a version failed, unloads those that were loaded."""
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
        reasons = "".join(f"version {number} is at UNAVAILABLE state: {reason};\n" for number, reason in failed.items())
        result.error = invalid(f"load failed for model '{result.name}': {reasons}")


def release_agents(agents: list[AppliedAgents]) -> None:
    """Releases repository agents and empties the list. Blocking."""
    while agents:
        agents.pop().release()


def _has_same_files(serving: LoadResult, new: LoadResult, number: int) -> bool:
    """Whether this version is loaded already, from the same files."""
    before, now = serving.fingerprint, new.fingerprint
    return (
        number in serving.served
        and before is not None
        and now is not None
        and before.path == now.path
        and before.versions.get(number) == now.versions.get(number)
        and _besides_config(before.shared) == _besides_config(now.shared)
    )


def _of_one_version(config: ModelConfig) -> ModelConfig:
    """The configuration without what selects versions: as in Triton, another version policy reloads no version."""
    return config.replace(version_policy=None)


def _differ_in_instances_alone(before: ModelConfig, now: ModelConfig) -> bool:
    before, now = _of_one_version(before), _of_one_version(now)
    return not now.is_ensemble and before.replace(instance_group=[]) == now.replace(instance_group=[])


def _besides_config(files: Files) -> Files:
    # Configurations are compared by their content: a changed comment does not reload a version.
    return tuple(row for row in files if row[0] != CONFIG_FILE and not row[0].startswith("configs/"))


def _reason(error: Exception) -> str:
    if isinstance(error, WeirError):
        return f"{error.code.title}: {error.message}"
    if isinstance(error, OSError) and error.strerror:  # its text has the full path
        file = f" '{Path(os.fsdecode(error.filename)).name}'" if isinstance(error.filename, (str, bytes)) else ""
        return f"{ErrorCode.INTERNAL.title}: failed to read{file}: {error.strerror}"
    logger.error("a load failed with an unexpected exception", exc_info=error)
    return f"{ErrorCode.INTERNAL.title}: {type(error).__name__}: {error}"


def read_output_labels(found: FoundModel, config: ModelConfig) -> dict[str, list[str]]:
    """The labels of each output that has a `label_filename`. Raises WeirError for a file that can't be read."""
    return {o.name: read_labels(found.path, o.label_filename) for o in config.output if o.label_filename}


def _check_files(result: LoadResult) -> None:
    """Raises WeirError (INVALID_ARG) for a model of too many files."""
    if result.fingerprint is not None:
        result.fingerprint.check_count(result.name)

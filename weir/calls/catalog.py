"""`Catalog`: the models of the cluster and the versions that requests are accepted for, from the registry.

Requests for a model that has lost its last worker are still accepted for a while, since a worker that was killed or is
replaced is back within seconds, and the requests wait in the queue meanwhile. The model is not ready all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from weir.bus.kv.known_models import KnownModels
from weir.bus.kv.registry import RegistryView
from weir.bus.kv.traffic import TrafficRecords
from weir.bus.naming.identity import shares_memory
from weir.calls.queues import destination_of
from weir.calls.request_templates import RequestTemplates
from weir.calls.traffic.counters import TrafficCounters
from weir.calls.traffic.split import TrafficSplit
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import ParameterError
from weir.schemas.config.traffic import TrafficRule, rule_of
from weir.schemas.core.errors import Reason, WeirError, invalid, not_found, overloaded, unavailable, unknown_model
from weir.schemas.core.names import namespace_of, plain_name
from weir.schemas.kserve.normalizer import RequestNormalizer
from weir.schemas.wire.registry import UNLOADED, ModelRecord, ModelState, VersionRecord, WorkerRecord
from weir.schemas.wire.traffic import TrafficRecord

_MAX_VERSION = 2**63 - 1
_MAX_VERSION_DIGITS = 19

_SHOWN_REASON = 300
"""Characters of the reason for which a model failed that an error about it has."""

RECOVERY_GRACE_S = 30.0
"""How long requests for a model that has lost its last worker are still accepted."""

WARMUP_TIMEOUT_S = 30.0
"""How long workers that are still loading delay the end of the warm-up."""


class RegistryWarmup:
    """Whether this gateway's view of the registry is complete. Until it is, an unknown model is answered with 503, not
    404.

    The broker and gateways may be back before workers are, and those load their models for a while. The warm-up ends
    once at least one worker is registered and every registered worker has finished loading, or after
    `WARMUP_TIMEOUT_S`. Sans-IO.
    """

    def __init__(self) -> None:
        self._started_s: float | None = None
        self._is_over = False

    def is_over(self, now_s: float, workers: Iterable[WorkerRecord], is_any_known: bool) -> bool:
        """Whether the warm-up has ended. `is_any_known`: there are known models without a worker.

        Without known models, it does not end before a worker has settled.
        """
        active = [record for record in workers if not record.draining]
        if not is_any_known and not any(record.settled for record in active):
            return False
        if self._started_s is None:
            self._started_s = now_s
        is_late = now_s - self._started_s >= WARMUP_TIMEOUT_S
        self._is_over = self._is_over or is_late or all(record.settled for record in active)
        return self._is_over


class ServedModel:
    """One model with its configuration and its READY versions, ascending.

    `name` is its identity (`weir.schemas.core.names.model_identity`), `namespace` that of its repository, "" without
    namespacing. `loads` are digests of what its workers have loaded, by version: they change with each reload, and are
    "" where they are unknown. `queue` is the destination of requests that belong to no sequence. `split` chooses the
    version of requests that name none; without one, they run on the latest. `completed` are the fields of the
    configuration that its author left out.
    """

    def __init__(  # noqa: PLR0913 - the parts of a model, each of which the catalog computes by itself
        self,
        name: str,
        config: ModelConfig,
        versions: list[int],
        labels: dict[str, list[str]],
        loads: Mapping[int, str] | None = None,
        namespace: str = "",
        completed: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.completed = completed
        self.namespace = namespace
        self.config = config
        self.versions = versions
        self.labels = labels
        self.loads: Mapping[int, str] = loads or {}
        self.caches = config.caches_responses
        self.normalizer = RequestNormalizer(config)
        self.version_texts = frozenset(["", *map(str, versions)])
        self.templates = RequestTemplates()
        self.queue = destination_of(name, config)
        self.preserves_ordering = config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering
        self.split: TrafficSplit | None = None

    @property
    def latest(self) -> str:
        """The version that runs requests without a version."""
        return str(self.versions[-1])

    def digest(self, version: str) -> str:
        """A digest of what the workers have loaded as this version; "" where it is unknown, or differs between workers."""
        loads = self.loads.get(int(version), "") if version else ""
        found = {load.partition(":")[2] for load in loads.split()}
        return found.pop() if len(found) == 1 else ""

    @property
    def sticky_header(self) -> str:
        """The header whose value keeps a caller on one version, in lower case; "" without one."""
        return "" if self.split is None else self.split.rule.header

    @cached_property
    def config_message(self) -> Any:
        """The configuration as Triton's protobuf message."""
        from weir.repository.config_text import config_to_message

        return config_to_message(self.config)


class Catalog:
    """The models of the registry. With `is_strict`, the server is ready only when all of them are.

    With `tells_reasons`, errors about models that failed to load have the reason. Set it only where every client may read
    the repository index, which has it too.
    """

    def __init__(
        self,
        registry: RegistryView,
        strict_readiness: bool,
        clock: Callable[[], float] = time.monotonic,
        tells_reasons: bool = False,
    ) -> None:
        self._registry = registry
        self.tells_reasons = tells_reasons
        self.is_strict = strict_readiness
        self._clock = clock
        self._served: dict[str, ServedModel] = {}
        self._namesakes: dict[str, set[str]] = {}  # identities with a namespace, by plain name
        self._accept_until_s: dict[str, float] = {}  # models without a live worker, still accepted
        self._known: KnownModels | None = None
        self._away: set[str] = set()  # known models without a live worker, which are accepted
        self._is_unwanted: Callable[[str], bool] = lambda _name: False
        self._warmup: RegistryWarmup | None = None
        self._traffic: TrafficRecords | None = None
        self._traffic_counters = TrafficCounters()
        self._sticky_by_model: dict[str, str] = {}
        self.sticky_headers: frozenset[str] = frozenset()
        """The headers, in lower case, whose values keep callers of some model on one version."""
        registry.on_model_change(self._refresh)

    def set_unwanted_check(self, is_unwanted: Callable[[str], bool]) -> None:
        """Rejects requests for a model that has lost its last worker at once if `is_unwanted(name)`: it was unloaded."""
        self._is_unwanted = is_unwanted

    def accept_known(self, known: KnownModels) -> None:
        """Accepts requests for models in `known` even while no worker serves them."""
        self._known = known
        known.on_change(self._refresh)

    def follow_traffic(self, records: TrafficRecords, counters: TrafficCounters) -> None:
        """Splits requests that name no version by `records` and by the configurations of models, and counts them."""
        self._traffic = records
        self._traffic_counters = counters
        records.on_change(self._apply_traffic)

    def traffic_rule(self, served: ServedModel) -> tuple[TrafficRule | None, bool]:
        """(the rule that applies to the model, whether an operator has set it rather than its configuration)."""
        record = None if self._traffic is None else self._traffic.get(served.name)
        return rule_with(record, served), record is not None and bool(record.weights)

    def start_warmup(self) -> None:
        """Starts the warm-up: until it ends, an unknown model is answered with 503. Called once the registry has been
        read.
        """
        self._warmup = RegistryWarmup()

    def warmup_error(self, name: str) -> WeirError | None:
        """The error (UNAVAILABLE) for a model that is unknown during the warm-up; None after it."""
        if self._is_complete():
            return None
        return overloaded(
            f"Request for unknown model: '{name}' is not found yet, the server is not ready", reason=Reason.NOT_READY
        )

    def resolve(self, name: str, version: str) -> ServedModel:
        """The model, if requests for this version of it ("" for the latest) are accepted.

        Raises WeirError with Triton's texts: NOT_FOUND, UNAVAILABLE for a version that exists but is not ready, or
        INVALID_ARG for a name that models in several namespaces have; and `warmup_error`.
        """
        served = self._served.get(name)
        is_accepted = not self._accept_until_s or self._is_accepted(name)
        if served is not None and version in served.version_texts and is_accepted:
            return served
        only = self._only_one_called(name)
        if only is not None and version in only.version_texts:
            return only
        check_version(version)
        if version and version != str(int(version)):
            return self.resolve(name, str(int(version)))  # Triton accepts any spelling of the number
        raise self._error(name, version)

    def latest_version(self, name: str) -> int:
        """The version that serves requests which name none; 0 for an unknown model, and where a split chooses it."""
        served = self._served.get(name) or self._only_one_called(name)
        return 0 if served is None or served.split is not None else served.versions[-1]

    def is_ready(self, name: str, version: str) -> bool:
        """Whether a live worker serves this version and can run it now; False for an unknown one.

        A model's own readiness check is not part of it (`weir.calls.readiness`). Raises WeirError (INVALID_ARG) for an
        invalid version.
        """
        check_version(version)
        served = self._served.get(name) or self._only_one_called(name)
        if served is None or version not in served.version_texts or served.name in self._accept_until_s:
            return False
        return any(row.can_run for _, row in self.ready_replicas(served.name, int(version or served.latest)))

    def ready_replicas(self, identity: str, version: int) -> list[tuple[str, VersionRecord]]:
        """(worker, its record of the version) for each live worker on which the version is READY."""
        return [
            (worker, row)
            for worker, view in self._registry.workers.items()
            if not view.record.draining
            and (record := view.models.get(identity)) is not None
            and (row := record.versions.get(version)) is not None
            and row.state == ModelState.READY
        ]

    def workers_of(self, identity: str) -> set[str]:
        """The live workers that serve any version of the model."""
        served = self._served.get(identity)
        return {
            worker
            for version in (served.versions if served else ())
            for worker, _ in self.ready_replicas(identity, version)
        }

    def server_ready(self) -> bool:
        """Whether any worker has settled, and any could read all its model repositories at least once.

        With strict readiness, also whether every model has a READY version that can run and every repository can be read.

        Known models without a worker do not count: requests for them are accepted, and start a worker.
        """
        workers = [view.record for view in self._registry.workers.values() if not view.record.draining]
        if not self._away and not any(record.settled for record in workers):
            return False
        if not self._is_complete() or (workers and all(record.never_read for record in workers)):
            return False
        if self.is_strict and any(record.unreadable for record in workers):
            return False
        return not self.is_strict or all(map(self._is_fully_ready, self.names()))

    def _is_fully_ready(self, name: str) -> bool:
        """Whether every version is READY and can run, except those that were unloaded on request, and models that a
        client tried to load and that couldn't be read.
        """
        if name in self._away:
            return True
        versions: dict[int, bool] = {}
        records = self._records(name)
        if records and all(record.is_unread for record in records):
            return True
        for record in records:
            for number, version in record.versions.items():
                is_fine = version.can_run or version.reason == UNLOADED
                versions[number] = versions.get(number, False) or is_fine
        return bool(versions) and all(versions.values()) and name not in self._accept_until_s

    def names(self) -> list[str]:
        """Every model of the registry, served or not, and models that have lost their workers but are still accepted."""
        for name in list(self._accept_until_s):
            self._is_accepted(name)
        records = [record for view in self._registry.workers.values() for record in view.models.values()]
        known = {record.name for record in records if record.is_known}
        return sorted(known | self._served.keys())

    def knows(self, name: str) -> bool:
        """Whether a worker has a model of this identity, served or not, or requests for it are still accepted."""
        return self.served_model(name) is not None or any(record.is_known for record in self._records(name))

    def is_wanted(self, name: str) -> bool:
        """As `knows`, but not for a model that was unloaded everywhere: its name is free for another namespace's."""
        return self.served_model(name) is not None or any(record.is_present for record in self._records(name))

    def served_model(self, name: str) -> ServedModel | None:
        """The model, if requests for it are accepted."""
        return self._served.get(name) if self._is_accepted(name) else None

    def served(self) -> list[ServedModel]:
        """The models that requests are accepted for, by name."""
        return [served for name in sorted(self._served) if (served := self.served_model(name))]

    def load_duration_s(self, name: str, version: int) -> float:
        """How long the version took to load, on the worker where that took longest."""
        records = (record.versions.get(version) for record in self._records(name))
        return max((record.load_duration_s for record in records if record is not None), default=0.0)

    def index(self) -> list[dict[str, Any]]:
        """One row for each model: name, READY versions, state, and the reason why it is not READY."""
        rows: list[dict[str, Any]] = []
        for name in self.names():
            records = self._records(name)
            versions = _ready_versions(records)
            reasons = [r.reason for r in records] + [v.reason for r in records for v in r.versions.values()]
            # Where one version of several fails, the others are unloaded: the failure explains the model's state.
            reasons.sort(key=lambda reason: reason == UNLOADED)
            state = ModelState.READY if versions else ModelState.UNAVAILABLE
            if not versions and any(v.state == ModelState.LOADING for r in records for v in r.versions.values()):
                state = ModelState.LOADING
            reason = next(filter(None, reasons), "no worker serves the model" if name in self._away else "")
            rows.append({"name": name, "versions": versions, "state": state.value, "reason": reason})
        return rows

    def _is_complete(self) -> bool:
        """Whether the warm-up has ended."""
        workers = (view.record for view in self._registry.workers.values())
        return self._warmup is None or self._warmup.is_over(self._clock(), workers, bool(self._away))

    def _refresh(self, name: str) -> None:
        if not name:
            self._is_complete()  # so that the warm-up measures its time from the first settled worker on
            return
        records = self._records(name)
        versions = _ready_versions(records)
        if namespace_of(name):
            self._note_namesake(name, is_known=bool(records))
        if versions:
            record = max((r for r in records if r.ready_versions), key=lambda r: r.written_ns)
            config = ModelConfig.model_validate(record.config)
            loads = _loads(records, versions)
            served = ServedModel(name, config, versions, record.labels, loads, record.namespace, record.completed)
            self._served[name] = served
            self._accept_until_s.pop(name, None)
            self._away.discard(name)
            self._apply_traffic(name)
            return
        known = None if self._known is None else self._known.get(name)
        if known is None and name not in self._served:
            return
        withdrawn = [r for r in records if not r.elsewhere and (r.reason or r.is_withdrawn)]
        self._away.discard(name)
        if withdrawn or self._is_unwanted(name):
            self._served.pop(name, None)
            self._accept_until_s.pop(name, None)
        elif known is not None:
            self._accept_until_s.pop(name, None)
            self._away.add(name)
            if name not in self._served:
                config = ModelConfig.model_validate(known.config)
                self._served[name] = ServedModel(
                    name, config, sorted(known.versions), known.labels, {}, known.namespace
                )
                self._apply_traffic(name)
        else:
            self._accept_until_s.setdefault(name, self._clock() + RECOVERY_GRACE_S)

    def _apply_traffic(self, name: str) -> None:
        """Gives the model the split of its rule, if it is served and has a rule."""
        served = self._served.get(name)
        if served is None or self._traffic is None:
            return
        rule, _ = self.traffic_rule(served)
        is_stateful = served.config.sequence_batching is not None
        served.split = None
        if rule is not None:
            record = self._traffic.get(name)
            shadow = None if record is None or served.config.is_decoupled else record.shadow
            counters = self._traffic_counters
            served.split = TrafficSplit(name, rule, served.versions, counters, is_stateful, shadow=shadow)
        header = rule.header if rule is not None else ""
        if header != self._sticky_by_model.get(name, ""):
            self._sticky_by_model[name] = header
            self.sticky_headers = frozenset(filter(None, self._sticky_by_model.values()))

    def _is_accepted(self, name: str) -> bool:
        until = self._accept_until_s.get(name)
        if until is None or self._clock() < until:
            return True
        if not self._records(name):
            del self._served[name]
            del self._accept_until_s[name]
        return False

    def _records(self, name: str) -> list[ModelRecord]:
        records = [
            view.models[name].seen_from(shares_memory(worker))
            for worker, view in self._registry.workers.items()
            if name in view.models and not view.record.draining
        ]
        # Records of workers that the model is not placed on count only where it is placed on none.
        return [record for record in records if not record.elsewhere] or records

    def _only_one_called(self, name: str) -> ServedModel | None:
        """The model of this name that has a namespace, while only one does."""
        identities = self._identities(name)
        return self.served_model(identities.pop()) if len(identities) == 1 else None

    def _identities(self, name: str) -> set[str]:
        """The models of this name that have namespaces, except those that were unloaded."""
        known = self._namesakes.get(name, ())
        return {each for each in known if each in self._served or any(r.is_present for r in self._records(each))}

    def _note_namesake(self, identity: str, is_known: bool) -> None:
        namesakes = self._namesakes.setdefault(plain_name(identity), set())
        if is_known:
            namesakes.add(identity)
        elif identity not in self._served:
            namesakes.discard(identity)

    def _failure(self, records: list[ModelRecord]) -> str:
        """Why the model could not be loaded, after a colon; "" if it was unloaded, or without `tells_reasons`."""
        if not self.tells_reasons:
            return ""
        of_versions = (version.reason for record in records for version in record.versions.values())
        reasons = [record.reason for record in records] + [reason for reason in of_versions if reason != UNLOADED]
        line = next(filter(None, reasons), "").partition("\n")[0].strip()  # that of a backend may be a traceback
        return f": {line[:_SHOWN_REASON]}{'…' if len(line) > _SHOWN_REASON else ''}" if line else ""

    def _error(self, name: str, version: str) -> WeirError:
        identities = self._identities(name)
        if len(identities) > 1:
            return invalid(
                f"There are {len(identities)} identifiers of model '{name}' in global map, model namespace must be "
                "provided to resolve ambiguity."
            )
        records = self._records(name)
        warmup_error = self.warmup_error(name)
        if warmup_error is not None:
            return warmup_error
        if not records and not (version and name in self._away):
            return unknown_model(name)
        if not version:
            text = f"Request for unknown model: '{name}' has no available versions"
            return not_found(text + self._failure(records), Reason.NOT_READY)
        if any(int(version) in record.versions for record in records):
            return unavailable(
                f"Request for unknown model: '{name}' version {version} is not at ready state", Reason.NOT_READY
            )
        return not_found(f"Request for unknown model: '{name}' version {version} is not found", Reason.UNKNOWN_MODEL)


def rule_with(record: TrafficRecord | None, served: ServedModel) -> TrafficRule | None:
    """The traffic rule of a model with this record, else that of its configuration."""
    if record is not None and record.weights:
        return record.rule
    try:
        return rule_of(served.config)
    except ParameterError:
        return None  # workers reject such a configuration


def check_version(version: str) -> None:
    """Raises WeirError (INVALID_ARG) for an invalid version; "" is the latest."""
    # int() raises for some thousands of digits, so the length is checked first.
    is_number = version.isdigit() and version.isascii() and len(version) <= _MAX_VERSION_DIGITS
    if version and not (is_number and int(version) <= _MAX_VERSION):
        raise invalid(
            f"failed to get model version from specified version string '{version}' (details: stol), "
            "version should be an integral value > 0"
        )


def _ready_versions(records: list[ModelRecord]) -> list[int]:
    return sorted({number for record in records for number in record.ready_versions})


def _loads(records: list[ModelRecord], versions: list[int]) -> dict[int, str]:
    """The load digests of all workers of each version, joined: while workers have different loads, the text is its own."""
    loads: dict[int, str] = {}
    for number in versions:
        rows = [(record, record.versions[number]) for record in records if number in record.versions]
        ready = {(record.in_force, row.load) for record, row in rows if row.state == ModelState.READY}
        is_known = all(load for _, load in ready)
        loads[number] = " ".join(f"{in_force}:{load}" for in_force, load in sorted(ready)) if is_known else ""
    return loads

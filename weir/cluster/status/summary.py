"""`summarise`: builds a `ClusterStatus` from the `ClusterFacts` of one collection, without I/O and without a clock."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal, NamedTuple

from weir.bus.kv.registry import WorkerView
from weir.bus.naming import subjects
from weir.bus.naming.durable_subjects import QUEUE_STREAM
from weir.calls.traffic.counters import TrafficCounters
from weir.calls.traffic.split import TrafficSplit
from weir.cluster.status.findings import findings_of
from weir.cluster.status.problems import problems_of, state_of
from weir.cluster.status.snapshot import (
    Broker,
    CallerStatus,
    ClusterStatus,
    DeadLetters,
    DurableQueue,
    Host,
    Lane,
    ModelStatus,
    QueueStatus,
    RoleState,
    RoleStatus,
    Server,
    Stream,
    VersionStatus,
)
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.traffic import TRAFFIC, TrafficRule, rule_of
from weir.schemas.core.names import namespace_of, plain_name
from weir.schemas.wire.registry import Heartbeat, ModelRecord, ModelState, RoleRecord
from weir.schemas.wire.statistics import LoadCounters, QueueCounters, SchedulerCounters, WorkerLoadCounters
from weir.schemas.wire.traffic import TrafficRecord

_live_queue = re.compile(r"live\.(.+?)(?:=p(\d+))?").fullmatch
_STATES = (ModelState.READY, ModelState.LOADING, ModelState.UNLOADING, ModelState.UNAVAILABLE)
_ROLES = ("gateway", "durable", "scheduler", "worker", "console")
_RANKS: dict[str, int] = {"connected": -1, "current": 0, "behind": 1, "offline": 2}

_ROUNDING = 1e-6

Key = tuple[str, int]
"""A model's identity and a partition number."""


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """The raw replies of one collection.

    `replied` are the processes that replied, `silent` those that replied to an earlier collection only. `workers` is the
    registry's view; `heartbeats`, `counters` and `loads` are by process id. `known` are the models that are kept without
    workers. `streams` and `consumers` (by stream) are JetStream's own records; `dead` counts dead letters by model.
    `traffic` has the traffic rules that operators have set, by model.
    """

    now_ms: int
    url: str
    server: Mapping[str, Any] = field(default_factory=dict)
    replied: Sequence[RoleRecord] = ()
    silent: Sequence[RoleRecord] = ()
    workers: Mapping[str, WorkerView] = field(default_factory=dict)
    heartbeats: Mapping[str, Heartbeat] = field(default_factory=dict)
    counters: Mapping[str, SchedulerCounters] = field(default_factory=dict)
    loads: Mapping[str, WorkerLoadCounters] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    streams: Sequence[Mapping[str, Any]] = ()
    consumers: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    dead: Mapping[str, int] = field(default_factory=dict)
    traffic: Mapping[str, TrafficRecord] = field(default_factory=dict)


def summarise(facts: ClusterFacts, option: str = "") -> ClusterStatus:
    """The state of the cluster, with its problems, whose advice adds `option` to commands as `problems_of` does."""
    roles = _roles(facts)
    silent = {role.id for role in roles if role.state == "silent"}
    queues = _queues(facts)
    status = ClusterStatus(
        taken_ms=facts.now_ms,
        state="healthy",
        broker=_broker(facts),
        hosts=_hosts(facts),
        roles=roles,
        models=_models(facts, silent, {queue for queue, _ in queues}),
        queues=[status for _, status in queues],
        durable=_durable(facts),
        dead=[
            DeadLetters(model=plain_name(model), namespace=namespace_of(model), letters=letters)
            for model, letters in sorted(facts.dead.items())
        ],
    )
    problems = problems_of(status, option)
    found = {"problems": problems, "findings": findings_of(problems), "state": state_of(problems)}
    return status.model_copy(update=found)


def _broker(facts: ClusterFacts) -> Broker:
    info = facts.server
    durabilities = {record.durability for record in facts.replied if record.role == "gateway"}
    durability: Literal["yes", "no", "unknown"] = "unknown"
    if "no" in durabilities:
        durability = "no"
    elif durabilities == {"yes"}:
        durability = "yes"
    streams = sorted((_stream(stream) for stream in facts.streams), key=lambda stream: stream.name)
    return Broker(
        url=",".join(part.rsplit("@", 1)[-1].removeprefix("nats://") for part in facts.url.split(",")),
        version=str(info.get("version", "")),
        cluster=str(info.get("cluster", "")),
        servers=_servers(facts),
        durability=durability,
        stalled=sorted({stream for record in facts.replied for stream in record.stalled}),
        streams=streams,
    )


def _stream(stream: Mapping[str, Any]) -> Stream:
    config, state, cluster = stream["config"], stream["state"], stream.get("cluster") or {}
    return Stream(
        name=str(config["name"]),
        storage=str(config.get("storage", "")),
        messages=int(state.get("messages", 0)),
        bytes=int(state.get("bytes", 0)),
        max_bytes=int(config.get("max_bytes", -1)),
        replicas=int(config.get("num_replicas", 1)),
        leader=str(cluster.get("leader", "")),
        behind=sorted(str(copy.get("name", "")) for copy in _copies(stream) if _state(copy) != "current"),
    )


def _servers(facts: ClusterFacts) -> list[Server]:
    """The connected server, and the servers that hold stream replicas, each with the worst state of its replicas."""
    states: dict[str, Literal["connected", "current", "behind", "offline"]] = {}
    for stream in facts.streams:
        leader = (stream.get("cluster") or {}).get("leader")
        if leader:
            states.setdefault(str(leader), "current")
        for copy in _copies(stream):
            name, state = str(copy.get("name", "")), _state(copy)
            if _RANKS[state] >= _RANKS[states.get(name, "current")]:
                states[name] = state
    if "server_name" in facts.server:
        states[str(facts.server["server_name"])] = "connected"
    return [Server(name=name, state=state) for name, state in sorted(states.items())]


def _copies(stream: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (stream.get("cluster") or {}).get("replicas") or ()


def _state(copy: Mapping[str, Any]) -> Literal["current", "behind", "offline"]:
    if copy.get("offline"):
        return "offline"
    return "current" if copy.get("current") else "behind"


def _hosts(facts: ClusterFacts) -> list[Host]:
    names: dict[str, str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    loads: dict[str, list[WorkerLoadCounters]] = defaultdict(list)
    for record in facts.replied:
        names.setdefault(record.host, record.host_name)
        counts[record.host, record.role] += 1
        if record.id in facts.loads:
            loads[record.host].append(facts.loads[record.id])
    return [
        Host(
            id=id,
            name=name,
            gateways=counts[id, "gateway"],
            schedulers=counts[id, "scheduler"],
            workers=counts[id, "worker"],
            instances=sum(load.instances for load in loads[id]),
            busy=sum(load.busy for load in loads[id]),
            utilization=_utilization(loads[id]),
        )
        for id, name in sorted(names.items(), key=lambda host: host[::-1])
    ]


def _utilization(loads: Iterable[LoadCounters | WorkerLoadCounters]) -> float | None:
    """The mean over all instances; None if no instances are reported."""
    reported = list(loads)
    instances = sum(load.instances for load in reported)
    return round(sum(load.utilization * load.instances for load in reported) / instances, 3) if instances else None


def _roles(facts: ClusterFacts) -> list[RoleStatus]:
    replied = {record.id for record in facts.replied}
    records = {record.id: record for record in (*facts.silent, *facts.replied)}
    roles = [_role(facts, record, record.id in replied) for record in records.values()]
    names = {role.host: role.host_name for role in roles if role.host_name}
    return sorted(roles, key=lambda role: (names.get(role.host, ""), role.host, _ROLES.index(role.role), role.id))


def _role(facts: ClusterFacts, record: RoleRecord, has_replied: bool) -> RoleStatus:
    state: RoleState = "leaving" if record.leaving else "up"
    if not has_replied:
        state = "silent"
    elif record.role == "worker" and (view := facts.workers.get(record.id)) and state == "up":
        state = "draining" if view.record.draining else "leaving" if view.record.leaving else "up"
    return RoleStatus(
        role=record.role,
        id=record.id,
        host=record.host,
        host_name=record.host_name,
        pid=record.pid,
        release=record.version,
        since_ms=record.since_ms,
        state=state,
        urls=list(record.urls),
        queues=len(record.queues),
        loop_lag_s=round(record.loop_lag_s, 3),
        **_load(facts, record.id),
    )


def _load(facts: ClusterFacts, id: str) -> dict[str, Any]:
    load = facts.loads.get(id)
    view, heartbeat = facts.workers.get(id), facts.heartbeats.get(id)
    models = () if view is None else view.models.values()
    ready = [[v for v in model.versions.values() if v.state == ModelState.READY] for model in models]
    return {
        "models": sum(map(bool, ready)),
        "unreadable": [] if view is None else [*view.record.unreadable, *view.record.outdated],
        # The load counters exclude ensembles, whose coordinators are never busy.
        "instances": sum(v.instances for versions in ready for v in versions) if load is None else load.instances,
        "batches": 0 if heartbeat is None else sum(map(len, heartbeat.batches.values())),
        "busy": 0 if load is None else load.busy,
        "utilization": None if load is None else _utilization([load]),
    }


def _models(facts: ClusterFacts, silent: set[str], queues: set[Key]) -> list[ModelStatus]:
    records: dict[str, dict[str, ModelRecord]] = defaultdict(dict)
    for worker, view in facts.workers.items():
        for name, record in view.models.items():
            records[name][worker] = record
    for name in {*(model for model, _ in queues), *(model for _, model in _durable_consumers(facts))} - records.keys():
        records[name] = {}
    for name in facts.known - records.keys():
        records[name] = {}
    busy: dict[str, Counter[int]] = defaultdict(Counter)
    loads: dict[str, list[LoadCounters]] = defaultdict(list)
    for counters in facts.counters.values():
        for queue in counters.models:
            busy[queue.model].update({version.version: version.busy for version in queue.versions})
            if queue.load is not None:
                loads[queue.model].append(queue.load)
    return [
        _model(
            name,
            _ModelReports(records[name], busy[name], loads[name], name in facts.known, facts.traffic.get(name)),
            silent,
        )
        for name in sorted(records)
    ]


class _ModelReports(NamedTuple):
    """What workers (`records`, by worker) and schedulers (`busy` instances by version, `loads`) report of a model, and what
    an operator has set for its traffic.
    """

    records: Mapping[str, ModelRecord]
    busy: Mapping[int, int]
    loads: Sequence[LoadCounters]
    is_known: bool
    traffic: TrafficRecord | None = None


def _model(name: str, reports: _ModelReports, silent: set[str]) -> ModelStatus:
    records, loads = reports.records, reports.loads
    live = {worker: record for worker, record in records.items() if worker not in silent}
    # A failure is reported only if the model is not placed on another worker.
    chosen = {worker: record for worker, record in live.items() if not record.elsewhere} or live
    rule = _rule(reports)
    weights = rule.weights if rule is not None else {}
    numbers = sorted({number for record in records.values() for number in record.versions} | weights.keys())
    versions: list[VersionStatus] = []
    having: set[str] = set()
    for number in numbers:
        rows = {worker: record.versions[number] for worker, record in chosen.items() if number in record.versions}
        ready = {worker: row for worker, row in rows.items() if row.state == ModelState.READY}
        having.update(ready)
        states = {row.state for row in rows.values()} or {ModelState.UNAVAILABLE}
        reasons = {row.reason or row.problem for row in rows.values()} - {""}
        versions.append(
            VersionStatus(
                version=number,
                state=min(states, key=_STATES.index).value,
                workers=len(ready),
                instances=sum(row.instances for row in ready.values()),
                busy=reports.busy.get(number, 0) if ready else 0,
                reasons=sorted(reasons),
                weight=weights.get(number),
            )
        )
    if rule is not None:
        split = TrafficSplit(name, rule, [row.version for row in versions if row.workers], TrafficCounters())
        versions = [row.model_copy(update={"share": split.shares.get(row.version, 0.0)}) for row in versions]
    return ModelStatus(
        name=plain_name(name),
        namespace=namespace_of(name),
        versions=versions,
        workers=sorted(having),
        reasons=sorted({record.reason for record in chosen.values()} - {""}),
        rejected=sorted({record.rejected for record in chosen.values()} - {""}),
        scaled_to_zero=reports.is_known and not records,
        utilization=_utilization(loads),
        # Schedulers report fractions of workers per queue; their sum has rounding errors.
        desired_workers=ceil(sum(load.desired_workers for load in loads) - _ROUNDING) if loads else None,
    )


def _rule(reports: _ModelReports) -> TrafficRule | None:
    """The traffic rule that applies to the model: the one that was set, else that of its configuration."""
    if reports.traffic is not None and reports.traffic.weights:
        return reports.traffic.rule
    for record in reports.records.values():
        if record.config is not None and TRAFFIC in record.config.get("parameters", {}):
            return rule_of(ModelConfig.model_validate(record.config))
    return None


def _queues(facts: ClusterFacts) -> list[tuple[Key, QueueStatus]]:
    claims: dict[Key, dict[str, int]] = defaultdict(dict)
    for record in facts.replied:
        if record.role == "scheduler" and not record.leaving:
            for model, partition, epoch in record.queues:
                claims[model, partition][record.id] = epoch
    frames: Counter[Key] = Counter()
    for stream, consumers in facts.consumers.items():
        for consumer in consumers if stream != QUEUE_STREAM else ():
            match = _live_queue(str(consumer["config"].get("filter_subject", "")))
            if match is not None:
                frames[subjects.untoken(match[1]), int(match[2] or 0)] += _held(consumer)
    served = {model for view in facts.workers.values() for model in view.models}
    keys = {*claims, *(key for key, held in frames.items() if held)}
    keys |= {(model, 0) for model in served - {model for model, _ in claims}}
    counters = _queue_counters(facts)
    return [(key, _queue(key, claims.get(key, {}), frames[key], counters)) for key in sorted(keys)]


def _queue_counters(facts: ClusterFacts) -> dict[tuple[str, str, int], QueueCounters]:
    """Counters by scheduler, model and partition. Counters without a partition number come in partition order."""
    by_queue: dict[tuple[str, str, int], QueueCounters] = {}
    owned = {record.id: record.queues for record in facts.replied}
    for scheduler, counters in facts.counters.items():
        left = {
            model: iter(sorted(p for m, p, _ in owned.get(scheduler, ()) if m == model))
            for model in {queue.model for queue in counters.models}
        }
        for queue in counters.models:
            partition = getattr(queue, "partition", None)
            partition = next(left[queue.model], 0) if partition is None else partition
            by_queue[scheduler, queue.model, partition] = queue
    return by_queue


def _queue(
    key: Key, claims: Mapping[str, int], frames: int, by_queue: Mapping[tuple[str, str, int], QueueCounters]
) -> QueueStatus:
    # Of several claims the latest epoch wins: workers reject batches of older ones.
    owner = max(claims, key=lambda id: (claims[id], id), default="")
    counters = by_queue.get((owner, *key))
    return QueueStatus(
        model=plain_name(key[0]),
        namespace=namespace_of(key[0]),
        partition=key[1],
        owner=owner,
        epoch=claims.get(owner, 0),
        claims=sorted(claims),
        frames=frames,
        lanes={
            name: Lane(depth=lane.depth, oldest_s=round(lane.oldest_us / 1e6, 3))
            for name, lane in (counters.lanes.items() if counters is not None else ())
        },
        callers=[
            CallerStatus(name=use.owner, in_flight=use.in_flight, refused=use.refused)
            for use in (counters.owners if counters is not None else ())
        ],
    )


def _durable_consumers(facts: ClusterFacts) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Consumers with unfinished durable requests, by lane and model."""
    found = {}
    for consumer in facts.consumers.get(QUEUE_STREAM, ()):
        metadata = consumer["config"].get("metadata") or {}
        if "weir-model" in metadata and _held(consumer):
            found[str(metadata.get("weir-lane", "")), str(metadata["weir-model"])] = consumer
    return found


def _durable(facts: ClusterFacts) -> list[DurableQueue]:
    return [
        DurableQueue(
            model=plain_name(model),
            namespace=namespace_of(model),
            lane=lane,
            waiting=int(consumer.get("num_pending", 0)),
            taken=int(consumer.get("num_ack_pending", 0)),
        )
        for (lane, model), consumer in sorted(_durable_consumers(facts).items(), key=lambda one: one[0][::-1])
    ]


def _held(consumer: Mapping[str, Any]) -> int:
    return int(consumer.get("num_pending", 0)) + int(consumer.get("num_ack_pending", 0))

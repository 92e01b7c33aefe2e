"""`problems_of`: derives problems from a `ClusterStatus`; `state_of`: what state they put the cluster into.

With a problem of level "down" no request is answered. A warning needs an operator. A note describes a temporary or
configured condition. `weir status`, `weir top` and the console show what is found here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from weir.cluster.status.snapshot import (
    ADVICE,
    LEVELS,
    Broker,
    ClusterStatus,
    Kind,
    Lane,
    Level,
    ModelStatus,
    Problem,
    State,
)
from weir.schemas.wire.registry import UNLOADED, ModelState

FULL = 0.8
"""Share of `max_bytes` above which a stream that rejects further messages counts as nearly full."""

OLD_S = 10.0
"""Age in seconds above which a waiting live request is a warning."""

BUSY, PRESSING_S = 0.95, 1.0
"""A model is overloaded from this utilization on, if a live request has waited for this long (seconds)."""

_COMMAND = re.compile(r"\bweir dead \w+")
"""The commands in pieces of advice that act on a server."""

GRAVEST_FIRST: tuple[Level, ...] = ("down", "warning", "note")

_STATES: dict[Level, State] = {"down": "down", "warning": "degraded", "note": "healthy"}
_REJECTING = ("LIVE", "QUEUE")
_SHOWN_REASONS = 2


def problems_of(status: ClusterStatus, option: str = "") -> list[Problem]:
    """All problems of the cluster, the gravest first.

    `option` is added to commands in their advice, so that these act on the same server: " --data-dir FOLDER".
    """
    found = [
        *_missing_roles(status),
        *_silent(status),
        *_repositories(status),
        *_models(status),
        *_traffic(status),
        *_queues(status),
        *_overloaded(status),
        *(_broker(status, status.broker) if status.broker is not None else ()),
        *_releases(status),
        *_dead(status),
        *_leaving(status),
    ]
    advised = (problem.model_copy(update={"advice": _advice(problem.kind, option)}) for problem in found)
    return sorted(advised, key=lambda problem: GRAVEST_FIRST.index(problem.level))


def _advice(kind: Kind, option: str) -> str:
    return _COMMAND.sub(lambda command: command[0] + option, ADVICE[kind])


def state_of(problems: Iterable[Problem]) -> State:
    """The state of a cluster, whose broker replies, with these problems."""
    levels = {problem.level for problem in problems}
    return next((_STATES[level] for level in GRAVEST_FIRST if level in levels), "healthy")


def _problem(kind: Kind, about: str, text: str, level: Level | None = None) -> Problem:
    return Problem(level=level or LEVELS[kind], kind=kind, about=about, text=text)


def _missing_roles(status: ClusterStatus) -> Iterator[Problem]:
    there = {role.role for role in status.roles if role.state != "silent"}
    if "gateway" not in there:
        yield _problem("no gateway", "", "no gateway replies: clients can't connect")
    if "scheduler" not in there:
        yield _problem("no scheduler", "", "no scheduler replies: requests wait")
    if "worker" not in there and status.models and all(model.scaled_to_zero for model in status.models):
        yield _problem("no worker", "", "no worker replies: all models are scaled to zero", "note")
    elif "worker" not in there:
        yield _problem("no worker", "", "no worker replies: no model can be executed")


def _silent(status: ClusterStatus) -> Iterator[Problem]:
    for role in status.roles:
        if role.state == "silent":
            place = f"process {role.pid} on {role.host_name or f'host {role.host}'}"
            text = f"{role.role} {role.id} ({place}) does not reply: it is dead, suspended or disconnected"
            yield _problem("silent process", role.id, text)


def _repositories(status: ClusterStatus) -> Iterator[Problem]:
    for role in status.roles:
        if role.state != "silent":
            for reason in role.unreadable:
                yield _problem("repository unreadable", role.id, f"{role.role} {role.id}: {reason}")


def _leaving(status: ClusterStatus) -> Iterator[Problem]:
    for role in status.roles:
        if role.state in ("leaving", "draining"):
            yield _problem("leaving", role.id, f"{role.role} {role.id} is {role.state}")


def _models(status: ClusterStatus) -> Iterator[Problem]:
    waiting: dict[tuple[str, str], int] = {}
    for queue in status.queues:
        key = queue.model, queue.namespace
        depth = sum(lane.depth for lane in queue.lanes.values()) if queue.lanes else queue.frames
        waiting[key] = waiting.get(key, 0) + depth
    for durable in status.durable:
        key = durable.model, durable.namespace
        waiting[key] = waiting.get(key, 0) + durable.waiting + durable.taken
    for model in status.models:
        yield from _model(model, waiting.get((model.name, model.namespace), 0))


def _model(model: ModelStatus, waiting: int) -> Iterator[Problem]:
    name = _named(model.name, model.namespace)
    reasons = {reason for version in model.versions for reason in version.reasons} | set(model.reasons)
    bad = sorted(reasons - {UNLOADED})
    if bad:
        shown = "; ".join(bad[:_SHOWN_REASONS])
        more = f" (and {len(bad) - _SHOWN_REASONS} more reasons)" if len(bad) > _SHOWN_REASONS else ""
        where = "" if model.workers else " on any worker"
        yield _problem("model fails", model.name, f"model {name} fails{where}: {shown}{more}")
    elif model.rejected:
        text = f"model {name} still serves the version loaded before: its changed files can't be loaded: "
        yield _problem("change rejected", model.name, text + "; ".join(model.rejected[:_SHOWN_REASONS]))
    elif model.scaled_to_zero:
        what = f": {_requests(waiting)}" if waiting else ""
        yield _problem("scaled to zero", model.name, f"model {name} is scaled to zero{what}")
    elif not model.workers:
        is_loading = any(version.state == ModelState.LOADING for version in model.versions)
        was_unloaded = reasons == {UNLOADED}
        if not is_loading and (waiting or not was_unloaded):
            what = _requests(waiting) if waiting else "it was served before"
            yield _problem("model without worker", model.name, f"model {name} has no worker: {what}")


def _traffic(status: ClusterStatus) -> Iterator[Problem]:
    for model in status.models:
        away = [str(version.version) for version in model.versions if version.weight and not version.workers]
        if away and model.workers:
            versions = f"version {away[0]} is" if len(away) == 1 else f"versions {', '.join(away)} are"
            name = _named(model.name, model.namespace)
            text = f"{versions} not ready in the traffic rule of model {name}: the other versions get its share"
            yield _problem("split version not ready", model.name, text)


def _queues(status: ClusterStatus) -> Iterator[Problem]:
    for queue in status.queues:
        name = _named(queue.model, queue.namespace)
        name += f", partition {queue.partition}" if queue.partition else ""
        if not queue.claims:
            waits = f": {queue.frames} messages wait in it" if queue.frames else ""
            yield _problem("queue without owner", queue.model, f"no scheduler owns the queue of {name}{waits}")
        elif len(queue.claims) > 1:
            text = f"{len(queue.claims)} schedulers claim the queue of {name}: {', '.join(queue.claims)}"
            yield _problem("queue with two owners", queue.model, text)
        live = queue.lanes.get("live")
        if live is not None and live.oldest_s > OLD_S:
            text = f"the oldest of {live.depth} waiting live requests of {name} has waited for {live.oldest_s:.0f} s"
            yield _problem("queue waits", queue.model, text)


def _overloaded(status: ClusterStatus) -> Iterator[Problem]:
    """Models whose instances can't keep up with their live requests."""
    lanes: dict[tuple[str, str], list[Lane]] = {}
    for queue in status.queues:
        if "live" in queue.lanes:
            lanes.setdefault((queue.model, queue.namespace), []).append(queue.lanes["live"])
    for model in status.models:
        of = lanes.get((model.name, model.namespace), [])
        oldest_s, depth = max((lane.oldest_s for lane in of), default=0.0), sum(lane.depth for lane in of)
        if (model.utilization or 0.0) < BUSY or oldest_s < PRESSING_S:
            continue
        text = (
            f"model {_named(model.name, model.namespace)} is overloaded: its instances are {model.utilization:.0%} busy, "
            f"{_requests(depth)}, the oldest for {oldest_s:.1f} s"
        )
        if model.desired_workers is not None and model.desired_workers > len(model.workers):
            text += f"; {len(model.workers)} of the {model.desired_workers} workers needed for its load serve it"
        yield _problem("overloaded", model.name, text)


def _broker(status: ClusterStatus, broker: Broker) -> Iterator[Problem]:
    for name in broker.stalled:
        text = f"stream {name} stores nothing: the disk of the NATS server may be full or failing; see its log"
        yield _problem("stream stores nothing", name, text)
    for stream in broker.streams:
        refuses = stream.name.partition("_")[0] in _REJECTING
        if refuses and stream.max_bytes > 0 and stream.bytes > FULL * stream.max_bytes:
            share = stream.bytes / stream.max_bytes
            text = f"stream {stream.name} is {share:.0%} full: once full it rejects messages"
            yield _problem("stream nearly full", stream.name, text)
        if broker.cluster and not stream.leader:
            yield _problem(
                "stream without leader", stream.name, f"stream {stream.name} has no leader: it accepts no messages"
            )
    states = {server.name: server.state for server in broker.servers}
    for name, state in states.items():
        if state in ("offline", "behind"):
            of = sum(name in stream.behind for stream in broker.streams)
            text = f"nats-server {name} is {state}, with its replicas of {of} streams"
            yield _problem("replica behind", name, text, None if state == "offline" else "note")
    if any(role.role == "gateway" for role in status.roles):
        if broker.durability == "no":
            text = "the NATS server acknowledges before it syncs to disk: a power loss may lose durable requests"
            yield _problem("not synced", broker.url, text)
        elif broker.durability == "unknown":
            text = (
                "Weir can't determine whether the NATS server syncs to disk before it acknowledges: see --nats-monitor"
            )
            yield _problem("sync unknown", broker.url, text)


def _releases(status: ClusterStatus) -> Iterator[Problem]:
    by_release: dict[str, int] = {}
    for role in status.roles:
        if role.state != "silent":
            by_release[role.release] = by_release.get(role.release, 0) + 1
    if len(by_release) > 1:
        counts = ", ".join(f"{count} of {release or 'a checkout'}" for release, count in sorted(by_release.items()))
        yield _problem("releases differ", "", f"processes run different releases: {counts}")


def _dead(status: ClusterStatus) -> Iterator[Problem]:
    for dead in status.dead:
        what = "1 dead letter" if dead.letters == 1 else f"{dead.letters} dead letters"
        yield _problem("dead letters", dead.model, f"{what} of {_named(dead.model, dead.namespace)}")


def _requests(count: int) -> str:
    return "1 request waits" if count == 1 else f"{count} requests wait"


def _named(model: str, namespace: str) -> str:
    return f"'{model}'" + (f" in {namespace}" if namespace else "")

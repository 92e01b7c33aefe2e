"""The summary, the problems and the text output of `weir status` for given replies."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs
from rich.console import Console

from weir.bus.kv.registry import WorkerView
from weir.cluster.status.snapshot import ClusterStatus
from weir.cluster.status.summary import ClusterFacts, summarise
from weir.commands.status.display import WIDTH, print_status
from weir.commands.status.watch import exit_status
from weir.schemas.wire.registry import Heartbeat, ModelRecord, ModelState, RoleRecord, VersionRecord, WorkerRecord
from weir.schemas.wire.statistics import LoadCounters, SchedulerCounters, WorkerLoadCounters

NOW_MS = 1_700_000_100_000
READY = VersionRecord(ModelState.READY, instances=2)
SCHEDULERS = ("scheduler-aaaaaaaa-1", "scheduler-bbbbbbbb-2")
WORKERS = ("worker-aaaaaaaa-1", "worker-bbbbbbbb-2")


def record(role: Any, id: str, host: str = "aaaaaaaa", **more: Any) -> RoleRecord:
    about = {"pid": 7, "version": "1.0", "since_ms": NOW_MS - 90_000, "host_name": f"host-{host[0]}", **more}
    return RoleRecord(role=role, id=id, host=host, **about)


def worker(id: str, record: WorkerRecord | None = None, **models: VersionRecord) -> WorkerView:
    view = WorkerView(id, 0.0)
    view.record = record or WorkerRecord(id, 7)
    view.models = {name: ModelRecord(name, {1: version}) for name, version in models.items()}
    return view


def lanes(depth: int, oldest_us: int) -> dict[str, Any]:
    return {lane: {"depth": depth, "oldest_us": oldest_us} for lane in ("live", "event", "batch")}


def counters(id: str, *queues: tuple[str, int, int]) -> SchedulerCounters:
    models = [
        {"model": name, "lanes": lanes(depth, oldest_us), "versions": [{"version": 1, "pending": depth, "busy": 3}]}
        for name, depth, oldest_us in queues
    ]
    return msgspec.convert({"scheduler": id, "models": models}, SchedulerCounters)


def stream(name: str, **more: Any) -> dict[str, Any]:
    return {
        "config": {"name": name, "storage": "file", "max_bytes": 1000, "num_replicas": 1},
        "state": {"messages": 1, "bytes": 100},
        **more,
    }


HEALTHY = ClusterFacts(
    now_ms=NOW_MS,
    url="nats://user:secret@127.0.0.1:4222",
    server={"server_name": "n1", "version": "2.15.1"},
    replied=[
        record("gateway", "gateway-aaaaaaaa-1", urls=["http://127.0.0.1:8000"], durability="yes"),
        record("scheduler", SCHEDULERS[0], queues=[("a", 0, 4), ("b", 0, 5)]),
        record("worker", WORKERS[0]),
        record("worker", WORKERS[1], "bbbbbbbb"),
    ],
    workers={id: worker(id, a=READY, b=READY) for id in WORKERS},
    heartbeats={WORKERS[0]: Heartbeat(WORKERS[0], {SCHEDULERS[0]: [1, 2]})},
    counters={SCHEDULERS[0]: counters(SCHEDULERS[0], ("a", 2, 1_500_000), ("b", 0, 0))},
    streams=[stream("LIVE"), stream("KV_registry"), stream("QUEUE")],
)


def kinds(status: ClusterStatus) -> list[str]:
    return [problem.kind for problem in status.problems]


def shown(status: ClusterStatus, shows_all: bool = False, width: int = WIDTH) -> str:
    out = io.StringIO()
    print_status(status, Console(file=out, width=width, highlight=False, markup=False), shows_all)
    return out.getvalue()


def test_a_healthy_cluster_has_no_problems() -> None:
    status = summarise(HEALTHY)
    assert (status.state, status.problems) == ("healthy", [])
    assert [(host.name, host.gateways, host.schedulers, host.workers) for host in status.hosts] == [
        ("host-a", 1, 1, 1),
        ("host-b", 0, 0, 1),
    ]
    model, _ = status.models
    assert [(v.version, v.state, v.workers, v.instances, v.busy) for v in model.versions] == [(1, "READY", 2, 4, 3)]
    queue, _ = status.queues
    assert (queue.owner, queue.epoch, queue.lanes["live"].depth, queue.lanes["live"].oldest_s) == (
        SCHEDULERS[0],
        4,
        2,
        1.5,
    )
    assert [role.batches for role in status.roles] == [0, 0, 2, 0]
    assert status.broker is not None
    assert (status.broker.durability, status.broker.url) == ("yes", "127.0.0.1:4222")
    assert ClusterStatus.model_validate_json(status.model_dump_json()) == status


def test_who_does_not_answer_is_silent_and_its_models_are_not_ready() -> None:
    status = summarise(replace(HEALTHY, replied=HEALTHY.replied[:2], silent=HEALTHY.replied[2:]))
    assert (status.state, exit_status(status)) == ("down", 3)
    assert kinds(status)[0] == "no worker"
    assert kinds(status).count("silent process") == 2
    assert kinds(status).count("model without worker") == 2
    assert "no worker" in kinds(status)


def test_a_queue_without_a_scheduler_has_no_owner() -> None:
    status = summarise(replace(HEALTHY, replied=[one for one in HEALTHY.replied if one.role != "scheduler"]))
    assert [queue.owner for queue in status.queues] == ["", ""]
    assert {"no scheduler", "queue without owner"} <= set(kinds(status))


def test_of_two_owners_the_later_one_counts() -> None:
    other = record("scheduler", SCHEDULERS[1], "bbbbbbbb", queues=[("a", 0, 9), ("b", 1, 1)])
    status = summarise(replace(HEALTHY, replied=[*HEALTHY.replied, other]))
    first, second, partition = status.queues
    assert (first.owner, first.epoch, first.claims) == (SCHEDULERS[1], 9, sorted(SCHEDULERS))
    assert (second.claims, partition.partition, partition.owner) == ([SCHEDULERS[0]], 1, SCHEDULERS[1])
    assert kinds(status) == ["queue with two owners"]


def test_a_leaving_scheduler_claims_nothing() -> None:
    leaving = structs.replace(HEALTHY.replied[1], leaving=True)
    other = record("scheduler", SCHEDULERS[1], queues=[("a", 0, 9), ("b", 0, 9)])
    status = summarise(replace(HEALTHY, replied=[HEALTHY.replied[0], leaving, other, *HEALTHY.replied[2:]]))
    assert (status.state, kinds(status)) == ("healthy", ["leaving"])


def test_models_that_fail_say_why_and_unloaded_ones_are_no_problem() -> None:
    broken = VersionRecord(ModelState.UNAVAILABLE, "no such file")
    stuck = VersionRecord(ModelState.READY, problem="its process died")
    unloaded = VersionRecord(ModelState.UNAVAILABLE, "unloaded")
    workers = {WORKERS[0]: worker(WORKERS[0], a=READY, b=broken, c=stuck, d=unloaded)}
    status = summarise(
        replace(HEALTHY, workers=workers, replied=[one for one in HEALTHY.replied if one.id != WORKERS[1]])
    )
    assert [(p.kind, p.about) for p in status.problems if p.kind.startswith("model")] == [
        ("model fails", "b"),
        ("model fails", "c"),
    ]
    assert "no such file" in shown(status)


def test_reasons_are_whole_in_json_and_cut_for_people() -> None:
    reason = "Internal: " + "x" * 2000 + " the end"
    broken = VersionRecord(ModelState.UNAVAILABLE, reason)
    status = summarise(replace(HEALTHY, workers={WORKERS[0]: worker(WORKERS[0], b=broken)}))
    (problem,) = [problem for problem in status.problems if problem.kind == "model fails"]
    assert reason in problem.text
    assert shown(status, shows_all=True).count("x") >= 2000
    assert shown(status).count("x") < 1000
    assert "(--all)" in shown(status)


def test_a_change_that_workers_rejected_is_a_problem() -> None:
    view = worker(WORKERS[0], a=READY, b=READY)
    view.models["a"] = structs.replace(view.models["a"], rejected="Internal: not a model")
    status = summarise(replace(HEALTHY, workers={WORKERS[0]: view, WORKERS[1]: worker(WORKERS[1], a=READY, b=READY)}))
    assert (status.state, kinds(status)) == ("degraded", ["change rejected"])
    assert status.models[0].rejected == ["Internal: not a model"]
    assert "model 'a' still serves the version loaded before" in shown(status)


def test_what_waits_without_a_worker_is_told() -> None:
    consumer = {"config": {"filter_subject": "live.gone=p2"}, "num_pending": 3, "num_ack_pending": 4}
    durable = {
        "config": {"metadata": {"weir-model": "gone", "weir-lane": "event"}},
        "num_pending": 5,
        "num_ack_pending": 1,
    }
    status = summarise(replace(HEALTHY, consumers={"LIVE_1": [consumer], "QUEUE": [durable]}))
    (queue,) = [queue for queue in status.queues if queue.model == "gone"]
    assert (queue.partition, queue.frames, queue.owner) == (2, 7, "")
    assert [(one.model, one.lane, one.waiting, one.taken) for one in status.durable] == [("gone", "event", 5, 1)]
    (problem,) = [problem for problem in status.problems if problem.kind == "model without worker"]
    assert "13 requests wait" in problem.text


def test_the_broker_s_troubles() -> None:
    cluster = {"leader": "n1", "replicas": [{"name": "n2", "offline": True}, {"name": "n3", "current": False}]}
    streams = [
        {**stream("LIVE"), "state": {"messages": 9, "bytes": 900}, "cluster": cluster},
        stream("QUEUE", cluster={"replicas": []}),
    ]
    gateway = structs.replace(HEALTHY.replied[0], durability="no", stalled=["RESULT"])
    server = {**HEALTHY.server, "cluster": "c"}
    status = summarise(replace(HEALTHY, server=server, streams=streams, replied=[gateway, *HEALTHY.replied[1:]]))
    assert status.broker is not None
    assert [(server.name, server.state) for server in status.broker.servers] == [
        ("n1", "connected"),
        ("n2", "offline"),
        ("n3", "behind"),
    ]
    assert [(p.level, p.kind, p.about) for p in status.problems] == [
        ("warning", "stream stores nothing", "RESULT"),
        ("warning", "stream nearly full", "LIVE"),
        ("warning", "stream without leader", "QUEUE"),
        ("warning", "replica behind", "n2"),
        ("warning", "not synced", "127.0.0.1:4222"),
        ("note", "replica behind", "n3"),
    ]


def test_releases_and_old_requests_are_warned_of_and_dead_letters_noted() -> None:
    replied = [*HEALTHY.replied[:3], structs.replace(HEALTHY.replied[3], version="1.1")]
    old = {SCHEDULERS[0]: counters(SCHEDULERS[0], ("a", 1, 11_000_000))}
    status = summarise(replace(HEALTHY, replied=replied, counters=old, dead={"a": 3}))
    assert [(p.level, p.kind) for p in status.problems] == [
        ("warning", "queue waits"),
        ("warning", "releases differ"),
        ("note", "dead letters"),
    ]
    kept = summarise(replace(HEALTHY, dead={"a": 3}))
    assert (kept.state, exit_status(kept), [p.text for p in kept.problems]) == ("healthy", 0, ["3 dead letters of 'a'"])


@pytest.mark.parametrize("role", ["gateway", "scheduler", "worker"])
def test_without_a_role_that_each_request_needs_the_cluster_is_down(role: str) -> None:
    status = summarise(replace(HEALTHY, replied=[one for one in HEALTHY.replied if one.role != role]))
    assert (status.state, exit_status(status)) == ("down", 3)
    assert (status.problems[0].level, status.problems[0].kind) == ("down", f"no {role}")
    assert shown(status).splitlines()[0].startswith("down: ")
    assert f"! no {role} replies: " in shown(status)


def test_alike_problems_are_one_line() -> None:
    models = {f"m{number}": 1 for number in range(9)}
    consumers = [{"config": {"filter_subject": f"live.{name}"}, "num_pending": 2} for name in models]
    status = summarise(replace(HEALTHY, consumers={"LIVE": consumers}))
    assert kinds(status).count("model without worker") == 9, "JSON has all of them"
    (line,) = [finding for finding in status.findings if finding.kind == "model without worker"]
    assert line.text == "9 models have no worker: m0, m1, m2 and 6 more"
    assert (line.level, line.about, len(line.texts)) == ("warning", sorted(models), 9)
    assert shown(status).count("has no worker") == 0
    assert f"! {line.text} (--all)" in shown(status).splitlines()
    assert shown(status, shows_all=True).count("has no worker: 2 requests wait") == 9


def test_few_alike_problems_stay_as_they_are() -> None:
    broken = VersionRecord(ModelState.UNAVAILABLE, "no such file")
    status = summarise(replace(HEALTHY, workers={WORKERS[0]: worker(WORKERS[0], a=READY, b=broken, c=broken)}))
    texts = [finding.text for finding in status.findings if finding.kind == "model fails"]
    assert texts == [problem.text for problem in status.problems if problem.kind == "model fails"]
    assert len(texts) == 2


def test_commands_of_the_advice_act_on_the_server_that_was_asked() -> None:
    facts = replace(HEALTHY, dead={"a": 3})
    (problem,) = summarise(facts, " --data-dir '/a b'").problems
    commands = re.findall(r"`([^`]+)`", problem.advice)
    assert len(commands) == 3
    assert all(re.fullmatch(r"weir dead \w+ --data-dir '/a b'", command) for command in commands)
    (problem,) = summarise(facts).problems
    assert "--data-dir" not in problem.advice


def test_commands_to_type_are_printed_with_their_finding() -> None:
    out = io.StringIO()
    status = summarise(replace(HEALTHY, dead={"a": 3}), " --data-dir /a")
    print_status(status, Console(file=out, width=200))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    place = lines.index("- 3 dead letters of 'a'")
    assert lines[place + 1] == (
        "weir dead list --data-dir /a, then weir dead replay --data-dir /a or weir dead purge --data-dir /a"
    )


def test_a_draining_worker_is_a_note() -> None:
    draining = worker(WORKERS[0], WorkerRecord(WORKERS[0], 7, draining=True), a=READY, b=READY)
    status = summarise(replace(HEALTHY, workers={**HEALTHY.workers, WORKERS[0]: draining}))
    assert (status.state, kinds(status)) == ("healthy", ["leaving"])
    assert [role.state for role in status.roles] == ["up", "up", "draining", "up"]


def test_how_busy_everything_is_stands_at_a_glance() -> None:
    reply = counters(SCHEDULERS[0], ("a", 9, 2_500_000), ("b", 0, 0))
    load = {"instances": 4, "utilization": 0.98, "desired_workers": 2.5}
    reply = structs.replace(reply, models=[structs.replace(reply.models[0], load=msgspec.convert(load, LoadCounters))])
    loads = {
        WORKERS[0]: WorkerLoadCounters(instances=4, busy=4, utilization=0.9),
        WORKERS[1]: WorkerLoadCounters(instances=3, busy=1, utilization=0.3),
    }
    status = summarise(replace(HEALTHY, counters={SCHEDULERS[0]: reply}, loads=loads))
    assert [(host.instances, host.busy, host.utilization) for host in status.hosts] == [(4, 4, 0.9), (3, 1, 0.3)]
    assert [role.utilization for role in status.roles] == [None, None, 0.9, 0.3]
    assert [role.instances for role in status.roles[2:]] == [4, 3], "those that can be busy, of no ensembles"
    assert [(model.utilization, model.desired_workers) for model in status.models] == [(0.98, 3), (None, None)]
    assert [(p.level, p.kind, p.about) for p in status.problems] == [("warning", "overloaded", "a")]
    assert "2 of the 3 workers" in status.problems[0].text
    text = shown(status)
    assert text.splitlines()[0].endswith("; instances 64% busy")
    assert "4 of 4 instances busy, 90%" in text
    assert "2 models; 1 of 3 busy, 30%" in text


def test_who_is_scaled_to_zero_is_a_note_and_who_died_is_not() -> None:
    workers = {WORKERS[1]: worker(WORKERS[1], b=READY)}
    replied = [one for one in HEALTHY.replied if one.id != WORKERS[0]]
    status = summarise(replace(HEALTHY, workers=workers, replied=replied, known=frozenset({"a", "b"})))
    assert [(p.level, p.kind, p.about) for p in status.problems] == [("note", "scaled to zero", "a")]
    assert status.state == "healthy"
    assert "6 requests wait" in status.problems[0].text
    assert any(line.startswith("a ") and "scaled to zero" in line for line in shown(status).splitlines()[3:])
    nobody = summarise(replace(HEALTHY, workers={}, replied=HEALTHY.replied[:2], known=frozenset({"a", "b"})))
    assert (nobody.state, {p.level for p in nobody.problems}) == ("healthy", {"note"})
    silent = summarise(
        replace(HEALTHY, workers=workers, replied=replied[:2], silent=replied[2:], known=frozenset({"b"}))
    )
    assert ("model without worker", "b") in [(p.kind, p.about) for p in silent.problems]


def test_a_queue_that_was_just_taken_over_says_so() -> None:
    taken = structs.replace(HEALTHY.replied[1], queues=[("a", 0, NOW_MS - 12_000), ("b", 0, 5)])
    lines = shown(summarise(replace(HEALTHY, replied=[HEALTHY.replied[0], taken, *HEALTHY.replied[2:]]))).splitlines()
    assert [line.split()[2:4] for line in lines if SCHEDULERS[0] in line][1:] == [["12", "s"], ["0", "0"]]


def test_it_is_plain_text_of_100_columns() -> None:
    hostile = ModelRecord("a\x1b[31m\nb", {1: VersionRecord(ModelState.UNAVAILABLE, "x" * 300 + "\x07")})
    view = worker(WORKERS[0], a=READY, b=READY)
    view.models[hostile.name] = hostile
    status = summarise(replace(HEALTHY, workers={**HEALTHY.workers, WORKERS[0]: view}))
    for text in (shown(status), shown(status, shows_all=True)):
        assert all(line.isprintable() and len(line) <= WIDTH for line in text.splitlines())
        assert not any(line.endswith(" ") for line in text.splitlines())
    assert "KV_registry" not in shown(status)
    assert "KV_registry" in shown(status, shows_all=True)


def test_many_models_are_cut_with_those_in_trouble_first() -> None:
    broken = VersionRecord(ModelState.UNAVAILABLE, "no such file")
    models = {f"m{number}": READY for number in range(100)} | {"zz": broken}
    status = summarise(replace(HEALTHY, workers={WORKERS[0]: worker(WORKERS[0], **models)}))
    text = shown(status)
    assert "see --all" in text
    assert any(line.startswith("zz") for line in text.splitlines())
    assert "m99" not in text.partition("QUEUE")[0].partition("MODEL")[2] or "m98" not in text
    assert "see --all" not in shown(status, shows_all=True)

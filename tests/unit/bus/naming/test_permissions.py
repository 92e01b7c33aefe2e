"""The table of permissions has every subject of Weir, and no more rights than are listed here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bus.naming import durable_subjects, subjects
from weir.bus.naming.permissions import (
    USERS,
    Permissions,
    allows,
    check_broker_users,
    nats_conf,
    permissions,
    permissions_of_broker_user,
)

NO_SUBJECTS = {
    "token",
    "untoken",
    "queue_token",
    "infer_target",
    "publisher",
    "durable_target",
    "is_durable_target",
    "stream_of",
    "canonical",
    "durable_filters",
    "any_job_event",
    "any_result",
    "registry_key",
    "settings_key",
    "parse_settings_key",
    "region_key",
    "sequence_key",
    "sequences_key",
    "live_consumer",
    "live_stream",
    "consumer_of",
    "durable_consumer",
    "repository_bucket",
    "callback_url",
    "callback",  # its reply subject, which producers name: see below
    "role_inbox",
    "stored_entry",  # of some buckets
    "repository_writes",  # a bucket for each repository: see below
}
_BASES = {
    "api_replies",
    "publish_ack",
    "counters",
    "limit_replies",
    "peer_answers",
    "readiness_replies",
    "sequence_reports",
    "cuda_opened",
    "cache_replies",
    "infer_flow",
    "infer_flow_by",
    "infer_flow_by_any",
    "inbox",
}
BASES = dict.fromkeys(_BASES | {"stored", "durable_inbox", "fetched"}, 1)
"""Subjects behind which numbers or names follow, as so many tokens more."""


_WORD, _NUMBER = "ANYTHING", 987654321


def anything(name: Callable[..., str]) -> str:
    """The subjects of a function of `weir.bus.naming.subjects` with a wildcard for each argument."""
    parameters = inspect.signature(name).parameters.values()
    tokens = name(*(_NUMBER if parameter.annotation == "int" else _WORD for parameter in parameters)).split(".")
    return ".".join("*" if _WORD in token or str(_NUMBER) in token else token for token in tokens)


def own_subjects(module: ModuleType) -> list[str]:
    """What each function of a module that names subjects gives."""
    found = []
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name not in NO_SUBJECTS:
            found.append(anything(value) + ".*" * BASES.get(name, 0))
    return found


def all_permissions() -> list[Permissions]:
    """What each user may do, also one of a client."""
    return [*permissions().values(), permissions_of_broker_user("*")]


@pytest.mark.parametrize("module", [subjects, durable_subjects])
def test_every_subject_has_a_user(module: ModuleType) -> None:
    table = all_permissions()
    patterns = [pattern for may in table for pattern in (*may.publish, *may.subscribe)]
    mine = own_subjects(module)
    assert mine
    assert [subject for subject in mine if not allows(patterns, subject)] == []


def test_every_published_subject_has_a_subscriber_and_the_reverse() -> None:
    """Who publishes what nobody may hear, or hears what nobody may publish, is a mistake of the table's."""
    table = all_permissions()
    heard = {pattern for may in table for pattern in may.subscribe if pattern[0] != "$"}
    said = {pattern for may in table for pattern in may.publish if pattern[0] != "$"}
    stored = ("live.", "event.", "batch.", "dead.", "callback.", "history.", "audit.")  # in streams
    unheard = {s for s in said if not allows(heard, s) and not s.startswith(stored)}
    assert unheard == set()
    answered = (
        "ack.",
        "stored.",
        "cached.",
        "inbox.",
        "durable-inbox.",
        "lost.",
        "_INBOX_",
        "kv.",
    )  # by nats-server
    unsaid = {s for s in heard if not allows(said, s) and not s.startswith(answered)}
    assert unsaid == {"presence.*.*", "result.>"} - said


@pytest.mark.parametrize("user", USERS)
def test_no_user_may_use_all_of_the_api(user: str) -> None:
    may = permissions(live_streams=3, repositories=("models", "more"))[user]
    patterns = {*may.publish, *may.subscribe}
    assert patterns.isdisjoint({">", "*", "$JS.>", "$JS.API.>", "$JS.ACK.>", "$SYS.>", "$KV.>", "$O.>", "*.>"})
    assert not any(pattern.startswith("$SYS.") and pattern != "$SYS.REQ.SERVER.PING.JSZ" for pattern in patterns)
    for stream in ("QUEUE", "RESULT", "DEAD", "LIVE", "KV_leases"):
        assert not allows(may.publish, f"$JS.API.STREAM.DELETE.{stream}")
    others = [f"_INBOX_{other}.x" for other in USERS if other != user]
    assert not any(allows(may.subscribe, inbox) for inbox in others)
    assert user == "gateway" or not allows(may.publish, "result.a.x"), "who could forge a record"


def test_audit_events_are_written_by_their_processes_and_read_by_the_operator_alone() -> None:
    table = permissions()
    assert {user for user in USERS if allows(table[user].publish, "audit.http")} == {"gateway", "console"}
    for request in ("STREAM.MSG.GET.AUDIT", "DIRECT.GET.AUDIT", "CONSUMER.CREATE.AUDIT", "CONSUMER.CREATE.AUDIT.a"):
        assert {user for user in USERS if allows(table[user].publish, f"$JS.API.{request}")} == {"admin"}
    for request in ("STREAM.MSG.DELETE.AUDIT", "STREAM.PURGE.AUDIT", "STREAM.DELETE.AUDIT"):
        assert {user for user in USERS if allows(table[user].publish, f"$JS.API.{request}")} == set()
    assert {user for user in USERS if allows(table[user].subscribe, "audit.http")} == set()


def test_more_streams_and_repositories() -> None:
    more = permissions(live_streams=3, repositories=("ours",))
    assert allows(more["scheduler"].publish, "$JS.API.CONSUMER.MSG.NEXT.LIVE_2.live-a")
    assert not allows(more["scheduler"].publish, "$JS.API.CONSUMER.MSG.NEXT.LIVE_3.live-a")
    assert allows(more["worker"].publish, "$JS.ACK.LIVE_1.live-a.1.1.1.1.0")
    assert allows(more["worker"].subscribe, "$KV.repository-ours.a")
    assert not allows(more["worker"].publish, "$KV.repository-ours.a")


@pytest.mark.parametrize(
    ("pattern", "subject", "covered"),
    [
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.*", "a.>", False),
        ("a.b", "a.*", False),
        ("a.>", "a.*.>", True),
        (">", "a", True),
    ],
)
def test_wildcards(pattern: str, subject: str, covered: bool) -> None:
    assert allows([pattern], subject) is covered


def test_a_producer_writes_large_bodies_and_reads_or_removes_none() -> None:
    producer = permissions()["producer"].publish
    assert allows(producer, "$O.requests.C.x")
    assert allows(producer, "$O.requests.M.x")
    assert allows(producer, "$JS.API.STREAM.INFO.OBJ_requests")
    for verb in ("STREAM.MSG.GET", "DIRECT.GET", "STREAM.MSG.DELETE", "STREAM.PURGE", "STREAM.CREATE", "STREAM.DELETE"):
        assert not allows(producer, f"$JS.API.{verb}.OBJ_requests")
    assert not allows(producer, "$JS.API.CONSUMER.CREATE.OBJ_requests.x")


def test_no_user_may_publish_on_any_reply_subject() -> None:
    assert "allow_responses" not in nats_conf()


NAMES = st.text("abzAZ09_-", min_size=1, max_size=64)


@given(NAMES, NAMES)
def test_a_user_of_a_client_publishes_below_its_own_name_only(name: str, other: str) -> None:
    may = permissions_of_broker_user(name)
    assert allows(may.publish, f"by.{name}.infer.m")
    assert allows(may.publish, f"by.{name}.infer.m.v1")
    assert allows(may.publish, f"by.{name}.flow.gateway.1")
    assert allows(may.subscribe, f"_INBOX.{name}.1.2")
    assert allows(permissions()["gateway"].publish, f"_INBOX.{name}.1.2")
    assert allows(permissions()["gateway"].publish, f"answers.{name}.1")
    assert allows(may.publish, f"by.{other}.infer.m") == (name == other)
    assert allows(may.subscribe, f"_INBOX.{other}.1") == allows(may.subscribe, f"answers.{other}.1") == (name == other)
    plain = (
        "infer.m",
        "infer.m.v1",
        "flow.g.1",
        "event.m",
        "batch.m",
        "event.m.job.x",
        "result.m.x",
        "$O.requests.C.x",
    )
    assert not [subject for subject in plain if allows((*may.publish, *may.subscribe), subject)]
    assert not [subject for subject in may.publish if subject.startswith("$JS")]


def test_nobody_else_publishes_for_a_user_of_a_client() -> None:
    for may in permissions().values():
        assert not allows(may.publish, "by.alice.infer.m")
        assert not allows(may.publish, "by.alice.flow.gateway.1")


def test_users_of_clients_are_written_beside_those_of_weir() -> None:
    text = nats_conf(["gateway"], broker_users=["camera-7", "orders"])
    assert 'user: "camera-7", password: $WEIR_USER_CAMERA_7_PASSWORD' in text
    assert '"by.orders.infer.*"' in text
    assert "weir-producer" not in text
    assert text.count("password:") == 3


@pytest.mark.parametrize(
    "name", ["", "a.b", "*", ">", "a b", 'a"', "ä", "a" * 65, "gateway", "console", "weir-gateway"]
)
def test_names_that_users_of_clients_cannot_have(name: str) -> None:
    with pytest.raises(ValueError, match=r"must have|own users"):
        check_broker_users(["fine", name])
    with pytest.raises(ValueError, match="'"):
        nats_conf(broker_users=[name])


@given(st.lists(NAMES, max_size=4))
def test_users_of_clients_share_no_password(names: list[str]) -> None:
    try:
        text = nats_conf([], broker_users=names)
    except ValueError:
        folded = {name.upper().replace("-", "_") for name in names}
        assert len(folded) < len(names) or any(name in USERS or name.startswith("weir-") for name in names)
    else:
        variables = [line.partition("password: ")[2] for line in text.splitlines() if "password: " in line]
        assert len(set(variables)) == len(variables) == len(names)


def test_the_configuration_holds_no_password() -> None:
    text = nats_conf(["worker"])
    assert "password: $WEIR_WORKER_PASSWORD" in text
    assert "weir-gateway" not in text


def test_only_the_operator_writes_keys_and_neither_workers_nor_producers_read_them() -> None:
    table = permissions()
    writes = ("$KV.access_keys.a", "$JS.API.STREAM.CREATE.KV_access_keys")
    assert [user for user in table if any(allows(table[user].publish, subject) for subject in writes)] == ["admin"]
    for verb in ("STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE", "STREAM.UPDATE"):
        assert not any(allows(may.publish, f"$JS.API.{verb}.KV_access_keys") for may in table.values())
    readers = ["gateway", "admin", "console"]
    assert [user for user in table if allows(table[user].subscribe, "kv.access_keys.a")] == readers
    for verb in ("STREAM.MSG.GET.{}", "DIRECT.GET.{}", "CONSUMER.CREATE.{}", "CONSUMER.CREATE.{}.x"):
        subject = f"$JS.API.{verb.format('KV_access_keys')}"
        assert [user for user in table if allows(table[user].publish, subject)] == readers

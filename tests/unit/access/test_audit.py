"""What is an event of the audit log, how its strings are bounded, and how refusals are counted."""

from __future__ import annotations

import msgspec
import pytest

from weir.access.audit import (
    MAX_MERGING,
    MAX_TEXT,
    NO_AUDIT,
    TOO_MANY_KINDS,
    AuditEvent,
    AuditMerge,
    event_of,
    is_audited,
)
from weir.access.policy.actions import Action
from weir.access.principal import NOBODY, Principal, Proof

ALICE = Principal("alice", "red", frozenset(["user"]), Proof.KEY, "k-17")
ROUTE = "POST /v2/repository/models/{model}/load"


def refused(time_s: float, model: str = "resnet", principal: Principal = ALICE, why: str = "no rule") -> AuditEvent:
    return event_of(time_s, "http", ROUTE, principal, Action.LOAD, allowed=False, why=why, model=model)


def allowed(time_s: float, action: Action = Action.LOAD) -> AuditEvent:
    return event_of(time_s, "http", ROUTE, ALICE, action, allowed=True, why="rule 1", model="resnet", version=2)


# Events


def test_an_event_names_the_principal_and_what_it_did() -> None:
    document = msgspec.json.decode(msgspec.json.encode(allowed(5.0)))
    assert document == {
        "time_s": 5.0,
        "door": "http",
        "action": "load",
        "operation": ROUTE,
        "allowed": True,
        "why": "rule 1",
        "principal": "alice",
        "tenant": "red",
        "credential": "k-17",
        "proof": "key",
        "model": "resnet",
        "version": 2,
    }


@pytest.mark.parametrize("text", ["a\nb", "a\x1b[31m", "a\u2028b", "a\ud800b", "a\x00"])
def test_strings_of_clients_can_not_forge_a_line(text: str) -> None:
    event = event_of(1.0, text, text, ALICE._replace(name=text), Action.LOAD, allowed=True, model=text, request_id=text)
    line = msgspec.json.encode(event).decode()
    assert line.isprintable()
    assert "\\u" not in line
    assert "\\n" not in line
    assert event.model.startswith("a\N{REPLACEMENT CHARACTER}")


def test_strings_of_clients_are_bounded() -> None:
    text = "x" * (1 << 20)
    event = event_of(
        1.0, "http", text, ALICE._replace(name=text, tenant=text), Action.LOAD,
        allowed=False, why=text, model=text, request_id=text, client=text,
    )  # fmt: skip
    assert len(msgspec.json.encode(event)) < 8 * MAX_TEXT
    assert event.model == "x" * (MAX_TEXT - 1) + "…"


@pytest.mark.parametrize("action", list(Action))
def test_every_refusal_is_an_event(action: Action) -> None:
    assert is_audited(action, False)


def test_what_changes_nothing_and_reads_the_own_is_no_event() -> None:
    assert {action.value for action in Action if not is_audited(action, True)} == {
        "health", "metadata", "infer", "statistics", "metrics", "console-read",
    }  # fmt: skip


def test_without_an_audit_log_events_are_dropped() -> None:
    NO_AUDIT.record(allowed(1.0))


# Counting


def test_an_allowed_event_is_complete_at_once() -> None:
    merge = AuditMerge()
    assert merge.add(allowed(1.0)) == [allowed(1.0)]
    assert merge.add(allowed(1.1)) == [allowed(1.1)]


def test_allowed_inference_is_no_event() -> None:
    merge = AuditMerge()
    assert merge.add(allowed(1.0, Action.INFER)) == []
    assert merge.take_all() == []


def test_equal_refusals_within_a_second_are_one_event() -> None:
    merge = AuditMerge()
    for tenth in range(10):
        assert merge.add(refused(1.0 + tenth / 10)) == []
    assert merge.expire(1.99) == []
    (event,) = merge.expire(2.0)
    assert (event.time_s, event.count, event.model) == (1.0, 10, "resnet")
    assert merge.expire(3.0) == []


@pytest.mark.parametrize(
    "other",
    [
        refused(1.0, "bert"),
        refused(1.0, principal=NOBODY),
        refused(1.0, why="the key is expired"),
        event_of(1.0, "grpc", ROUTE, ALICE, Action.LOAD, allowed=False, why="no rule", model="resnet"),
        event_of(1.0, "http", ROUTE, ALICE, Action.TRACE, allowed=False, why="no rule", model="resnet"),
    ],
)
def test_refusals_that_differ_are_events_of_their_own(other: AuditEvent) -> None:
    merge = AuditMerge()
    merge.add(refused(1.0))
    merge.add(other)
    assert [event.count for event in merge.take_all()] == [1, 1]


def test_the_next_event_completes_those_whose_time_is_over() -> None:
    merge = AuditMerge()
    merge.add(refused(1.0))
    assert merge.add(allowed(2.5)) == [refused(1.0), allowed(2.5)]


def test_a_client_that_makes_up_models_fills_no_memory() -> None:
    merge = AuditMerge()
    for number in range(3 * MAX_MERGING):
        merge.add(refused(1.0, f"model-{number}"))
    events = merge.take_all()
    assert len(events) == MAX_MERGING + 1
    assert (events[-1].why, events[-1].model, events[-1].count) == (TOO_MANY_KINDS, "", 2 * MAX_MERGING)
    assert sum(event.count for event in events) == 3 * MAX_MERGING


def test_a_clock_that_goes_back_keeps_no_event() -> None:
    merge = AuditMerge()
    merge.add(refused(100.0))
    assert merge.expire(1.0) == [refused(100.0)]

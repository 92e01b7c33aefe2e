"""Which audit events `weir audit` prints, and how."""

from __future__ import annotations

import math

import pytest

from weir.access.audit import AuditEvent, event_of
from weir.access.policy.actions import Action
from weir.access.principal import NOBODY, Principal, Proof
from weir.commands.audit.events import Wanted, show

ALICE = Principal("alice", "red", frozenset(["user"]), Proof.KEY, "k-17")
ALL = Wanted(0.0, math.inf, False, "", "")

LOAD = event_of(
    100.0, "http", "POST /load", ALICE, Action.LOAD, allowed=True, why="rule 1", model="resnet50", version=2
)  # fmt: skip
REFUSAL = event_of(200.0, "grpc", "ModelInfer", NOBODY, Action.INFER, allowed=False, why="no rule", model="bert")
LOGS = event_of(300.0, "http", "POST /logs", ALICE, Action.LOGS, allowed=True, why="rule 2")
REFUSAL.count = 7


@pytest.mark.parametrize(
    ("wanted", "events"),
    [
        (ALL, [LOAD, REFUSAL, LOGS]),
        (ALL._replace(since_s=200.0), [REFUSAL, LOGS]),
        (ALL._replace(until_s=200.0), [LOAD, REFUSAL]),
        (ALL._replace(denied=True), [REFUSAL]),
        (ALL._replace(principal="alice"), [LOAD, LOGS]),
        (ALL._replace(model="res*"), [LOAD]),
        (ALL._replace(model="*"), [LOAD, REFUSAL]),
        (ALL._replace(denied=True, principal="alice"), []),
    ],
)
def test_events_are_selected(wanted: Wanted, events: list[AuditEvent]) -> None:
    assert [event for event in (LOAD, REFUSAL, LOGS) if wanted.has(event)] == events


def test_the_table_has_a_row_for_each_event(capsys: pytest.CaptureFixture[str]) -> None:
    show([LOAD, REFUSAL], as_json=False)
    title, load, refusal = capsys.readouterr().out.splitlines()
    assert title.split() == ["when", "principal", "action", "model", "door", "operation", "client", "why"]
    assert " ".join(load.split()) == "1970-01-01 00:01:40Z allowed alice load resnet50:2 http POST /load - rule 1"
    assert " ".join(refusal.split()) == "1970-01-01 00:03:20Z denied ×7 - infer bert grpc ModelInfer - no rule"


def test_json_has_one_object_for_each_event(capsys: pytest.CaptureFixture[str]) -> None:
    show([LOAD, REFUSAL], as_json=True)
    assert capsys.readouterr().out.count('{"time_s":') == 2


def test_no_event_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    show([], as_json=False)
    assert capsys.readouterr().out == "no audit events\n"

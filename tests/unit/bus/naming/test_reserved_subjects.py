"""Subjects that a response may be published on."""

from __future__ import annotations

import inspect

import pytest

from weir.bus.message import Message
from weir.bus.naming import durable_subjects, subjects
from weir.bus.naming.permissions import ALL_USERS
from weir.bus.naming.reserved_subjects import MAX_SUBJECT_LENGTH, RESERVED_TOKENS, may_reply_to, subject_problem

NOT_SUBJECTS = {
    "token",
    "untoken",
    "infer_target",
    "publisher",
    "durable_target",
    "is_durable_target",
    "stream_of",
    "canonical",
    "durable_filters",
    "any_job_event",
    "registry_key",
    "settings_key",
    "parse_settings_key",
    "region_key",
    "sequence_key",
    "sequences_key",
    "live_consumer",
    "live_stream",
    "queue_token",
    "role_inbox",
    "consumer_of",
    "durable_consumer",
    "repository_bucket",
    "callback",
    "callback_url",
}


def own_subjects() -> set[str]:
    """The first token of each subject that Weir has."""
    found: set[str] = set()
    for module in (subjects, durable_subjects):
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and name not in NOT_SUBJECTS:
                arguments = [
                    1 if "int" in str(p.annotation) else "x" for p in inspect.signature(value).parameters.values()
                ]
                found.add(value(*arguments).split(".")[0])
            elif isinstance(value, str) and name.isupper() and "." in value:
                found.add(value.split(".")[0])
            elif isinstance(value, tuple) and name.isupper():
                found.update(subject.split(".")[0] for subject in value)
    return found


def test_all_subjects_of_ours_are_reserved() -> None:
    # Whoever may publish requests may name a URL for a callback.
    plain = {token for token in own_subjects() if token[0] != "$"} - {"callback"}
    assert plain | {subjects.role_inbox(role) for role in ALL_USERS} == RESERVED_TOKENS


@pytest.mark.parametrize(
    "subject", ["answers", "answers.mine", "_INBOX.abc.1", "_INBOX_shop.abc", "ä.b", "replying.to.me", "a" * 1024]
)
def test_others_may_be_answered_on(subject: str) -> None:
    assert subject_problem(subject) == ""


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("", "1 to 1024"),
        ("a" * (MAX_SUBJECT_LENGTH + 1), "1 to 1024"),
        ("a b", "spaces"),
        ("a\tb", "control"),
        ("a\r\nPUB x 0\r\n", "control"),
        ("a\u00a0b", "control"),
        ("a\ufffd", "control"),
        (".a", "empty tokens"),
        ("a..b", "empty tokens"),
        ("a.", "empty tokens"),
        ("a.*", "wildcards"),
        (">", "wildcards"),
        ("a>", "wildcards"),
        ("$JS.API.STREAM.DELETE.QUEUE", "'$JS', which is reserved"),
        ("$SYS", "reserved"),
        ("$KV.jobs.x", "reserved"),
        ("event.model", "'event', which is reserved"),
        ("reply.gateway", "reserved"),
        ("_INBOX_admin.abc", "'_INBOX_admin', which is reserved"),
        ("_INBOX_gateway", "reserved"),
        ("$SRV.PING", "reserved"),
        ("$O.requests.M.x", "reserved"),
        ("live.model", "reserved"),
    ],
)
def test_what_is_no_place_for_an_answer(subject: str, problem: str) -> None:
    assert problem in subject_problem(subject)


@pytest.mark.parametrize(
    ("reply", "is_allowed"),
    [
        ("", False),
        ("fetched.gateway-1.7.0", True),
        ("_INBOX.abc", True),
        ("result.a.forged", False),
        ("$JS.API.STREAM.DELETE.QUEUE", False),
        ("_INBOX_admin.abc", False),
        ("fetch.worker-1", False),
    ],
)
def test_a_question_between_roles_is_answered_where_such_answers_belong(reply: str, is_allowed: bool) -> None:
    question = Message("fetch.worker-2", reply, b"", "")
    assert may_reply_to(question, subjects.fetched("")) == is_allowed


def test_refused_reply_subjects_are_logged_but_not_each_of_them(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1000):
        assert not may_reply_to(Message("infer.simple", f"result.simple.{number}", b"", ""))
    assert len([record for record in caplog.records if "reply subject" in record.message]) <= 2

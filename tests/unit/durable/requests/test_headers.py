"""What the headers of durable requests may say, and what is read of those that are refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.durable.requests.headers import DurableHeaders, check_id, read_durable_headers, read_valid_headers
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, InferRequest

ALL = {
    "nats-msg-id": "order 17/ä",
    "weir-tenant": "acme",
    "weir-deadline-ms": "1800000000000",
    "weir-priority": "2",
    "weir-reply-to": "answers.acme",
    "weir-sequence-id": "42",
    "weir-sequence-start": "true",
    "weir-sequence-end": "0",
    "weir-result-ttl-secs": "60",
    "weir-object": "big",
    "traceparent": "00-1-2-01",
    "tracestate": "a=b",
    "content-type": "application/msgpack",
    "inference-header-content-length": "5",
    "x-other": "kept out",
}


def test_all_that_can_be_said() -> None:
    terms = read_durable_headers(ALL)
    assert (terms.id, terms.tenant, terms.reply_to) == ("order 17/ä", "acme", "answers.acme")
    assert (terms.deadline_ms, terms.result_ttl_s, terms.object_name) == (1_800_000_000_000, 60, "big")
    assert terms.content_headers == {"content-type": "application/msgpack", "inference-header-content-length": "5"}
    request = InferRequest("m")
    request.sequence_flags = SEQUENCE_END
    terms.common.apply(request)
    assert (request.deadline_ms, request.priority, request.correlation_id) == (1_800_000_000_000, 2, 42)
    assert (request.sequence_flags, request.traceparent, request.tracestate) == (SEQUENCE_START, "00-1-2-01", "a=b")


def test_what_headers_do_not_say_stays_as_the_body_says() -> None:
    terms = read_durable_headers({})
    assert terms == DurableHeaders()
    assert terms.deadline_ms == 0
    request = InferRequest("m")
    request.priority, request.correlation_id, request.sequence_flags = 3, "s", SEQUENCE_START | SEQUENCE_END
    terms.common.apply(request)
    assert (request.priority, request.correlation_id, request.sequence_flags) == (3, "s", 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nats-msg-id", "x" * 129),
        ("nats-msg-id", "a\x00b"),
        ("nats-msg-id", "a\u2028b"),
        ("nats-msg-id", "\ufffd"),
        ("weir-tenant", "x" * 129),
        ("weir-tenant", "\x1b[31m"),
        ("weir-object", "x" * 257),
        ("weir-reply-to", "a.*"),
        ("weir-reply-to", "a b"),
        ("weir-reply-to", "$JS.API.STREAM.DELETE.QUEUE"),
        ("weir-reply-to", "event.m"),
        ("weir-reply-to", "reply.gateway"),
        ("weir-result-ttl-secs", "0"),
        ("weir-result-ttl-secs", "1.5"),
        ("weir-result-ttl-secs", "9" * 18),
        ("weir-deadline-ms", "soon"),
        ("weir-priority", "-1"),
        ("weir-sequence-start", "maybe"),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_rest_can_be_read(name: str, value: str) -> None:
    with pytest.raises(WeirError) as refused:
        read_durable_headers(ALL | {name: value})
    assert refused.value.code is ErrorCode.INVALID_ARG
    assert len(refused.value.message) < 500
    assert refused.value.message.isprintable()
    good, readable = read_durable_headers(ALL), read_valid_headers(ALL | {name: value})
    fields = {"nats-msg-id": "id", "weir-tenant": "tenant", "weir-object": "object_name", "weir-reply-to": "reply_to"}
    for header, field in fields.items():
        assert getattr(readable, field) == ("" if header == name else getattr(good, field))


def test_an_id_at_its_limit() -> None:
    assert read_durable_headers({"nats-msg-id": "x" * 128}).id == "x" * 128
    assert check_id("") == ""
    with pytest.raises(WeirError, match="the id of a durable request cannot be longer than 128 characters"):
        check_id("x" * 129)


@settings(deadline=None, database=None, max_examples=500)
@given(st.dictionaries(st.sampled_from(sorted(ALL)), st.text(max_size=20) | st.sampled_from(sorted(ALL.values()))))
def test_any_headers_are_read_or_refused(headers: dict[str, str]) -> None:
    with suppress(WeirError):
        read_durable_headers(headers).common.apply(InferRequest("m"))
    read_valid_headers(headers)

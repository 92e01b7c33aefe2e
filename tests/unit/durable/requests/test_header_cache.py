"""Headers that came before are read as those that did not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.bus.nats.headers import parse_headers
from weir.durable.requests.headers import (
    MAX_BLOCKS,
    DurableHeaders,
    HeaderCache,
    read_durable_headers,
    read_valid_headers,
)
from weir.schemas.core.errors import WeirError
from weir.schemas.core.request_limits import DEFAULT_LIMITS

LINES = st.sampled_from(
    [
        b"Nats-Msg-Id: a-1",
        b"Nats-Msg-Id:a-2",
        b"Nats-Msg-Id:  a-3 ",
        b"nats-msg-id: a-4",
        b"NATS-MSG-ID: a-5",
        b"Nats-Msg-Id: one two",
        b"Nats-Msg-Id: " + "ä".encode(),
        b"Nats-Msg-Id: " + b"x" * 129,
        b"Nats-Msg-Id: ",
        b"Nats-Msg-Id\r: a-6",
        b"Weir-Id: again",
        b"Nats-Batch-Id: b",
        b"Nats-Batch-Sequence: 7",
        b"Nats-Batch-Commit: 1",
        b"Weir-Tenant: acme",
        b"Weir-Tenant: a\x00b",
        b"Weir-Deadline-Ms: 1800000000000",
        b"Weir-Priority: none",
        b"Weir-Reply-To: answers.acme",
        b"Inference-Header-Content-Length: 5",
        b"traceparent: 00-1-2-01",
        b"no header",
        b"",
    ]
)


def read_anew(block: bytes) -> tuple[DurableHeaders, str]:
    headers = parse_headers(block)
    try:
        return read_durable_headers(headers, DEFAULT_LIMITS), ""
    except WeirError as error:
        return read_valid_headers(headers), error.message


@settings(deadline=None, database=None, max_examples=150)
@given(st.lists(st.lists(LINES, max_size=5), min_size=1, max_size=8))
def test_what_is_known_is_read_as_if_it_was_new(blocks: list[list[bytes]]) -> None:
    known = HeaderCache(DEFAULT_LIMITS)
    for lines in blocks * 2:
        block = b"\r\n".join([b"NATS/1.0", *lines, b"", b""])
        terms, error = known.read(block)
        assert (terms, error.message if error else "") == read_anew(block)


def test_many_that_come_once_don_t_keep_others_out() -> None:
    known = HeaderCache(DEFAULT_LIMITS)
    for number in range(MAX_BLOCKS * 3):
        terms, _ = known.read(b"NATS/1.0\r\nNats-Msg-Id: %d\r\nWeir-Reply-To: answers.%d\r\n\r\n" % (number, number))
        assert (terms.id, terms.reply_to) == (str(number), f"answers.{number}")
    first, _ = known.read(b"NATS/1.0\r\nNats-Msg-Id: a\r\nWeir-Tenant: acme\r\n\r\n")
    second, _ = known.read(b"NATS/1.0\r\nNats-Msg-Id: b\r\nWeir-Tenant: acme\r\n\r\n")
    assert (first.id, second.id) == ("a", "b")
    assert first.common is second.common

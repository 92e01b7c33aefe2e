"""Header blocks: decoding, caching, and validation (RFC 7541; RFC 9113, sections 8.2 and 8.3)."""

import pytest
from hpack import Decoder, Encoder, HeaderTuple, NeverIndexedHeaderTuple
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gateway.http2_peer import REQUEST
from weir.gateway.http2.frames import Http2ConnectionError, Http2ErrorCode, Http2StreamError
from weir.gateway.http2.headers import HeaderDecoder, RequestHead, encode_headers

VALUES = st.sampled_from([b"a", b"b", b"a long value" * 200, b"\xc3\xa4"])
FIELDS = st.lists(st.tuples(st.sampled_from([b"x-a", b"x-b", b"user-agent"]), VALUES, st.booleans()), max_size=3)


@settings(deadline=None)
@given(st.lists(st.tuples(FIELDS, st.sampled_from([None, None, 0, 64, 4096])), max_size=12))
def test_what_is_remembered_is_what_is_meant(
    requests: list[tuple[list[tuple[bytes, bytes, bool]], int | None]],
) -> None:
    encoder = Encoder()
    decoder: HeaderDecoder[RequestHead] = HeaderDecoder(lambda head: head)
    for fields, table_size in requests:
        if table_size is not None:
            encoder.header_table_size = table_size
        kinds = {True: HeaderTuple, False: NeverIndexedHeaderTuple}
        block = encoder.encode([*REQUEST, *(kinds[indexed](name, value) for name, value, indexed in fields)])
        assert decoder.request(block).fields == [*REQUEST[4:], *((name, value) for name, value, _ in fields)]


def test_a_block_that_changes_no_table_is_interpreted_once() -> None:
    interpreted = []
    decoder: HeaderDecoder[RequestHead] = HeaderDecoder(lambda head: interpreted.append(head) or head)
    encoder = Encoder()
    blocks = [encoder.encode(REQUEST) for _ in range(4)]
    assert len({id(decoder.request(block)) for block in blocks}) == 2  # the first one fills the table
    assert len(interpreted) == 2


def test_an_index_means_the_newest_entry_though_its_block_was_seen_before() -> None:
    encoder = Encoder()
    decoder: HeaderDecoder[RequestHead] = HeaderDecoder(lambda head: head)
    seen = []
    for value in (b"1", b"2"):
        encoder.encode([(b"x", value)])
        decoder.fields(encode_indexed(b"x", value))
        seen.append(decoder.request(encode_headers(REQUEST) + b"\xbe").fields[-1])
    assert seen == [(b"x", b"1"), (b"x", b"2")]


def encode_indexed(name: bytes, value: bytes) -> bytes:
    return b"\x40" + bytes([len(name)]) + name + bytes([len(value)]) + value


def test_what_is_encoded_needs_no_context() -> None:
    fields = [(b":status", b"200"), (b"grpc-status", b"0"), (b"content-type", b"application/grpc")]
    decoder = Decoder()
    for _ in range(2):
        assert list(decoder.decode(encode_headers(fields), raw=True)) == fields
    assert not decoder.header_table.dynamic_entries


MALFORMED = {
    "no path": REQUEST[:2],
    "an empty path": [*REQUEST[:2], (b":path", b"")],
    "two paths": [*REQUEST, (b":path", b"/")],
    "a pseudo-header after others": [*REQUEST[:2], (b"x", b"y"), REQUEST[2]],
    "an unknown pseudo-header": [(b":protocol", b"x"), *REQUEST],
    "a response's pseudo-header": [(b":status", b"200"), *REQUEST],
    "upper case": [*REQUEST, (b"X-A", b"1")],
    "an empty name": [*REQUEST, (b"", b"1")],
    "a line break": [*REQUEST, (b"x", b"1\r\ny: 2")],
    "a NUL": [*REQUEST, (b"x", b"\0")],
    "a connection": [*REQUEST, (b"connection", b"close")],
    "a transfer encoding": [*REQUEST, (b"transfer-encoding", b"chunked")],
    "te": [*REQUEST[:5], (b"te", b"gzip")],
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED)
def test_malformed_requests_end_their_stream(fields: list[tuple[bytes, bytes]]) -> None:
    decoder: HeaderDecoder[RequestHead] = HeaderDecoder(lambda head: head)
    for _ in range(2):
        with pytest.raises(Http2StreamError) as caught:
            decoder.request(encode_headers(fields))
        assert caught.value.code == Http2ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "block,code",
    [
        (b"\x80", Http2ErrorCode.COMPRESSION_ERROR),  # index 0
        (b"\xff\xff\xff\xff\xff\xff", Http2ErrorCode.COMPRESSION_ERROR),
        (b"\x00\x7f", Http2ErrorCode.COMPRESSION_ERROR),
        (b"\x3f\xff\xff\x03", Http2ErrorCode.COMPRESSION_ERROR),  # a table larger than we allow
        (encode_indexed(b"x", b"y" * 100) + b"\xbe" * 1000, Http2ErrorCode.ENHANCE_YOUR_CALM),  # a bomb
    ],
)
def test_blocks_that_cannot_be_decoded_end_the_connection(block: bytes, code: Http2ErrorCode) -> None:
    with pytest.raises(Http2ConnectionError) as caught:
        HeaderDecoder(lambda head: head).request(block)
    assert caught.value.code == code

"""Compressed bodies: any body comes back, nothing grows beyond its limit, and weights decide."""

import gzip
import random
import zlib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weir.gateway.http.compression import BodyInflation, deflate, is_compressed, response_encoding
from weir.schemas.core.errors import ErrorCode, WeirError

LIMIT = 4 << 20


@given(st.lists(st.binary(max_size=5000), max_size=5), st.sampled_from(["gzip", "deflate"]), st.integers(1, 10_000))
def test_a_body_comes_back(chunks: list[bytes], encoding: str, step: int) -> None:
    body = b"".join(chunks)
    compressed = deflate(list(chunks), encoding)
    assert (gzip.decompress(compressed) if encoding == "gzip" else zlib.decompress(compressed)) == body
    inflation = BodyInflation(compressed, LIMIT)
    size = step
    while not inflation.advance(size):
        assert len(inflation.content) == size
        size += step
    assert inflation.content == body


def finished(inflation: BodyInflation) -> bytearray:
    assert inflation.advance(LIMIT + 2)
    return inflation.content


def test_what_one_call_begins_another_ends() -> None:
    body = bytes(range(256)) * 9000
    inflation = BodyInflation(gzip.compress(body), LIMIT)
    assert not inflation.advance(1000)
    assert finished(inflation) == body


def test_a_large_body_that_can_hardly_be_compressed() -> None:
    body = random.Random(5).randbytes(3 << 20)
    assert finished(BodyInflation(gzip.compress(body), LIMIT)) == body
    with pytest.raises(WeirError, match="inconsistent stream"):
        finished(BodyInflation(gzip.compress(body)[:-9], LIMIT))


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT])
def test_content_of_just_the_limit(size: int) -> None:
    assert len(finished(BodyInflation(zlib.compress(bytes(size)), LIMIT))) == size


@pytest.mark.parametrize("size", [LIMIT + 1, 64 * LIMIT])
def test_content_beyond_the_limit_is_rejected_before_it_is_decompressed(size: int) -> None:
    inflation = BodyInflation(gzip.compress(bytes(size)), LIMIT)
    with pytest.raises(WeirError, match="exceeds the maximum allowed input size of 4194304 bytes") as refusal:
        finished(inflation)
    assert refusal.value.code == ErrorCode.INVALID_ARG
    assert len(inflation.content) == LIMIT + 1


def test_a_bomb_within_a_step() -> None:
    inflation = BodyInflation(gzip.compress(bytes(10_000)), 100)
    with pytest.raises(WeirError):
        inflation.advance(5000)
    assert len(inflation.content) == 101


@given(st.binary(min_size=1, max_size=300))
def test_malformed_streams_are_rejected(junk: bytes) -> None:
    assume(junk[:1] not in b"\x1f\x78")
    with pytest.raises(WeirError, match="inconsistent stream") as refusal:
        finished(BodyInflation(junk, LIMIT))
    assert refusal.value.code == ErrorCode.INVALID_ARG


@given(st.binary(min_size=1, max_size=300), st.integers(1, 20))
def test_truncated_streams_are_rejected(body: bytes, missing: int) -> None:
    with pytest.raises(WeirError, match="inconsistent stream"):
        finished(BodyInflation(zlib.compress(body)[: -min(missing, 8)], LIMIT))


def test_an_empty_body_is_rejected() -> None:
    with pytest.raises(WeirError, match="nothing to be decompressed"):
        BodyInflation(b"", LIMIT)


def test_either_kind_under_either_name_and_what_follows_it() -> None:
    assert finished(BodyInflation(zlib.compress(b"x"), LIMIT)) == b"x"
    assert finished(BodyInflation(gzip.compress(b"x") + b"more", LIMIT)) == b"x"


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        (b"", ""),
        (b"gzip", "gzip"),
        (b"deflate", "deflate"),
        (b"identity", ""),
        (b"br", ""),
        (b"*", ""),
        (b"gzip, deflate", "gzip"),
        (b"deflate, gzip", "deflate"),
        (b"identity, gzip", ""),
        (b"gzip;q=0.5, deflate;q=0.8", "deflate"),
        (b"gzip; q=0.2, deflate; q=0.5", "deflate"),
        (b"gzip;q=0.5, identity;q=0.8", ""),
        (b"identity;q=0.5,gzip", "gzip"),
        (b"deflate;q=1.0,gzip;q=1", "deflate"),
        (b"gzip;q=0", ""),
        (b"gzip;q=-1", ""),
        (b"gzip;q=nan", ""),
        (b"gzip;q=abc, deflate;q=0.1", "deflate"),
        (b"gzip;q=", ""),
        (b"br;q=1.0, gzip;q=0.1, *;q=0.5", "gzip"),
        (b"GZIP", "gzip"),
        (b"gzip;level=1;q=0.3,deflate;q=0.2", "gzip"),
        (b"\xff;q=1,,;,=", ""),
    ],
)
def test_the_weights_of_a_request_decide(accepted: bytes, encoding: str) -> None:
    assert response_encoding(accepted) == encoding


@given(st.binary(max_size=100))
def test_any_accept_encoding_has_a_response(accepted: bytes) -> None:
    assert response_encoding(accepted) in ("", "gzip", "deflate")


def test_which_bodies_are_compressed() -> None:
    assert is_compressed(b"gzip")
    assert is_compressed(b"deflate")
    assert not is_compressed(b"identity")
    assert not is_compressed(b"")
    with pytest.raises(WeirError, match="Unsupported compression type") as refusal:
        is_compressed(b"br")
    assert refusal.value.http_status == 501

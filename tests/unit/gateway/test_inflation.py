"""Bounded decompression: any stream comes back step by step, and nothing grows beyond the limit."""

import gzip
import mmap
import weakref
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.gateway.inflation import STEP_BYTES, Inflation, inflate

LIMIT = 100_000
GZIP = 15 + 16


class Malformed(Exception):
    pass


class TooLarge(Exception):
    pass


class Checked(Inflation):
    def malformed(self) -> Exception:
        return Malformed()

    def too_large(self) -> Exception:
        return TooLarge()


@given(st.binary(max_size=5000), st.integers(1, 2000))
def test_steps_have_the_requested_size(body: bytes, step: int) -> None:
    inflation = Checked(gzip.compress(body), GZIP, LIMIT)
    size = step
    while not inflation.advance(size):
        assert len(inflation.content) == size
        size += step
    assert inflation.content == body
    assert not inflation.has_trailing_data


@pytest.mark.parametrize(("size", "fits"), [(LIMIT, True), (LIMIT + 1, False), (100 * LIMIT, False)])
def test_content_is_bounded(size: int, fits: bool) -> None:
    inflation = Checked(gzip.compress(bytes(size)), GZIP, LIMIT)
    if fits:
        assert inflation.advance(2 * LIMIT)
    else:
        with pytest.raises(TooLarge):
            inflation.advance(2 * LIMIT)
        assert len(inflation.content) == LIMIT + 1


@pytest.mark.parametrize(
    "compressed", [b"junk", gzip.compress(b"body")[:-3], zlib.compress(b"body")], ids=["junk", "cut off", "deflate"]
)
def test_a_malformed_stream_raises(compressed: bytes) -> None:
    with pytest.raises(Malformed):
        Checked(compressed, GZIP, LIMIT).advance(LIMIT)


def test_what_follows_the_stream_is_noticed() -> None:
    inflation = Checked(gzip.compress(b"body") + b"more", GZIP, LIMIT)
    assert inflation.advance(LIMIT)
    assert inflation.has_trailing_data


def test_an_unwanted_step_ends_early() -> None:
    inflation = Checked(gzip.compress(bytes(LIMIT)), GZIP, LIMIT)
    inflation.is_wanted = False
    assert inflation.advance(LIMIT)
    assert not inflation.content


async def test_steps_in_threads_are_charged_one_by_one() -> None:
    charges: list[int] = []

    def charge(size: int) -> bool:
        charges.append(size)
        return True

    body = bytes(2 * STEP_BYTES + 5)
    inflation = Checked(gzip.compress(body), GZIP, 4 * STEP_BYTES)
    assert not inflation.advance(3)
    await inflate(inflation, charge, TooLarge, 3)
    assert inflation.content == body
    assert (charges[0], sum(charges)) == (STEP_BYTES, len(body) - 3)


async def test_large_content_has_pages_of_its_own_that_go_with_the_last_view() -> None:
    body = bytes(range(256)) * (3 * STEP_BYTES // 256)
    inflation = Checked(gzip.compress(body), GZIP, 4 * STEP_BYTES)
    assert not inflation.advance(STEP_BYTES // 8)
    assert isinstance(inflation.content.obj, bytearray)
    await inflate(inflation, lambda _size: True, MemoryError)
    view = inflation.content
    assert view == body
    pages = weakref.ref(view.obj)
    assert isinstance(pages(), mmap.mmap)
    inflation.discard()
    assert view[255] == 255
    del view
    assert pages() is None


async def test_without_room_the_steps_end() -> None:
    inflation = Checked(gzip.compress(bytes(3 * STEP_BYTES)), GZIP, 4 * STEP_BYTES)
    sizes: list[int] = []

    def charge(_size: int) -> bool:
        sizes.append(inflation.size_bytes)
        return False

    with pytest.raises(MemoryError):
        await inflate(inflation, charge, MemoryError)
    assert sizes == [STEP_BYTES]
    assert not inflation.content, "given back, though the error keeps the frame that has it"


@pytest.mark.parametrize(
    "compressed", [gzip.compress(bytes(9 * STEP_BYTES)), gzip.compress(bytes(3 * STEP_BYTES))[:-9]]
)
async def test_errors_give_the_content_back(compressed: bytes) -> None:
    inflation = Checked(compressed, GZIP, 4 * STEP_BYTES)
    with pytest.raises((TooLarge, Malformed)) as raised:
        await inflate(inflation, lambda _size: True, MemoryError)
    assert raised.value.__traceback__ is not None
    assert not inflation.content
    assert not inflation.is_wanted

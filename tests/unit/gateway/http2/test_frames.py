"""Frames as bytes (RFC 9113, sections 4 and 6)."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gateway.http2_peer import frame
from weir.gateway.http2 import frames as wire_format
from weir.gateway.http2.frames import (
    MAX_FRAME_BYTES,
    FrameReader,
    Http2ConnectionError,
    Http2ErrorCode,
    Setting,
    read_settings,
)

FRAMES = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**31 - 1), st.binary(max_size=40))
)


@settings(deadline=None)
@given(FRAMES, st.lists(st.integers(0, 400), max_size=8))
def test_frames_are_the_same_however_they_are_cut(frames: list[tuple[int, int, int, bytes]], cuts: list[int]) -> None:
    wire = b"".join(frame(*one) for one in frames)
    edges = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    reader = FrameReader()
    read = [one for start, end in pairwise(edges) for one in reader.feed(wire[start:end])]
    assert [(kind, flags, stream_id, bytes(payload)) for kind, flags, stream_id, payload in read] == frames


def test_the_largest_frame_passes_and_one_more_byte_does_not() -> None:
    assert len(next(FrameReader().feed(frame(0, 0, 1, bytes(MAX_FRAME_BYTES))))[3]) == MAX_FRAME_BYTES
    with pytest.raises(Http2ConnectionError) as caught:
        list(FrameReader().feed(frame(0, 0, 1, bytes(MAX_FRAME_BYTES + 1))[:9]))  # its head is enough
    assert caught.value.code == Http2ErrorCode.FRAME_SIZE_ERROR


def test_the_reserved_bit_of_a_stream_is_ignored() -> None:
    assert next(FrameReader().feed(b"\0\0\0\x06\0\x80\0\0\x01"))[2] == 1


def test_settings_are_read_as_they_are_written() -> None:
    values = {Setting.INITIAL_WINDOW_SIZE: 2**31 - 1, Setting.MAX_FRAME_SIZE: 16384}
    assert dict(read_settings(wire_format.settings(values)[9:])) == values

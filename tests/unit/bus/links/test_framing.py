"""Frames: any division of the bytes gives the same messages, and bytes that are no frame are recognised."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bus.links.framing import (
    HEADER,
    MAX_FRAME_BYTES,
    FrameReader,
    MalformedFrame,
    pack_frames,
    pack_subjects,
    unpack_subjects,
)

MESSAGES = st.lists(st.tuples(st.text("abc.-", max_size=20), st.binary(max_size=300)), max_size=12)


@given(MESSAGES, st.lists(st.integers(1, 64), min_size=1, max_size=50))
def test_frames_are_read_however_their_bytes_arrive(messages: list[tuple[str, bytes]], sizes: list[int]) -> None:
    content, reader, received, at = pack_frames(messages), FrameReader(), [], 0
    while at < len(content):
        size = min(sizes[len(received) % len(sizes)], reader.missing_bytes + 7)
        received += reader.feed(content[at : at + size])
        at += size
    assert received == [(subject.encode(), data) for subject, data in messages]


def test_a_reader_asks_for_what_is_missing_of_a_large_frame() -> None:
    content, reader = pack_frames([("work.w", b"x" * 1_000_000)]), FrameReader()
    assert reader.feed(content[:100]) == []
    assert reader.missing_bytes == len(content) - 100
    ((_, data),) = reader.feed(content[100:])
    assert len(data) == 1_000_000


@pytest.mark.parametrize("size", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_of_an_impossible_size_is_malformed(size: int) -> None:
    with pytest.raises(MalformedFrame, match=f"a frame of {size} bytes"):
        FrameReader().feed(HEADER.pack(size, 0) + b"x")


def test_random_bytes_never_raise_anything_else() -> None:
    drawn = random.Random(5)
    for _ in range(2000):
        reader = FrameReader()
        try:
            for _ in range(4):
                reader.feed(drawn.randbytes(drawn.randrange(40)))
        except MalformedFrame:
            pass


@pytest.mark.parametrize(("subject", "size"), [("s" * 256, 1), ("s", MAX_FRAME_BYTES)])
def test_messages_that_do_not_fit_a_frame_are_rejected(subject: str, size: int) -> None:
    with pytest.raises(ValueError, match="does not fit a frame"):
        pack_frames([(subject, bytes(size))])


def test_an_announcement_names_subjects() -> None:
    assert unpack_subjects(pack_subjects(["reply.g", "done.s"])) == ["reply.g", "done.s"]
    with pytest.raises(MalformedFrame, match="not UTF-8"):
        unpack_subjects(b"\xff\xfe")


@given(MESSAGES, st.lists(st.integers(1, 64), min_size=1, max_size=50), st.integers(0, 300))
def test_frames_that_arrive_in_parts_are_received_in_their_place(
    messages: list[tuple[str, bytes]], sizes: list[int], placed_from: int
) -> None:
    content, reader, at, turn = pack_frames(messages), FrameReader(), 0, 0
    received: list[tuple[bytes, bytes | bytearray]] = []

    def place(subject: bytes, size: int) -> memoryview | None:
        if size < placed_from:
            return None
        received.append((subject, bytearray(size)))
        return memoryview(received[-1][1])

    while at < len(content):
        turn += 1
        size = sizes[turn % len(sizes)]
        if reader.target is not None:
            size = min(size, len(reader.target), len(content) - at)
            reader.target[:size] = content[at : at + size]
            reader.fill(size)
        else:
            received += reader.feed(content[at : at + size])
            reader.begin_placing(place)
        at += size
    assert received == [(subject.encode(), data) for subject, data in messages]


def test_a_limit_on_frames_is_kept() -> None:
    reader = FrameReader(max_frame_bytes=10)
    assert reader.feed(pack_frames([("s", bytes(8))])) == [(b"s", bytes(8))]
    with pytest.raises(MalformedFrame, match="a frame of 11 bytes"):
        reader.feed(pack_frames([("s", bytes(9))]))

"""How requests that leave together are put into frames."""

from __future__ import annotations

from calls.outbox import MAX_FRAME_BYTES, frames_of
from schemas.messages import Part
from schemas.requests import SEQUENCE_END, SEQUENCE_START


def part(key: int, flags: int = 0, size: int = 1) -> Part:
    return Part(key, -1, 1, "", 0, 0, 0, 0, flags, "", bytes(size))


def keys(*parts: Part) -> list[list[int]]:
    return [[part.key for part in frame] for frame in frames_of(list(parts))]


def test_requests_share_frames_up_to_a_size() -> None:
    assert keys(part(1), part(2), part(3, size=MAX_FRAME_BYTES), part(4)) == [[1, 2], [3], [4]]


def test_what_starts_a_sequence_travels_alone() -> None:
    """Delivered again for the sake of another, it would start a sequence anew that has gone on since."""
    both = SEQUENCE_START | SEQUENCE_END
    assert keys(part(1), part(2, SEQUENCE_START), part(3), part(4, both), part(5, SEQUENCE_END)) == [
        [1],
        [2],
        [3, 4, 5],
    ]
    assert keys(part(1, SEQUENCE_START), part(2, SEQUENCE_START)) == [[1], [2]]

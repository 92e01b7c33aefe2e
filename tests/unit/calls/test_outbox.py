"""The division of requests into frames."""

from __future__ import annotations

from weir.calls.outbox import MAX_FRAME_BYTES, SMALL_BODY_BYTES, frames_of
from weir.calls.payload_store import FRAME_INLINE_BYTES
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START
from weir.schemas.wire.calls import RequestEnvelope


def part(key: int, flags: int = 0, size: int = 1) -> RequestEnvelope:
    return RequestEnvelope(key, -1, 1, "", 0, 0, 0, 0, flags, "", bytes(size))


def keys(*parts: RequestEnvelope) -> list[list[int]]:
    return [[part.key for part in frame] for frame in frames_of(list(parts))]


def test_requests_share_frames_up_to_a_size() -> None:
    assert keys(part(1), part(2), part(3, size=MAX_FRAME_BYTES), part(4)) == [[1, 2], [3], [4]]


def test_many_small_bodies_need_no_payload_slot() -> None:
    small = [part(key, size=SMALL_BODY_BYTES) for key in range(400)]
    frames = list(frames_of(small))
    assert [len(frame) for frame in frames] == [128, 128, 128, 16]
    assert all(sum(len(each.body) for each in frame) <= FRAME_INLINE_BYTES for frame in frames)
    larger = [part(key, size=SMALL_BODY_BYTES + 1) for key in range(100)]
    assert len(list(frames_of(larger))) == 1


def test_the_first_request_of_a_sequence_has_a_frame_of_its_own() -> None:
    """Delivered again for the sake of another, it would start a sequence anew that has gone on since."""
    both = SEQUENCE_START | SEQUENCE_END
    assert keys(part(1), part(2, SEQUENCE_START), part(3), part(4, both), part(5, SEQUENCE_END)) == [
        [1],
        [2],
        [3, 4, 5],
    ]
    assert keys(part(1, SEQUENCE_START), part(2, SEQUENCE_START)) == [[1], [2]]

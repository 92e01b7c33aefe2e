"""`HeldFrames`: what is held is bounded, and whoever was full is full no more in the end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.held_frames import MAX_ALL_HELD_BYTES, MAX_HELD_BYTES, MIN_HELD_BYTES, AllHeldFrames, HeldFrames

MIB = 1 << 20


def test_a_queue_that_is_full_stays_so_until_half_has_gone() -> None:
    held = HeldFrames(AllHeldFrames())
    assert not held.took(MAX_HELD_BYTES)
    assert held.took(1)
    assert not held.took(1), "it was before"
    assert not held.released(MAX_HELD_BYTES // 2 + 1)
    assert held.released(1)


def test_one_that_holds_little_is_not_held_up_by_others() -> None:
    of_all = AllHeldFrames()
    others = [HeldFrames(of_all) for _ in range(3)]
    for other in others:
        other.took(MAX_ALL_HELD_BYTES // 3 + 1)
    own = HeldFrames(of_all)
    assert not own.took(MIN_HELD_BYTES)
    assert own.took(1)
    assert own.released(MIN_HELD_BYTES // 2 + 1), "what it may always hold is there again"
    others[0].forget()
    assert of_all.size_bytes == 2 * (MAX_ALL_HELD_BYTES // 3 + 1) + MIN_HELD_BYTES // 2


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 64), st.booleans()), max_size=200))
def test_whatever_comes_and_goes(events: list[tuple[int, int, bool]]) -> None:
    """Who pulls only while there is room never holds more than a frame too much, and can go on once all has gone."""
    of_all = AllHeldFrames()
    queues = [HeldFrames(of_all) for _ in range(6)]
    frames: list[list[int]] = [[] for _ in queues]
    for number, mib, comes in events:
        queue, of_queue = queues[number], frames[number]
        if comes and not queue.is_full:
            of_queue.append(mib * MIB)
            queue.took(of_queue[-1])
        elif of_queue and not comes:
            queue.released(of_queue.pop())
        assert of_all.size_bytes == sum(map(sum, frames))
        assert sum(of_queue) <= MAX_HELD_BYTES + 64 * MIB
        assert of_all.size_bytes <= MAX_ALL_HELD_BYTES + len(queues) * (MIN_HELD_BYTES + 64 * MIB)
    for queue, of_queue in zip(queues, frames, strict=True):
        while of_queue:
            queue.released(of_queue.pop())
    assert not any(queue.is_full for queue in queues)

"""One receiver that hangs leaves places for others, and is tried less and less often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weir.durable.api import receivers
from weir.durable.api.receivers import (
    FAILURES,
    MAX_PAUSE_S,
    MAX_POSTS_TO_HOST,
    MAX_POSTS_TO_ONE,
    PAUSE_S,
    ReceiverName,
    Receivers,
    Turn,
)

NOW, LATER, CLOSED = Turn

A, B = (ReceiverName.of("https://hooks.example.com", path) for path in ("/a/b?c", "/b"))


def test_a_receiver_has_its_share_and_others_have_theirs() -> None:
    known = Receivers()
    assert [known.begin(A, 0) for _ in range(MAX_POSTS_TO_ONE + 2)] == [NOW] * MAX_POSTS_TO_ONE + [LATER] * 2
    assert known.begin(B, 0) is NOW
    known.end(A, has_responded=True, now_s=1)
    assert known.begin(A, 1) is NOW


def test_a_host_leaves_places_for_others() -> None:
    known = Receivers()
    names = [ReceiverName.of("http://h", f"/{number}/x") for number in range(MAX_POSTS_TO_HOST + 1)]
    assert [known.begin(name, 0) for name in names] == [NOW] * MAX_POSTS_TO_HOST + [LATER]
    assert known.begin(A, 0) is NOW
    known.end(names[0], has_responded=False, now_s=1)
    assert known.begin(names[-1], 1) is NOW


def test_one_that_does_not_respond_is_tried_alone_after_pauses_that_double() -> None:
    known, now_s = Receivers(), 0.0
    for _ in range(FAILURES):
        assert known.begin(A, now_s) is NOW
        known.end(A, has_responded=False, now_s=now_s)
    for pause_s in (PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S):
        assert known.begin(A, now_s + pause_s - 0.1) is CLOSED
        now_s += pause_s
        assert [known.begin(A, now_s) for _ in range(3)] == [NOW, CLOSED, CLOSED]
        known.end(A, has_responded=False, now_s=now_s)
    for _ in range(20):
        now_s += MAX_PAUSE_S
        assert known.begin(A, now_s) is NOW
        known.end(A, has_responded=False, now_s=now_s)
    assert known.begin(A, now_s + MAX_PAUSE_S) is NOW
    known.end(A, has_responded=True, now_s=now_s)
    assert [known.begin(A, now_s) for _ in range(MAX_POSTS_TO_ONE + 1)] == [NOW] * MAX_POSTS_TO_ONE + [LATER]


@given(
    st.lists(st.tuples(st.sampled_from("abcdefg"), st.sampled_from(["begin", "responded", "failed"]), st.floats(0, 50)))
)
def test_whatever_happens_shares_hold_and_what_is_kept_is_bounded(steps: list[tuple[str, str, float]]) -> None:
    known, open_posts, now_s = Receivers(), dict.fromkeys("abcdefg", 0), 0.0
    names = {name: ReceiverName(f"http://{'x' if name < 'f' else 'y'}", name) for name in open_posts}
    limit = receivers.MAX_KNOWN
    receivers.MAX_KNOWN = 3
    try:
        for name, step, seconds in steps:
            now_s += seconds
            if step == "begin":
                open_posts[name] += known.begin(names[name], now_s) is NOW
            elif open_posts[name]:
                open_posts[name] -= 1
                known.end(names[name], step == "responded", now_s)
            assert all(0 <= count <= MAX_POSTS_TO_ONE for count in open_posts.values())
            assert sum(open_posts[name] for name in "abcde") <= MAX_POSTS_TO_HOST
            assert sum(receiver.posts == 0 for receiver in known._receivers.values()) <= 3
    finally:
        receivers.MAX_KNOWN = limit
    for name, count in open_posts.items():
        for _ in range(count):
            known.end(names[name], has_responded=True, now_s=now_s)
    assert all(receiver.failures for receiver in known._receivers.values())

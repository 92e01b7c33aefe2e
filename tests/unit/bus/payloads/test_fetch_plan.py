"""`FetchPlan`: the order of pieces, cancelled fetches, and links that end while payloads are fetched."""

from __future__ import annotations

import random
from collections import deque

import pytest

from weir.bus.payloads.fetch_plan import MAX_OUTSTANDING, FetchEnd, FetchPlan, Loss
from weir.schemas.core.tensors import PayloadRef

PIECE = 100


class Owner:
    """Serves the requests of a plan in order. A payload's content is determined by its offset."""

    def __init__(self, plan: FetchPlan) -> None:
        self.plan = plan
        self.requests: deque[PayloadRef] = deque()
        self.ends: dict[int, bytes | Loss] = {}
        self.sent_bytes = 0

    def take(self, ends: list[FetchEnd]) -> None:
        for number, outcome in ends:
            assert number not in self.ends, "a fetch ends once"
            self.ends[number] = outcome if isinstance(outcome, Loss) else bytes(outcome)

    def request(self) -> None:
        self.requests += self.plan.requests()

    def serve(self, is_kept: bool = True) -> None:
        """Sends one piece, and what became of its slot."""
        piece = self.requests.popleft()
        self.plan.place(piece.size)[:] = content(piece)
        self.sent_bytes += piece.size
        self.take(self.plan.end_piece(is_kept))
        self.request()

    def serve_all(self) -> None:
        self.request()
        while self.requests:
            self.serve()

    def lose_link(self) -> None:
        self.requests.clear()
        self.take(self.plan.lost())


def ref(offset: int, size: int) -> PayloadRef:
    return PayloadRef("weir-gateway-01234567-1.1", 0, 1, offset, size)


def content(piece: PayloadRef) -> bytes:
    return bytes((piece.offset + number) % 251 for number in range(piece.size))


@pytest.fixture
def owner() -> Owner:
    return Owner(FetchPlan(PIECE))


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, PIECE + 1, 7 * PIECE + 3])
def test_a_payload_of_any_size_is_put_together(owner: Owner, size: int) -> None:
    owner.plan.begin(1, ref(64, size))
    owner.serve_all()
    assert owner.ends == {1: content(ref(64, size))}
    assert not len(owner.plan)
    assert not owner.plan.is_waiting


def test_a_bounded_number_of_pieces_is_requested_at_a_time(owner: Owner) -> None:
    for number in range(3):
        owner.plan.begin(number, ref(number * 1000, 5 * PIECE))
    owner.request()
    assert len(owner.requests) == MAX_OUTSTANDING
    owner.request()
    assert len(owner.requests) == MAX_OUTSTANDING
    owner.serve()
    assert len(owner.requests) == MAX_OUTSTANDING


def test_a_small_payload_does_not_wait_for_a_large_one(owner: Owner) -> None:
    owner.plan.begin(1, ref(0, 50 * PIECE))
    owner.request()
    owner.plan.begin(2, ref(9000, 10))
    served = 0
    while 2 not in owner.ends:
        owner.serve()
        served += 1
    assert served <= MAX_OUTSTANDING + 2


def test_a_payload_that_was_freed_ends_as_stale_and_others_go_on(owner: Owner) -> None:
    owner.plan.begin(1, ref(0, 3 * PIECE))
    owner.plan.begin(2, ref(9000, 3 * PIECE))
    owner.request()
    owner.serve(is_kept=False)
    owner.serve_all()
    assert owner.ends == {1: Loss.STALE, 2: content(ref(9000, 3 * PIECE))}


def test_an_owner_that_sends_no_piece_says_that_the_payload_was_freed(owner: Owner) -> None:
    owner.plan.begin(1, ref(0, PIECE))
    owner.request()
    owner.take(owner.plan.end_piece(is_kept=False))
    assert owner.ends == {1: Loss.STALE}


def test_pieces_of_a_cancelled_fetch_are_thrown_away(owner: Owner) -> None:
    owner.plan.begin(1, ref(0, 9 * PIECE))
    owner.plan.begin(2, ref(9000, 9 * PIECE))
    owner.request()
    owner.plan.cancel(1)
    owner.serve_all()
    assert owner.ends == {2: content(ref(9000, 9 * PIECE))}
    assert owner.sent_bytes <= (9 + MAX_OUTSTANDING) * PIECE


def test_a_fetch_goes_on_at_its_offset_after_the_loss_of_a_link(owner: Owner) -> None:
    owner.plan.begin(1, ref(0, 10 * PIECE))
    owner.request()
    for _ in range(6):
        owner.serve()
    owner.lose_link()
    assert not owner.ends
    owner.serve_all()
    assert owner.ends == {1: content(ref(0, 10 * PIECE))}
    assert owner.sent_bytes == 10 * PIECE, "nothing came twice"


def test_a_piece_that_came_in_part_comes_again(owner: Owner) -> None:
    owner.plan.begin(1, ref(0, PIECE))
    owner.request()
    owner.plan.place(PIECE)[:10] = bytes(10)
    owner.lose_link()
    owner.serve_all()
    assert owner.ends == {1: content(ref(0, PIECE))}


def test_a_fetch_that_loses_two_links_fails(owner: Owner) -> None:
    owner.plan.begin(1, ref(0, 10 * PIECE))
    owner.request()
    owner.lose_link()
    owner.plan.begin(2, ref(9000, PIECE))
    owner.request()
    owner.lose_link()
    assert owner.ends == {1: Loss.UNREACHABLE}
    owner.serve_all()
    assert owner.ends == {1: Loss.UNREACHABLE, 2: content(ref(9000, PIECE))}


def test_without_a_link_all_fetches_end(owner: Owner) -> None:
    owner.plan.begin(1, ref(0, PIECE))
    owner.plan.begin(2, ref(0, PIECE))
    owner.take(owner.plan.fail(Loss.NO_ADDRESS))
    assert owner.ends == {1: Loss.NO_ADDRESS, 2: Loss.NO_ADDRESS}
    assert owner.plan.requests() == []


def test_pieces_that_were_not_requested_are_rejected(owner: Owner) -> None:
    with pytest.raises(ValueError, match="instead of the next piece"):
        owner.plan.place(PIECE)
    with pytest.raises(ValueError, match="was not sent"):
        owner.plan.end_piece(is_kept=False)
    owner.plan.begin(1, ref(0, 2 * PIECE))
    owner.request()
    with pytest.raises(ValueError, match="was not sent"):
        owner.plan.end_piece(is_kept=True)
    with pytest.raises(ValueError, match="instead of the next piece"):
        owner.plan.place(PIECE + 1)
    owner.plan.place(PIECE)
    with pytest.raises(ValueError, match="instead of the next piece"):
        owner.plan.place(PIECE)


def test_whatever_happens_each_fetch_ends_once_with_its_content_or_a_loss() -> None:
    draw = random.Random(12)
    for _ in range(300):
        owner, begun, cancelled, number = Owner(FetchPlan(PIECE)), {}, set(), 0
        for _ in range(60):
            action = draw.random()
            if action < 0.25:
                number += 1
                begun[number] = ref(draw.randrange(5000), draw.randint(1, 6 * PIECE))
                owner.plan.begin(number, begun[number])
            elif action < 0.3 and begun:
                chosen = draw.choice(list(begun))
                cancelled.add(chosen)
                owner.plan.cancel(chosen)
            elif action < 0.34:
                owner.lose_link()
            elif owner.requests:
                owner.serve(is_kept=draw.random() < 0.95)
            owner.request()
        owner.serve_all()
        assert not len(owner.plan)
        assert owner.ends.keys() | cancelled == begun.keys()
        for which, outcome in owner.ends.items():
            assert isinstance(outcome, Loss) or outcome == content(begun[which])

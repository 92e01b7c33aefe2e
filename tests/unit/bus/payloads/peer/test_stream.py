"""A reader puts pieces of several payloads in place in turns; a malformed response breaks the connection."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.payloads.fetch_plan import FetchEnd, Loss
from bus.payloads.peer.authentication import NONCE_BYTES, new_secret, owner_proof, reader_proof
from bus.payloads.peer.stream import (
    CONTENT_LENGTH,
    GONE,
    MAX_REQUESTED_PIECES,
    PEER_PIECE_TIMEOUT_S,
    PEER_SILENCE_TIMEOUT_S,
    REQUEST_LENGTH,
    PeerProtocolError,
    PeerStream,
)
from schemas.core.tensors import PayloadRef
from schemas.wire.transfers import PayloadFetch

PIECE = 10
SECRET = new_secret()
NONCE, OWNER_NONCE = b"r" * NONCE_BYTES, b"o" * NONCE_BYTES


def ref(size: int, slot: int = 0) -> PayloadRef:
    return PayloadRef("weir-gateway-01234567-1.131072", slot, 3, 64, size)


def content_of(piece: PayloadRef) -> bytes:
    return bytes((piece.slot + piece.offset + place) % 251 for place in range(piece.size))


def questions(said: bytes) -> list[PayloadRef]:
    asked = []
    while said:
        (length,) = REQUEST_LENGTH.unpack_from(said)
        asked.append(PayloadFetch.unpack(said[REQUEST_LENGTH.size : REQUEST_LENGTH.size + length]).piece)
        said = said[REQUEST_LENGTH.size + length :]
    return asked


def tell(stream: PeerStream, data: bytes, now_s: float = 0.0) -> list[FetchEnd]:
    """What comes is cut as there is room, as a socket would."""
    ended: list[FetchEnd] = []
    while data:
        place = stream.place()
        assert len(place)
        count = min(len(place), len(data))
        place[:count] = data[:count]
        ended += stream.received(count, now_s)
        data = data[count:]
    return ended


def opened() -> PeerStream:
    stream = PeerStream(SECRET, NONCE, PIECE)
    tell(stream, OWNER_NONCE)
    assert stream.to_send() == NONCE + reader_proof(SECRET, OWNER_NONCE, NONCE)
    assert not stream.is_open
    tell(stream, owner_proof(SECRET, OWNER_NONCE, NONCE))
    assert stream.is_open
    return stream


def answer(piece: PayloadRef, verdict: int = 1) -> bytes:
    return CONTENT_LENGTH.pack(piece.size) + content_of(piece) + bytes((verdict,))


@settings(deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    bad=st.floats(0, 0.3),
)
def test_fetches_end_once_with_what_the_owner_has(seed: int, sizes: list[int], bad: float) -> None:
    dice, stream = random.Random(seed), opened()
    asked: list[PayloadRef] = []
    waiting = list(enumerate(sizes, 1))
    ends: dict[int, object] = {}
    spoilt: set[int] = set()
    given_up: set[int] = set()
    arriving = b""
    while waiting or asked or arriving:
        if waiting and dice.random() < 0.3:
            number, size = waiting.pop()
            assert stream.begin(number, ref(size, number), 0.0) is None
        if dice.random() < 0.05:
            number = dice.randrange(1, len(sizes) + 1)
            if number not in ends and number not in dict(waiting):
                stream.cancel(number)
                given_up.add(number)
        asked += questions(stream.to_send())
        assert len(asked) <= MAX_REQUESTED_PIECES
        if asked and not arriving:
            piece = asked.pop(0)
            fate = dice.random()
            if fate < bad:
                spoilt.add(piece.slot)
            arriving = CONTENT_LENGTH.pack(GONE) if fate < bad / 2 else answer(piece, int(fate >= bad))
        count = dice.randint(0, len(arriving))
        for end in tell(stream, arriving[:count]):
            assert end.fetch not in ends
            ends[end.fetch] = end.outcome if isinstance(end.outcome, Loss) else bytes(end.outcome)
        arriving = arriving[count:]
    assert not stream.is_busy
    assert not stream.unfinished()
    for number, size in enumerate(sizes, 1):
        if number in given_up:
            assert number not in ends or number in spoilt
        else:
            assert ends[number] == (Loss.STALE if number in spoilt else content_of(ref(size, number)))


def test_a_small_payload_does_not_wait_for_all_of_a_large_one() -> None:
    stream = opened()
    stream.begin(1, ref(100 * PIECE, 1), 0.0)
    stream.begin(2, ref(PIECE, 2), 0.0)
    asked = questions(stream.to_send())
    ends: list[FetchEnd] = []
    for _ in range(MAX_REQUESTED_PIECES + 2):
        ends += tell(stream, answer(asked.pop(0)))
        asked += questions(stream.to_send())
    assert [end.fetch for end in ends] == [2]
    assert [number for number, _ in stream.unfinished()] == [1]


def test_fetches_before_authentication_start_after_it() -> None:
    stream = PeerStream(SECRET, NONCE)
    stream.begin(1, ref(5), 0.0)
    tell(stream, OWNER_NONCE)
    stream.to_send()
    tell(stream, owner_proof(SECRET, OWNER_NONCE, NONCE))
    assert questions(stream.to_send()) == [ref(5)]


@pytest.mark.parametrize(
    "said",
    [
        CONTENT_LENGTH.pack(11),
        CONTENT_LENGTH.pack(-2),
        CONTENT_LENGTH.pack(10) + bytes(10) + b"\x02",
        answer(ref(10)) + CONTENT_LENGTH.pack(10),
    ],
    ids=["another length", "no length", "no verdict", "no question"],
)
def test_a_malformed_response_breaks_the_connection(said: bytes) -> None:
    stream = opened()
    stream.begin(1, ref(10), 0.0)
    with pytest.raises(PeerProtocolError):
        tell(stream, said)


def test_nothing_is_requested_from_an_owner_without_the_secret() -> None:
    stream = PeerStream(SECRET, NONCE)
    stream.begin(1, ref(10), 0.0)
    tell(stream, OWNER_NONCE)
    stream.to_send()
    with pytest.raises(PeerProtocolError):
        tell(stream, reader_proof(SECRET, OWNER_NONCE, NONCE))  # its reader's word, played back
    assert not stream.to_send()


def test_a_piece_that_does_not_come_in_time_is_noticed() -> None:
    stream = opened()
    assert not stream.is_overdue(1e6)
    stream.begin(1, ref(3 * PIECE), 100.0)
    (first, *_) = questions(stream.to_send())
    assert not stream.is_overdue(99.9 + PEER_SILENCE_TIMEOUT_S)
    tell(stream, answer(first), 101.0)
    assert not stream.is_overdue(100.9 + PEER_SILENCE_TIMEOUT_S)
    assert stream.is_overdue(101.0 + PEER_SILENCE_TIMEOUT_S)
    now_s = 101.0
    while now_s < 101.0 + PEER_PIECE_TIMEOUT_S:  # a byte now and then
        assert not stream.is_overdue(now_s)
        tell(stream, b"\x0a" if now_s == 101.0 else b"\x00", now_s)
        now_s += 1.9
    assert stream.is_overdue(now_s)

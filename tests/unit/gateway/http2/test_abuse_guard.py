"""The connections of abusive peers end (RFC 9113, section 10.5); those of busy peers do not."""

import pytest

from tests.support.gateway.http2_peer import REQUEST, Peer, data, frame, headers, uint32, window_update
from weir.gateway.http2.abuse_guard import IDLE_FRAMES_A_STREAM, MAX_IDLE_FRAMES, RESETS_AT_ONCE, RESETS_PER_S
from weir.gateway.http2.frames import Flag, FrameType, Http2ErrorCode, settings
from weir.gateway.http2.options import Http2Options

PING = frame(FrameType.PING, 0, 0, b"12345678")
EAGER = Http2Options(min_ping_interval_s=0, keepalive_permit_without_calls=True)

FLOODS = {
    "pings": PING,
    "settings": settings({}),
    "acknowledgements": frame(FrameType.SETTINGS, Flag.ACK),
    "empty data": data(1, b""),
    "window updates": window_update(0, 1),
    "priorities": frame(FrameType.PRIORITY, 0, 1, bytes(5)),
    "extensions": frame(0x77),
    "farewells": frame(FrameType.GOAWAY, 0, 0, bytes(8)),
    "data of a closed stream": data(3, b"x"),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_floods_end_the_connection(flood: bytes) -> None:
    peer = Peer(EAGER)
    peer.send(headers(1), headers(3, end=True))
    peer.send(flood * (MAX_IDLE_FRAMES + IDLE_FRAMES_A_STREAM - 1))
    assert not peer.connection.is_closed
    assert peer.code_in(peer.send(flood * 2)) == Http2ErrorCode.ENHANCE_YOUR_CALM


def test_empty_continuations_end_the_connection() -> None:
    peer = Peer()
    answer = peer.send(frame(FrameType.HEADERS, 0, 1), frame(FrameType.CONTINUATION, 0, 1) * (MAX_IDLE_FRAMES + 2))
    assert peer.code_in(answer) == Http2ErrorCode.ENHANCE_YOUR_CALM


def test_a_peer_that_asks_in_between_is_not_sent_away() -> None:
    peer = Peer(EAGER)
    for number in range(5):
        peer.send((PING + window_update(0, 1)) * (MAX_IDLE_FRAMES // 2 - 1), headers(2 * number + 1, end=True))
    assert not peer.connection.is_closed


def test_a_peer_with_many_open_streams_may_widen_the_window_of_each() -> None:
    peer = Peer()
    streams = range(1, 1000, 2)
    peer.send(*map(headers, streams))
    for _ in range(4):
        peer.send(*(window_update(stream_id, 1000) for stream_id in streams))
    assert not peer.connection.is_closed


def test_rapid_resets_end_the_connection() -> None:
    peer = Peer()
    for stream_id in range(1, 2 * RESETS_AT_ONCE + 3, 2):
        assert not peer.connection.is_closed
        peer.give(headers(stream_id) + frame(FrameType.RST_STREAM, 0, stream_id, uint32(8)))
    assert peer.goaway_code() == Http2ErrorCode.ENHANCE_YOUR_CALM


def test_making_the_server_reset_its_streams_is_no_way_around() -> None:
    peer = Peer()
    for stream_id in range(1, 2 * RESETS_AT_ONCE + 3, 2):
        assert not peer.connection.is_closed
        peer.give(headers(stream_id, REQUEST[:2]))
    assert peer.goaway_code() == Http2ErrorCode.ENHANCE_YOUR_CALM


def test_callers_may_give_up_now_and_then() -> None:
    peer = Peer()
    for stream_id in range(1, 8 * RESETS_AT_ONCE, 2):
        peer.now_s += 1 / RESETS_PER_S
        peer.give(headers(stream_id) + frame(FrameType.RST_STREAM, 0, stream_id, uint32(8)))
    assert not peer.connection.is_closed


# gRPC's rules for keepalive pings (gRFC A8)


def test_pings_more_often_than_allowed_end_the_connection() -> None:
    peer = Peer(Http2Options(min_ping_interval_s=10, max_ping_strikes=2))
    peer.send(headers(1))
    for _ in range(3):
        peer.send(PING)
        peer.now_s += 9
    assert not peer.connection.is_closed
    peer.give(PING)
    assert peer.goaway_code() == Http2ErrorCode.ENHANCE_YOUR_CALM


def test_pings_as_often_as_allowed_are_answered() -> None:
    peer = Peer(Http2Options(min_ping_interval_s=10, max_ping_strikes=2))
    peer.send(headers(1))
    for _ in range(20):
        assert peer.send(PING)
        peer.now_s += 10


def test_without_calls_pings_are_allowed_less_often() -> None:
    peer = Peer(Http2Options(min_ping_interval_s=10, max_ping_strikes=1))
    for _ in range(2):
        peer.send(PING)
        peer.now_s += 3600
    assert not peer.connection.is_closed
    peer.give(PING)
    assert peer.connection.is_closed


def test_pings_between_responses_are_no_strikes() -> None:
    peer = Peer(Http2Options(max_ping_strikes=1))
    for stream_id in range(1, 40, 2):
        peer.send(headers(stream_id, end=True), PING)
    assert not peer.connection.is_closed


def test_no_strikes_means_no_limit() -> None:
    peer = Peer(Http2Options(max_ping_strikes=0))
    peer.send(*[PING] * 100)
    assert not peer.connection.is_closed

"""Responses that a peer does not read are charged to its connection, bounded, and dropped after a while."""

from tests.support.gateway.http2_peer import (
    ANSWER,
    REQUEST,
    TRAILERS,
    Peer,
    data,
    frame,
    headers,
    settings_frame,
    uint32,
    window_update,
)
from weir.gateway.http2.connection import CONNECTION_WINDOW_BYTES
from weir.gateway.http2.frames import Flag, FrameType, Http2ErrorCode, Setting
from weir.gateway.http2.headers import encode_headers
from weir.http_server.stall_detection import MIN_PROGRESS_BYTES, STALL_PERIOD_S, UNREAD_PERIOD_S
from weir.runtime.memory_ledger import MemoryLedger

CHUNK = bytes(16_000)


def unread(ledger: MemoryLedger) -> Peer:
    """A peer that accepts no data of responses."""
    peer = Peer(ledger=ledger)
    peer.send(settings_frame(Setting.INITIAL_WINDOW_SIZE, 0))
    return peer


def resets(frames: list[tuple[int, int, int, bytes]]) -> list[tuple[int, bytes]]:
    return [(stream_id, payload) for kind, _, stream_id, payload in frames if kind == FrameType.RST_STREAM]


def test_kept_data_is_charged_until_it_is_sent_or_dropped() -> None:
    ledger = MemoryLedger(100_000)
    peer = unread(ledger)
    for stream_id in (1, 3, 5, 7):
        peer.send(headers(stream_id))
    streams = peer.connection.streams
    assert streams[1].send(ANSWER, [CHUNK])
    assert streams[3].send(ANSWER, [CHUNK, CHUNK])
    assert ledger.held_bytes == {"unsent": 3 * len(CHUNK)}
    assert not streams[5].send(ANSWER, [CHUNK])
    assert streams[5].send(ANSWER, (), TRAILERS)  # an error needs no room
    assert ledger.refused == {"unsent": 1}
    peer.send(window_update(3, 1000))
    assert ledger.total_bytes == 3 * len(CHUNK) - 1000
    streams[1].reset(Http2ErrorCode.CANCEL)
    assert ledger.total_bytes == 2 * len(CHUNK) - 1000
    peer.connection.lose()
    assert ledger.total_bytes == 0


def test_a_peer_that_leaves_much_unread_is_granted_no_more_requests_until_it_reads() -> None:
    ledger = MemoryLedger(4 * len(CHUNK))
    peer = unread(ledger)
    peer.send(headers(1))
    stream = peer.connection.streams[1]
    assert stream.send(ANSWER, [CHUNK + b"."])  # more than half of the connection's share
    peer.send(headers(3))
    sent = CONNECTION_WINDOW_BYTES // 2 // len(CHUNK) + 1
    frames = [frame for _ in range(sent) for frame in peer.send(data(3, CHUNK))]
    assert not [frame for frame in frames if frame[0] == FrameType.WINDOW_UPDATE and frame[2] == 0]
    frames = peer.send(window_update(1, len(CHUNK)))
    assert (FrameType.WINDOW_UPDATE, 0, 0, uint32(sent * len(CHUNK))) in frames
    assert not peer.connection.is_closed


def test_a_peer_that_ignores_this_loses_its_connection() -> None:
    peer = unread(MemoryLedger(4 * len(CHUNK)))
    peer.send(headers(1), headers(3))
    assert peer.connection.streams[1].send(ANSWER, [CHUNK + b"."])
    for _ in range(CONNECTION_WINDOW_BYTES // len(CHUNK) + 1):
        peer.give(data(3, CHUNK))
    assert peer.goaway_code() == Http2ErrorCode.FLOW_CONTROL_ERROR


def test_a_stream_whose_response_is_not_read_ends_and_others_go_on() -> None:
    ledger = MemoryLedger(1_000_000)
    peer = unread(ledger)
    peer.send(headers(1), headers(3), headers(5))
    streams = peer.connection.streams
    assert streams[1].send(ANSWER, [CHUNK] * 3)
    assert streams[3].send(ANSWER, [CHUNK] * 3)
    peer.connection.check_progress(1000.0, UNREAD_PERIOD_S)
    peer.send(window_update(3, MIN_PROGRESS_BYTES))
    peer.connection.check_progress(1000.0 + UNREAD_PERIOD_S - 1, UNREAD_PERIOD_S)
    assert not resets(peer.take())
    peer.connection.check_progress(1000.0 + UNREAD_PERIOD_S, UNREAD_PERIOD_S)
    assert resets(peer.take()) == [(1, uint32(Http2ErrorCode.ENHANCE_YOUR_CALM))]
    assert set(peer.connection.streams) == {3, 5}
    assert ledger.total_bytes == 3 * len(CHUNK) - MIN_PROGRESS_BYTES
    peer.connection.check_progress(1000.0 + UNREAD_PERIOD_S + STALL_PERIOD_S, STALL_PERIOD_S)  # memory is short now
    assert set(peer.connection.streams) == {5}


def test_an_unfinished_header_block_is_charged_and_ends_its_connection_when_it_stalls() -> None:
    ledger = MemoryLedger(10_000)
    peer = Peer(ledger=ledger)
    peer.send(frame(FrameType.HEADERS, 0, 1, bytes(1000)), frame(FrameType.CONTINUATION, 0, 1, bytes(2000)))
    assert ledger.total_bytes == 3000
    for now_s in (1000.0, 1000.0 + STALL_PERIOD_S - 1):
        peer.connection.check_progress(now_s, UNREAD_PERIOD_S)
    assert not peer.connection.is_closed
    peer.connection.check_progress(1000.0 + STALL_PERIOD_S, UNREAD_PERIOD_S)
    assert peer.goaway_code() == Http2ErrorCode.ENHANCE_YOUR_CALM

    block = encode_headers(REQUEST)
    whole = Peer(ledger=MemoryLedger(10_000))
    whole.send(frame(FrameType.HEADERS, 0, 1, block[:5]), frame(FrameType.CONTINUATION, Flag.END_HEADERS, 1, block[5:]))
    assert set(whole.connection.streams) == {1}
    assert whole.output.account.held_bytes == 0

    crowd = Peer(ledger=MemoryLedger(2000))
    crowd.send(frame(FrameType.HEADERS, 0, 1, bytes(1001)))
    assert crowd.connection.is_closed

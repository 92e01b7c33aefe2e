"""Windows in both directions (RFC 9113, sections 5.2 and 6.9): everything within a window is sent, and nothing beyond."""

from hypothesis import given, settings
from hypothesis import strategies as st

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
from weir.gateway.http2.stream import STREAM_WINDOW_BYTES

CHUNK = bytes(16_000)


def data_of(frames: list[tuple[int, int, int, bytes]], stream_id: int) -> bytes:
    return b"".join(payload for kind, _, got, payload in frames if kind == FrameType.DATA and got == stream_id)


def granted(frames: list[tuple[int, int, int, bytes]], stream_id: int) -> int:
    return sum(
        int.from_bytes(payload, "big")
        for kind, _, got, payload in frames
        if kind == FrameType.WINDOW_UPDATE and got == stream_id
    )


def ask(peer: Peer, stream_id: int, body: bytes) -> list[tuple[int, int, int, bytes]]:
    """Requests an echo of `body`."""
    parts = [body[start : start + 16_000] for start in range(0, len(body), 16_000)]
    sent = [data(stream_id, part, end=number == len(parts)) for number, part in enumerate(parts, 1)]
    return peer.send(headers(stream_id), *sent)


def test_a_long_request_is_granted_what_it_has_used() -> None:
    peer = Peer()
    peer.send(headers(1))
    frames = [answer for _ in range(3 * CONNECTION_WINDOW_BYTES // len(CHUNK)) for answer in peer.send(data(1, CHUNK))]
    sent = 3 * CONNECTION_WINDOW_BYTES // len(CHUNK) * len(CHUNK)
    assert granted(frames, 0) > sent - CONNECTION_WINDOW_BYTES
    assert granted(frames, 1) > sent - STREAM_WINDOW_BYTES
    assert not peer.connection.is_closed


def test_a_stream_on_hold_is_granted_nothing_until_it_goes_on() -> None:
    peer = Peer()
    peer.send(headers(1))
    stream = peer.connection.streams[1]
    stream.hold()
    frames = [answer for _ in range(STREAM_WINDOW_BYTES // len(CHUNK)) for answer in peer.send(data(1, CHUNK))]
    assert granted(frames, 1) == 0
    stream.resume()
    assert granted(peer.take(), 1) == STREAM_WINDOW_BYTES // len(CHUNK) * len(CHUNK)


def test_a_client_that_sends_more_than_it_was_granted_loses_the_stream() -> None:
    peer = Peer()
    peer.send(headers(1))
    peer.connection.streams[1].hold()
    frames = [answer for _ in range(STREAM_WINDOW_BYTES // len(CHUNK) + 1) for answer in peer.send(data(1, CHUNK))]
    assert [payload for kind, _, _, payload in frames if kind == FrameType.RST_STREAM] == [
        uint32(Http2ErrorCode.FLOW_CONTROL_ERROR)
    ]
    assert peer.application.exchanges[0].closings == 1
    assert not peer.connection.is_closed


def test_a_request_that_is_complete_is_granted_nothing_more() -> None:
    peer = Peer()
    peer.send(headers(1, [*REQUEST[:2], (b":path", b"/silent")]))
    stream = peer.connection.streams[1]
    stream.hold()
    for _ in range(STREAM_WINDOW_BYTES // len(CHUNK) - 1):
        peer.send(data(1, CHUNK))
    peer.send(data(1, CHUNK, end=True))
    stream.resume()
    assert granted(peer.take(), 1) == 0


def test_a_response_that_goes_on_is_notified_when_everything_was_sent() -> None:
    peer = Peer()
    peer.send(headers(1))
    (echo,) = peer.application.exchanges
    peer.connection.streams[1].send(ANSWER, (bytes(65_536),))
    peer.take()
    assert echo.drainings == 0
    peer.send(window_update(0, 100), window_update(1, 100))
    assert echo.drainings == 1
    peer.connection.streams[1].send(b"", (b"more",), TRAILERS)
    peer.take()
    assert (echo.drainings, echo.closings) == (1, 1)


def test_a_response_stops_at_the_window_of_the_connection() -> None:
    peer = Peer()
    peer.send(settings_frame(Setting.INITIAL_WINDOW_SIZE, 10**6))
    body = bytes(range(256)) * 1000
    answer = ask(peer, 1, body)
    assert len(data_of(answer, 1)) == 65_535
    answer += peer.send(window_update(0, 100_000))
    assert len(data_of(answer, 1)) == 165_535
    answer += peer.send(window_update(0, 10**6))
    assert data_of(answer, 1) == body
    assert answer[-1][:3] == (FrameType.HEADERS, Flag.END_HEADERS | Flag.END_STREAM, 1)
    assert peer.output.unsent_bytes == 0


def test_a_stream_without_a_window_does_not_hold_up_the_others() -> None:
    peer = Peer()
    peer.send(settings_frame(Setting.INITIAL_WINDOW_SIZE, 10), window_update(0, 10**6))
    assert len(data_of(ask(peer, 1, bytes(100)), 1)) == 10
    assert data_of(ask(peer, 3, bytes(10)), 3) == bytes(10)
    assert data_of(peer.send(window_update(1, 90)), 1) == bytes(90)


def test_a_window_that_shrinks_below_nothing_is_waited_out() -> None:
    peer = Peer()
    assert len(data_of(ask(peer, 1, bytes(100_000)), 1)) == 65_535
    peer.send(window_update(0, 10**6), settings_frame(Setting.INITIAL_WINDOW_SIZE, 1000))
    assert peer.connection.streams[1].window == 1000 - 65_535
    assert data_of(peer.send(window_update(1, 65_535 - 1000)), 1) == b""
    assert len(data_of(peer.send(settings_frame(Setting.INITIAL_WINDOW_SIZE, 1500)), 1)) == 500


def test_an_empty_response_needs_no_window() -> None:
    peer = Peer()
    peer.send(settings_frame(Setting.INITIAL_WINDOW_SIZE, 0))
    assert peer.send(headers(1, end=True))[-1][:3] == (FrameType.HEADERS, Flag.END_HEADERS | Flag.END_STREAM, 1)


def test_data_is_cut_at_the_peers_frame_size() -> None:
    peer = Peer()
    sizes = [len(payload) for kind, _, _, payload in ask(peer, 1, bytes(40_000)) if kind == FrameType.DATA]
    assert sizes == [16_384, 16_384, 40_000 - 2 * 16_384]
    peer.send(settings_frame(Setting.MAX_FRAME_SIZE, 20_000), window_update(0, 10**6))
    sizes = [len(payload) for kind, _, _, payload in ask(peer, 3, bytes(40_000)) if kind == FrameType.DATA]
    assert sizes == [20_000, 20_000]


def test_a_response_of_several_frames_within_the_windows_does_not_wait() -> None:
    peer = Peer()
    peer.send(headers(1))
    (echo,) = peer.application.exchanges
    body = bytes(range(256)) * 150
    peer.connection.streams[1].send(ANSWER, (body[:20_000], body[20_000:]), TRAILERS)
    assert (echo.closings, peer.output.unsent_bytes) == (1, 0)
    frames = peer.take()
    assert data_of(frames, 1) == body
    assert max(len(payload) for kind, _, _, payload in frames if kind == FrameType.DATA) == 16_384


def test_large_responses_take_turns() -> None:
    peer = Peer()
    peer.connection.send_buffer.pause()
    ask(peer, 1, bytes(50_000))
    ask(peer, 3, bytes(50_000))
    peer.connection.send_buffer.resume()
    order = [stream_id for kind, _, stream_id, _ in peer.take() if kind == FrameType.DATA]
    assert order[:3] == [1, 3, 1]


def test_while_the_transport_is_full_data_is_kept_and_a_client_can_still_give_up() -> None:
    peer = Peer()
    peer.output.pause()
    assert data_of(ask(peer, 1, bytes(1000)) + ask(peer, 3, b"short"), 1) == b""
    assert peer.output.unsent_bytes == 1005
    peer.send(frame(FrameType.RST_STREAM, 0, 1, uint32(Http2ErrorCode.CANCEL)))
    assert peer.output.unsent_bytes == 5
    peer.output.resume()
    frames = peer.take()
    assert (data_of(frames, 1), data_of(frames, 3)) == (b"", b"short")


SIZES = st.lists(st.integers(1, 60_000), min_size=1, max_size=5)
GRANTS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40_000)))


@settings(deadline=None)
@given(SIZES, GRANTS)
def test_windows_are_never_exceeded_and_everything_arrives(sizes: list[int], grants: list[tuple[int, int]]) -> None:
    peer = Peer()
    windows = {0: 65_535}
    peer.send(settings_frame(Setting.INITIAL_WINDOW_SIZE, 20_000))
    received: dict[int, int] = {}

    def account(frames: list[tuple[int, int, int, bytes]]) -> None:
        for kind, _, stream_id, payload in frames:
            if kind == FrameType.DATA:
                received[stream_id] = received.get(stream_id, 0) + len(payload)
                windows[stream_id] -= len(payload)
                windows[0] -= len(payload)
        assert min(windows.values()) >= 0

    streams = {2 * number + 1: size for number, size in enumerate(sizes)}
    for stream_id, size in streams.items():
        windows[stream_id] = 20_000
        account(ask(peer, stream_id, bytes(size)))
    for number, increment in [*grants, *((number, 300_000) for number in range(6))]:
        stream_id = 2 * number - 1 if number else 0
        if stream_id in windows:
            windows[stream_id] += increment
            account(peer.send(window_update(stream_id, increment)))
    assert received == streams
    assert peer.output.unsent_bytes == 0
    assert not peer.connection.streams

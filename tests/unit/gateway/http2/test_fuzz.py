"""Whatever bytes arrive: nothing is raised, and every exchange ends exactly once."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gateway.http2_peer import (
    GREETING,
    REQUEST,
    Peer,
    data,
    frame,
    headers,
    settings_frame,
    uint32,
    window_update,
)
from weir.gateway.http2.frames import FrameType, Setting

STREAMS = st.sampled_from([0, 1, 1, 3, 3, 5, 2, 2**31 - 1])
SILENT = [*REQUEST[:2], (b":path", b"/silent")]
GOOD = [
    headers(1),
    headers(3, end=True),
    headers(5, SILENT),
    data(1, bytes(100)),
    data(1, bytes(30_000)[:16_000], end=True),
    frame(FrameType.RST_STREAM, 0, 1, uint32(8)),
    frame(FrameType.PING, 0, 0, bytes(8)),
    settings_frame(Setting.INITIAL_WINDOW_SIZE, 0),
    settings_frame(Setting.INITIAL_WINDOW_SIZE, 2**20),
    window_update(0, 2**16),
    window_update(1, 2**16),
]
FRAMES = st.one_of(
    st.sampled_from(GOOD),
    st.builds(frame, st.integers(0, 11), st.integers(0, 255), STREAMS, st.binary(max_size=20)),
    st.builds(lambda i, block: frame(FrameType.HEADERS, 4, i, block), STREAMS, st.binary(max_size=60)),
)


def check_no_leak(peer: Peer) -> None:
    peer.take()
    peer.connection.lose()
    assert all(exchange.closings == 1 for exchange in peer.application.exchanges)
    assert not peer.connection.streams
    assert peer.output.unsent_bytes == 0


@settings(deadline=None)
@given(st.lists(FRAMES, max_size=30))
def test_frames_in_any_order(frames: list[bytes]) -> None:
    peer = Peer()
    for one in frames:
        peer.send(one)
        open_streams = [exchange for exchange in peer.application.exchanges if not exchange.closings]
        assert len(open_streams) == len(peer.connection.streams)
    check_no_leak(peer)


@settings(deadline=None)
@given(st.lists(FRAMES, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_sessions_with_bytes_changed_lost_and_repeated(frames: list[bytes], chance: random.Random) -> None:
    session = bytearray(GREETING + b"".join(frames))
    for _ in range(chance.randrange(1, 8)):
        start = chance.randrange(len(session))
        match chance.randrange(3):
            case 0:
                session[start] = chance.randrange(256)
            case 1:
                del session[start : start + chance.randrange(1, 20)]
            case _:
                session[start:start] = session[start : start + chance.randrange(1, 40)]
        session = session or bytearray(b"\0")
    peer = Peer(greet=False)
    while session:
        size = chance.randrange(1, 500)
        peer.send(bytes(session[:size]))
        if chance.random() < 0.1:
            peer.output.pause()
        elif chance.random() < 0.3:
            peer.output.resume()
        del session[:size]
    check_no_leak(peer)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_after_the_preface(noise: bytes) -> None:
    peer = Peer()
    peer.send(noise)
    check_no_leak(peer)

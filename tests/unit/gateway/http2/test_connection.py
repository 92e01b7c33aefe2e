"""A connection's rules: what is answered, what ends a stream, what ends the connection (RFC 9113, sections 3 to 6)."""

import pytest

from tests.support.gateway.http2_peer import (
    GREETING,
    REQUEST,
    Echo,
    Peer,
    data,
    frame,
    headers,
    settings_frame,
    uint32,
    window_update,
)
from weir.gateway.http2.connection import MAX_HEADER_BLOCK_BYTES, MAX_STREAMS, TURN_WORK
from weir.gateway.http2.frames import (
    MAX_WINDOW,
    PREFACE,
    Flag,
    FrameType,
    Http2ErrorCode,
    Setting,
    read_settings,
    settings,
)
from weir.gateway.http2.headers import MAX_FIELDS, WORK_BYTES, encode_headers

BLOCK = encode_headers(REQUEST)
LAST = Flag.END_HEADERS | Flag.END_STREAM


def test_the_server_sends_its_settings_and_acknowledges_the_clients() -> None:
    peer = Peer(greet=False)
    kind, _, _, payload = peer.take()[0]
    assert kind == FrameType.SETTINGS
    assert dict(read_settings(payload))[Setting.MAX_CONCURRENT_STREAMS] == 1000
    assert peer.send(GREETING) == [(FrameType.SETTINGS, Flag.ACK, 0, b"")]


def test_a_preface_may_arrive_byte_by_byte() -> None:
    peer = Peer(greet=False)
    peer.take()
    answers = [answer for byte in GREETING for answer in peer.send(bytes([byte]))]
    assert answers == [(FrameType.SETTINGS, Flag.ACK, 0, b"")]


def test_a_request_is_answered_on_its_stream() -> None:
    peer = Peer()
    answer = peer.send(headers(1), data(1, b"hello"), data(1, b" you", end=True))
    assert [(kind, flags) for kind, flags, _, _ in answer] == [
        (FrameType.HEADERS, Flag.END_HEADERS),
        (FrameType.DATA, Flag.NONE),
        (FrameType.HEADERS, LAST),
    ]
    assert {stream_id for _, _, stream_id, _ in answer} == {1}
    assert answer[1][3] == b"hello you"
    assert not peer.connection.streams
    assert peer.application.exchanges[0].closings == 1


def test_a_request_may_end_with_its_headers_or_with_trailers() -> None:
    peer = Peer()
    assert peer.send(headers(1, end=True))[-1][:3] == (FrameType.HEADERS, LAST, 1)
    assert peer.send(headers(3), data(3, b"x"), headers(3, [(b"x", b"y")], end=True))[1][3] == b"x"


def test_headers_may_be_padded_have_a_priority_and_be_continued() -> None:
    peer = Peer()
    payload = b"\x03" + bytes(5) + BLOCK[:7]
    flags = Flag.PADDED | Flag.PRIORITY | Flag.END_STREAM
    answer = peer.send(
        frame(FrameType.HEADERS, flags, 1, payload + bytes(3)),
        frame(FrameType.CONTINUATION, 0, 1, BLOCK[7:9]),
        frame(FrameType.CONTINUATION, Flag.END_HEADERS, 1, BLOCK[9:]),
    )
    assert answer[-1][:3] == (FrameType.HEADERS, LAST, 1)


def test_padding_of_data_is_not_data() -> None:
    peer = Peer()
    padded = frame(FrameType.DATA, Flag.PADDED | Flag.END_STREAM, 1, b"\x04body" + bytes(4))
    assert peer.send(headers(1), padded)[1][3] == b"body"


def test_pings_are_answered_and_acknowledgements_are_not() -> None:
    peer = Peer()
    assert peer.send(frame(FrameType.PING, 0, 0, b"12345678")) == [(FrameType.PING, Flag.ACK, 0, b"12345678")]
    assert peer.send(frame(FrameType.PING, Flag.ACK, 0, b"12345678")) == []


def test_frames_and_settings_of_extensions_are_ignored() -> None:
    peer = Peer()
    unknown = frame(0xEE, 0xFF, 77, b"?") + settings({0x7777: 5})  # type: ignore[dict-item]
    assert peer.send(unknown) == [(FrameType.SETTINGS, Flag.ACK, 0, b"")]


def test_a_stream_that_a_client_resets_is_dropped_and_late_frames_for_it_are_ignored() -> None:
    peer = Peer()
    late = (data(1, b"late"), window_update(1, 5), headers(1, [(b"x", b"y")], end=True))
    assert peer.send(headers(1), frame(FrameType.RST_STREAM, 0, 1, uint32(Http2ErrorCode.CANCEL)), *late) == []
    assert [exchange.closings for exchange in peer.application.exchanges] == [1]
    assert not peer.connection.streams


def test_a_response_to_half_a_request_tells_the_client_to_stop() -> None:
    peer = Peer()
    peer.send(headers(1))
    peer.application.exchanges[0].stream.send(trailers=b"\x88")
    assert peer.take() == [(FrameType.HEADERS, LAST, 1, b"\x88"), (FrameType.RST_STREAM, 0, 1, uint32(0))]
    assert peer.send(data(1, b"more"), data(1, b"end", end=True)) == []
    assert not peer.connection.is_closed


def test_a_stream_beyond_the_limit_is_rejected_and_the_others_go_on() -> None:
    peer = Peer()
    for number in range(MAX_STREAMS):
        assert peer.send(headers(2 * number + 1)) == []
    refused = 2 * MAX_STREAMS + 1
    refusal = (FrameType.RST_STREAM, 0, refused, uint32(Http2ErrorCode.REFUSED_STREAM))
    assert peer.send(headers(refused)) == [refusal]
    assert peer.send(data(1, b"", end=True))[-1][:3] == (FrameType.HEADERS, LAST, 1)
    assert peer.send(headers(refused + 2)) == []


def test_a_lost_connection_ends_all_exchanges_once() -> None:
    peer = Peer()
    peer.send(headers(1), headers(3), headers(5, end=True))
    peer.connection.lose()
    peer.connection.lose()
    assert [exchange.closings for exchange in peer.application.exchanges] == [1, 1, 1]
    assert peer.send(headers(7)) == []


@pytest.mark.parametrize("method", ["begin", "receive", "end", "closed"])
def test_an_exchange_that_raises_ends_its_stream_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("injected")

    peer = Peer()
    peer.send(headers(1))
    with monkeypatch.context() as patched:
        patched.setattr(Echo, method, raises)
        answer = peer.send(headers(3), data(3, b"x", end=True))
    reset = (FrameType.RST_STREAM, 0, 3, uint32(Http2ErrorCode.INTERNAL_ERROR))
    assert (reset in answer) == (method != "closed")
    assert not peer.connection.is_closed
    assert peer.send(data(1, b"hello", end=True))[1][3] == b"hello"
    assert not peer.connection.streams


def test_an_application_that_raises_ends_the_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer()
    peer.send(headers(1))
    with monkeypatch.context() as patched:
        patched.setattr(peer.application, "open", None)  # not callable
        assert peer.send(headers(3)) == [(FrameType.RST_STREAM, 0, 3, uint32(Http2ErrorCode.INTERNAL_ERROR))]
    assert peer.send(data(1, b"hello", end=True))[1][3] == b"hello"


STREAM_FAULTS = {
    "a malformed request": (headers(1, REQUEST[:2]), Http2ErrorCode.PROTOCOL_ERROR),
    "data after the end": (
        headers(1, [*REQUEST[:2], (b":path", b"/silent")], end=True) + data(1, b"x"),
        Http2ErrorCode.STREAM_CLOSED,
    ),
    "trailers that do not end": (headers(1) + headers(1, [(b"x", b"y")]), Http2ErrorCode.PROTOCOL_ERROR),
    "trailers with a path": (headers(1) + headers(1, end=True), Http2ErrorCode.PROTOCOL_ERROR),
    "a window update of nothing": (headers(1) + window_update(1, 0), Http2ErrorCode.PROTOCOL_ERROR),
    "a window too large": (headers(1) + window_update(1, MAX_WINDOW), Http2ErrorCode.FLOW_CONTROL_ERROR),
    "a priority of a wrong length": (
        headers(1) + frame(FrameType.PRIORITY, 0, 1, b"1234"),
        Http2ErrorCode.FRAME_SIZE_ERROR,
    ),
}


@pytest.mark.parametrize("sent,code", STREAM_FAULTS.values(), ids=STREAM_FAULTS)
def test_faults_that_end_a_stream(sent: bytes, code: Http2ErrorCode) -> None:
    peer = Peer()
    assert peer.send(sent) == [(FrameType.RST_STREAM, 0, 1, uint32(code))]
    assert all(exchange.closings == 1 for exchange in peer.application.exchanges)
    assert peer.send(headers(3, end=True))[-1][:3] == (FrameType.HEADERS, LAST, 3)


CONNECTION_FAULTS = {
    "a frame too large": (frame(FrameType.DATA, 0, 1, bytes(16385)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "data of no stream": (data(0, b"x"), Http2ErrorCode.PROTOCOL_ERROR),
    "data of an idle stream": (data(1, b"x"), Http2ErrorCode.PROTOCOL_ERROR),
    "headers of no stream": (headers(0), Http2ErrorCode.PROTOCOL_ERROR),
    "headers of the server's stream": (headers(2), Http2ErrorCode.PROTOCOL_ERROR),
    "a malformed block": (frame(FrameType.HEADERS, LAST, 1, b"\x80"), Http2ErrorCode.COMPRESSION_ERROR),
    "an interrupted block": (frame(FrameType.HEADERS, 0, 1, b"") + data(1, b""), Http2ErrorCode.PROTOCOL_ERROR),
    "a block of two streams": (
        frame(FrameType.HEADERS, 0, 1, b"") + frame(FrameType.CONTINUATION, 0, 3, b""),
        Http2ErrorCode.PROTOCOL_ERROR,
    ),
    "a continuation of nothing": (frame(FrameType.CONTINUATION, LAST, 1, b""), Http2ErrorCode.PROTOCOL_ERROR),
    "more padding than there is": (
        headers(1) + frame(FrameType.DATA, Flag.PADDED, 1, b"\x05abc"),
        Http2ErrorCode.PROTOCOL_ERROR,
    ),
    "no padding length": (headers(1) + frame(FrameType.DATA, Flag.PADDED, 1), Http2ErrorCode.FRAME_SIZE_ERROR),
    "no priority": (frame(FrameType.HEADERS, LAST | Flag.PRIORITY, 1, b"abc"), Http2ErrorCode.FRAME_SIZE_ERROR),
    "a priority of no stream": (frame(FrameType.PRIORITY, 0, 0, bytes(5)), Http2ErrorCode.PROTOCOL_ERROR),
    "a reset of an idle stream": (frame(FrameType.RST_STREAM, 0, 1, uint32(8)), Http2ErrorCode.PROTOCOL_ERROR),
    "a reset of a wrong length": (
        headers(1) + frame(FrameType.RST_STREAM, 0, 1, b"1"),
        Http2ErrorCode.FRAME_SIZE_ERROR,
    ),
    "settings of a stream": (frame(FrameType.SETTINGS, 0, 1), Http2ErrorCode.PROTOCOL_ERROR),
    "settings of a wrong length": (frame(FrameType.SETTINGS, 0, 0, b"12345"), Http2ErrorCode.FRAME_SIZE_ERROR),
    "an acknowledgement with settings": (
        frame(FrameType.SETTINGS, Flag.ACK, 0, bytes(6)),
        Http2ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a push of 2": (settings_frame(Setting.ENABLE_PUSH, 2), Http2ErrorCode.PROTOCOL_ERROR),
    "an initial window too large": (
        settings_frame(Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW + 1),
        Http2ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "an initial window that is too large for a stream": (
        headers(1) + window_update(1, 100_000) + settings_frame(Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW),
        Http2ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a frame limit too small": (settings_frame(Setting.MAX_FRAME_SIZE, 16383), Http2ErrorCode.PROTOCOL_ERROR),
    "a frame limit too large": (settings_frame(Setting.MAX_FRAME_SIZE, 2**24), Http2ErrorCode.PROTOCOL_ERROR),
    "a push": (frame(FrameType.PUSH_PROMISE, 0, 1, bytes(4)), Http2ErrorCode.PROTOCOL_ERROR),
    "a ping of a stream": (frame(FrameType.PING, 0, 1, bytes(8)), Http2ErrorCode.PROTOCOL_ERROR),
    "a ping of a wrong length": (frame(FrameType.PING, 0, 0, bytes(7)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "a farewell of a stream": (frame(FrameType.GOAWAY, 0, 1, bytes(8)), Http2ErrorCode.PROTOCOL_ERROR),
    "a farewell of a wrong length": (frame(FrameType.GOAWAY, 0, 0, bytes(7)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "a window update of nothing": (window_update(0, 0), Http2ErrorCode.PROTOCOL_ERROR),
    "a window update of a wrong length": (frame(FrameType.WINDOW_UPDATE, 0, 0, b"1"), Http2ErrorCode.FRAME_SIZE_ERROR),
    "a window update of an idle stream": (window_update(1, 1), Http2ErrorCode.PROTOCOL_ERROR),
    "a window too large": (window_update(0, MAX_WINDOW), Http2ErrorCode.FLOW_CONTROL_ERROR),
    "a header block too large": (
        frame(FrameType.HEADERS, 0, 1, bytes(16000))
        + frame(FrameType.CONTINUATION, 0, 1, bytes(16000)) * (MAX_HEADER_BLOCK_BYTES // 16000),
        Http2ErrorCode.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize("sent,code", CONNECTION_FAULTS.values(), ids=CONNECTION_FAULTS)
def test_faults_that_end_the_connection(sent: bytes, code: Http2ErrorCode) -> None:
    peer = Peer()
    peer.connection.receive(sent)
    assert peer.goaway_code() == code
    assert peer.connection.is_closed
    assert not peer.connection.streams
    assert all(exchange.closings == 1 for exchange in peer.application.exchanges)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", PREFACE + headers(1), b"PRI * HTTP/1"])
def test_what_is_no_http2_is_closed(sent: bytes) -> None:
    peer = Peer(greet=False)
    peer.connection.receive(sent)
    assert peer.goaway_code() == Http2ErrorCode.PROTOCOL_ERROR


# The work of a turn


def indexed(stream_id: int, count: int) -> bytes:
    """A request with `count` fields of a byte each: they name the newest entry of the table, which the block adds to."""
    block = encode_headers(REQUEST) + b"\x40\x01a\x01b" + b"\xbe" * (count - len(REQUEST) - 1)
    return frame(FrameType.HEADERS, Flag.END_HEADERS, stream_id, block)


def test_a_header_block_has_a_bounded_number_of_fields() -> None:
    peer = Peer()
    peer.send(indexed(1, MAX_FIELDS))
    assert len(peer.application.exchanges) == 1
    assert peer.code_in(peer.send(indexed(3, MAX_FIELDS + 1))) == Http2ErrorCode.ENHANCE_YOUR_CALM
    assert len(peer.application.exchanges) == 1


def test_trailers_have_a_bounded_number_of_fields() -> None:
    peer = Peer()
    peer.send(headers(1))
    block = b"\x40\x01a\x01b" + b"\xbe" * MAX_FIELDS
    trailers = frame(FrameType.HEADERS, Flag.END_HEADERS | Flag.END_STREAM, 1, block)
    assert peer.code_in(peer.send(trailers)) == Http2ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("fields", [len(REQUEST) + 1, MAX_FIELDS])
def test_a_turn_ends_by_work(fields: int) -> None:
    """What arrives while frames are left comes after them."""
    peer = Peer()
    count = 3 * TURN_WORK // (fields + 1)
    sent = b"".join(indexed(2 * number + 1, fields) for number in range(count))
    middle = len(sent) // 2 + 5  # within a frame
    peer.connection.receive(sent[:middle])
    peer.connection.receive(sent[middle:])
    turns = [len(peer.application.exchanges)]
    while peer.connection.is_behind:
        peer.connection.proceed()
        turns.append(len(peer.application.exchanges) - sum(turns))
    assert sum(turns) == min(count, MAX_STREAMS)
    assert len(turns) >= 3
    assert max(turns) <= TURN_WORK // (fields + 1) + 1
    assert [exchange.stream.id for exchange in peer.application.exchanges] == [2 * n + 1 for n in range(sum(turns))]


@pytest.mark.parametrize("reads", [2, 3, 7])
def test_several_reads_in_a_turn_share_its_work(reads: int) -> None:
    """The event loop may read a connection several times before it turns to another one."""
    peer, fields = Peer(), 7
    count = TURN_WORK // (fields + 1) + 2 * reads
    sent = [indexed(2 * number + 1, fields) for number in range(count)]
    for number in range(reads):
        peer.connection.receive(b"".join(sent[number * count // reads : (number + 1) * count // reads]))
    assert peer.connection.is_behind
    assert len(peer.application.exchanges) <= TURN_WORK // (fields + 1) + 1
    peer.connection.proceed()
    assert len(peer.application.exchanges) == count


def test_a_turn_ends_by_the_length_of_blocks() -> None:
    """A block may be one value in Huffman's code, which takes long to decode."""
    peer = Peer()
    value = b"\x00\x01h" + b"\x7f" + bytes([0x80 | (4000 - 127) % 128, (4000 - 127) >> 7]) + b"v" * 4000
    blocks = [encode_headers(REQUEST) + value + b"\x40\x01a\x01%d" % (number % 10) for number in range(30)]
    sent = [frame(FrameType.HEADERS, Flag.END_HEADERS, 2 * number + 1, block) for number, block in enumerate(blocks)]
    peer.connection.receive(b"".join(sent))
    turns = [len(peer.application.exchanges)]
    while peer.connection.is_behind:
        peer.connection.proceed()
        turns.append(len(peer.application.exchanges) - sum(turns))
    assert sum(turns) == 30
    assert max(turns) <= TURN_WORK // (4000 // WORK_BYTES) + 1


def test_nothing_is_left_to_do_for_a_connection_that_ended() -> None:
    peer = Peer()
    peer.connection.receive(b"".join(headers(2 * number + 1) for number in range(TURN_WORK + 10)))
    assert peer.connection.is_behind
    begun = len(peer.application.exchanges)
    peer.connection.lose()
    peer.connection.proceed()
    assert len(peer.application.exchanges) == begun


# The end


def test_draining_serves_what_is_on_its_way_and_closes_with_the_last_stream() -> None:
    peer = Peer()
    peer.send(headers(1))
    peer.connection.drain()
    peer.connection.drain()
    (goodbye, _, _, last), ping = peer.take()
    assert (goodbye, last) == (FrameType.GOAWAY, uint32(MAX_WINDOW) + uint32(Http2ErrorCode.NO_ERROR))
    assert peer.send(headers(3)) == []  # it was sent before the client knew
    answer = peer.send(frame(FrameType.PING, Flag.ACK, 0, ping[3]))
    assert answer == [(FrameType.GOAWAY, 0, 0, uint32(3) + uint32(Http2ErrorCode.NO_ERROR))]
    assert peer.send(headers(5), data(5, b"")) == []  # too late: not looked at
    peer.send(data(1, b"", end=True))
    assert not peer.connection.is_closed
    answer = peer.send(data(3, b"3", end=True))
    assert [payload for kind, _, _, payload in answer if kind == FrameType.DATA] == [b"3"]
    assert peer.connection.is_closed
    assert len(peer.application.exchanges) == 2


def test_an_idle_connection_closes_as_soon_as_it_has_drained() -> None:
    peer = Peer()
    peer.connection.drain()
    peer.send(frame(FrameType.PING, Flag.ACK, 0, peer.take()[1][3]))
    assert peer.connection.is_closed

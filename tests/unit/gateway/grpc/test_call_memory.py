"""Calls charge what has arrived of their messages and what is not read of their responses; those that stall end."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.gateway.grpc_frontend import GrpcFrontend, Loop, raw_request
from tests.support.gateway.http2_peer import REQUEST, Wire, data, headers, settings_frame
from tests.support.waiting import wait_until
from weir.gateway.grpc.options import GrpcOptions
from weir.gateway.http2.frames import Setting
from weir.http_server.stall_detection import STALL_PERIOD_S

CONTENT = bytes(1_000_000)
LARGE = raw_request(
    "same_FP32", inputs=[{"name": "IN", "datatype": "FP32", "shape": [1, 250_000]}], raw_input_contents=[CONTENT]
).SerializeToString()
LIMIT = 8_000_000


@pytest.fixture
def frontend(grpc_loop: Loop) -> Iterator[GrpcFrontend]:
    opened = GrpcFrontend(grpc_loop, GrpcOptions(max_receive_bytes=60_000_000))
    opened.server.ledger.limit_bytes = LIMIT
    yield opened
    opened.close()


def head(path: str = "ModelInfer") -> list[tuple[bytes, bytes]]:
    path_field = (b":path", f"/inference.GRPCInferenceService/{path}".encode())
    return [path_field if name == b":path" else (name, value) for name, value in REQUEST]


def ask(wire: Wire, stream_id: int, message: bytes, method: str = "ModelInfer") -> None:
    framed = b"\0" + len(message).to_bytes(4, "big") + message
    parts = [framed[at : at + 16384] for at in range(0, len(framed), 16384)]
    wire.send(headers(stream_id, head(method)), *(data(stream_id, part, part is parts[-1]) for part in parts))


def check_progress(frontend: GrpcFrontend, *times_s: float) -> None:
    for now_s in times_s:
        for connection in list(frontend.server.connections):
            frontend.loop.call(lambda connection=connection, now_s=now_s: connection.check_progress(now_s))


def test_unread_responses_of_all_connections_of_a_client_are_bounded(frontend: GrpcFrontend) -> None:
    ledger = frontend.server.ledger
    wires = [Wire(frontend.port) for _ in range(3)]
    try:
        for wire in wires:
            wire.send(settings_frame(Setting.INITIAL_WINDOW_SIZE, 0))
            for number in range(5):
                ask(wire, 2 * number + 1, LARGE)
        fields, _ = wires[-1].response(9)  # there is no room for the last one
        assert (fields[b"grpc-status"], fields[b"retry-after"]) == (b"8", b"1")
        wait_until(lambda: ledger.held_bytes["unsent"] > 4 * len(CONTENT))
        assert ledger.peak_bytes <= ledger.principal_share_bytes
        assert frontend.client.is_server_live()
    finally:
        for wire in wires:
            wire.socket.close()
    wait_until(lambda: not ledger.total_bytes)


def test_a_message_that_stops_arriving_ends_its_call_alone(frontend: GrpcFrontend) -> None:
    with Wire(frontend.port) as wire:
        wire.send(headers(1, head()), data(1, b"\0" + (5000).to_bytes(4, "big") + bytes(100)))
        wire.send(headers(3, head()), data(3, b"\0\0\0\0\0"))  # complete, and its stream stays open
        wait_until(lambda: frontend.server.ledger.total_bytes == 100)
        check_progress(frontend, 1000.0, 1000.0 + STALL_PERIOD_S - 1)
        assert frontend.server.ledger.total_bytes == 100
        check_progress(frontend, 1000.0 + STALL_PERIOD_S)
        fields, _ = wire.response(1)
        assert fields[b"grpc-status"] == b"4"
        assert b"stalled" in fields[b"grpc-message"]
        assert frontend.server.ledger.total_bytes == 0
        wire.send(data(3, b"", end=True))
        assert wire.response(3)[0][b"grpc-status"] != b"4"


def test_a_message_is_charged_until_its_response_is_sent(
    frontend: GrpcFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()

    async def is_server_ready() -> bool:
        await gate.wait()
        return True

    monkeypatch.setattr(frontend.context.readiness, "is_server_ready", is_server_ready)
    unknown_field = b"\xa2\x06" + b"\xc0\x84\x3d" + bytes(1_000_000)  # number 100, which is unknown
    ledger = frontend.server.ledger
    with Wire(frontend.port) as wire:
        ask(wire, 1, unknown_field, "ServerReady")
        wait_until(lambda: ledger.total_bytes == len(unknown_field))
        ask(wire, 3, b"", "ServerLive")
        assert wire.response(3)[0][b"grpc-status"] == b"0"
        assert ledger.total_bytes == len(unknown_field)
        frontend.loop.call(gate.set)
        assert wire.response(1)[0][b"grpc-status"] == b"0"
        wait_until(lambda: not ledger.total_bytes)

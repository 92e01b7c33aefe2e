"""`ProcessConnection`, with messages that the test sends in place of a process."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgpack
import pytest

import weir.worker.backends.python.calls
from tests.support.fakes.called_models import CalledModels, ModelCall, called, outputs, respond
from tests.support.models.python_scripts import numbers
from tests.support.waiting import wait_until
from weir.schemas.core.errors import ErrorCode, internal, unavailable
from weir.worker.python_stub._weir_channel import LENGTH, Channel, Kind
from weir.worker.python_stub._weir_memory import create_memory

__all__ = ["called"]


class Peer:
    """The process's end of a connection, spoken by hand."""

    def __init__(self, called: CalledModels) -> None:
        end, self.end = socket.socketpair()
        self.end.settimeout(10)
        self.channel = Channel(self.end)
        self.connection = called.calls.connect(end, create_memory("test"), "m")

    def call(self, number: int, row: object = None) -> None:
        self.channel.send(Kind.CALL, number, True, row or ("m", -1, "", 0, 0, 0, {}, [], "", []))

    def close(self) -> None:
        self.connection.close()
        self.end.close()


@pytest.fixture
def peer(called: CalledModels) -> Iterator[Peer]:
    made = Peer(called)
    yield made
    made.close()


class TestConnection:
    @pytest.mark.parametrize(
        "message",
        [
            b"\xc1",
            msgpack.packb(7),
            msgpack.packb([Kind.CALL]),
            msgpack.packb([Kind.CALL, 1, False, ["m"]]),
            msgpack.packb([Kind.CALL, 1, False, [3, -1, "", 0, 0, 0, {}, [], "", []]]),
            msgpack.packb([Kind.CALL, 1, False, ["m", -1, "", 0, 0, 0, {}, [], "", [["A", "FP31", [1], b"1234"]]]]),
            msgpack.packb(
                [Kind.CALL, 1, False, ["m", -1, "", 0, 0, 0, {}, [], "", [["A", "FP32", [1], [0, 1 << 40]]]]]
            ),
            msgpack.packb([Kind.DONE, 1]),
            msgpack.packb([Kind.CALL, 1, False, ["m", -1, "", 0, 0, 0, {"p": [1]}, [], "", []]]),
            msgpack.packb([Kind.CALL, 1, False, ["m", -1, "", 0, 0, 0, [1], [], "", []]]),
            msgpack.packb([Kind.LOAD, 1, "m"]),
            msgpack.packb([Kind.LOAD, 1, 3, None, {}]),
            msgpack.packb([Kind.IS_MODEL_READY, 1, "m", 3]),
        ],
    )
    def test_a_malformed_call_closes_the_connection(self, called: CalledModels, peer: Peer, message: bytes) -> None:
        peer.call(1)
        wait_until(lambda: called.received)
        peer.end.sendall(LENGTH.pack(len(message)) + message)
        with pytest.raises((EOFError, OSError)):
            peer.channel.receive()
        wait_until(lambda: called.cancelled == called.received)

    def test_calls_are_rejected_while_the_broker_is_not_available(self, called: CalledModels, peer: Peer) -> None:
        opened = called.open

        async def refuse() -> None:
            raise unavailable("the message broker is not available")

        called.open = refuse  # type: ignore[method-assign]
        text = "Model m - Error when running inference: the message broker is not available"
        for number in range(2):
            peer.call(number)
            assert peer.channel.receive() == (Kind.CALL_RESPONSE, number, (ErrorCode.UNAVAILABLE.number, text), True)
        called.open = opened  # type: ignore[method-assign]
        peer.call(3)
        wait_until(lambda: called.received)

    def test_messages_in_pieces(self, called: CalledModels, peer: Peer) -> None:
        called.react = lambda call: respond(call, internal("no"))
        packed = msgpack.packb([Kind.CALL, 5, True, ["m", -1, "", 0, 0, 0, {}, [], "", []]])
        for byte in LENGTH.pack(len(packed)) + packed:
            peer.end.sendall(bytes([byte]))
        assert peer.channel.receive() == (Kind.CALL_RESPONSE, 5, (ErrorCode.INTERNAL.number, "no"), True)

    def test_a_stream_that_is_not_read_is_cancelled(
        self, called: CalledModels, peer: Peer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(weir.worker.backends.python.calls, "MAX_UNSENT_BYTES", 300_000)

        def flood(call: ModelCall) -> None:
            sent = 0
            while call not in called.cancelled:
                call.on_response(outputs(numbers(10_000)), False)
                sent += 1
                assert sent < 1000

        called.react = flood
        peer.call(1)
        wait_until(lambda: called.cancelled == called.received != [])
        answers = []
        while not answers or not answers[-1][-1]:
            answers.append(peer.channel.receive())
        code, text = answers[-1][2]
        assert code == ErrorCode.UNAVAILABLE.number
        assert text.startswith("the responses came faster than they were read")

    def test_only_lent_outputs_are_released(self, called: CalledModels, peer: Peer) -> None:
        peer.channel.send(Kind.RELEASE, [("weir-x", 0, 1)])
        peer.channel.send(Kind.CANCEL_CALL, 99, False)
        peer.channel.send(Kind.IS_MODEL_READY, 1, "m", "")
        assert peer.channel.receive() == (Kind.DONE, 1, True)
        assert not called.released

"""The connection of a model's calls, spoken by hand from the process's side."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgpack
import pytest
from asked_models import AskedModels, Question, answer, asked, outputs
from python_models import numbers
from python_senders import until

import worker.backends.python_calls
from schemas.errors import ErrorCode, internal, unavailable
from worker.python_stub._weir_channel import LENGTH, Channel, Kind
from worker.python_stub._weir_memory import create_memory

__all__ = ["asked"]


class Peer:
    """The process's end of a connection, spoken by hand."""

    def __init__(self, asked: AskedModels) -> None:
        end, self._end = socket.socketpair()
        self._end.settimeout(10)
        self.channel = Channel(self._end)
        self.connection = asked.calls.connect(end, create_memory("test"), "m")

    def call(self, number: int, row: object = None) -> None:
        self.channel.send(Kind.CALL, number, True, row or ("m", -1, "", 0, 0, 0, {}, [], "", []))

    def close(self) -> None:
        self.connection.close()
        self._end.close()


@pytest.fixture
def peer(asked: AskedModels) -> Iterator[Peer]:
    made = Peer(asked)
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
    def test_what_makes_no_sense_ends_it(self, asked: AskedModels, peer: Peer, message: bytes) -> None:
        peer.call(1)
        until(lambda: asked.questions)
        peer._end.sendall(LENGTH.pack(len(message)) + message)
        with pytest.raises((EOFError, OSError)):
            peer.channel.receive()
        until(lambda: asked.abandoned == asked.questions)

    def test_calls_are_refused_while_the_broker_is_away(self, asked: AskedModels, peer: Peer) -> None:
        opened = asked.open

        async def refuse() -> None:
            raise unavailable("the message broker is not available")

        asked.open = refuse  # type: ignore[method-assign]
        text = "Model m - Error when running inference: the message broker is not available"
        for number in range(2):
            peer.call(number)
            assert peer.channel.receive() == (Kind.ANSWER, number, (ErrorCode.UNAVAILABLE.number, text), True)
        asked.open = opened  # type: ignore[method-assign]
        peer.call(3)
        until(lambda: asked.questions)

    def test_messages_in_pieces(self, asked: AskedModels, peer: Peer) -> None:
        asked.react = lambda question: answer(question, internal("no"))
        packed = msgpack.packb([Kind.CALL, 5, True, ["m", -1, "", 0, 0, 0, {}, [], "", []]])
        for byte in LENGTH.pack(len(packed)) + packed:
            peer._end.sendall(bytes([byte]))
        assert peer.channel.receive() == (Kind.ANSWER, 5, (ErrorCode.INTERNAL.number, "no"), True)

    def test_a_stream_that_is_not_read_is_given_up(
        self, asked: AskedModels, peer: Peer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker.backends.python_calls, "MAX_UNSENT_BYTES", 300_000)

        def flood(question: Question) -> None:
            sent = 0
            while question not in asked.abandoned:
                question.on_answer(outputs(numbers(10_000)), False)
                sent += 1
                assert sent < 1000

        asked.react = flood
        peer.call(1)
        until(lambda: asked.abandoned == asked.questions != [])
        answers = []
        while not answers or not answers[-1][-1]:
            answers.append(peer.channel.receive())
        code, text = answers[-1][2]
        assert code == ErrorCode.UNAVAILABLE.number
        assert text.startswith("the responses came faster than they were read")

    def test_gives_back_only_what_was_lent(self, asked: AskedModels, peer: Peer) -> None:
        peer.channel.send(Kind.RELEASE, [("weir-x", 0, 1)])
        peer.channel.send(Kind.GIVE_UP, 99)
        peer.channel.send(Kind.IS_MODEL_READY, 1, "m", "")
        assert peer.channel.receive() == (Kind.DONE, 1, True)
        assert not asked.released

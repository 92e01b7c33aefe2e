"""A listener serves authenticated readers, and disconnects others and those that violate the protocol."""

from __future__ import annotations

import asyncio

import pytest

from bus.nats.access import NO_ACCESS
from bus.payloads.peer import listener as direct_listener
from bus.payloads.peer.authentication import NONCE_BYTES, PROOF_BYTES, new_nonce, reader_proof
from bus.payloads.peer.listener import PeerListener
from bus.payloads.peer.stream import CONTENT_LENGTH, CURRENT, GONE, PEER_PIECE_BYTES, REQUEST_LENGTH, STALE
from schemas.core.names import ListenAddress
from schemas.wire.transfers import PayloadFetch
from tests.support.payload_pairs import Pair, pair, run


async def _greeted(listener: PeerListener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    return reader, writer, await reader.readexactly(NONCE_BYTES)


def test_a_reader_without_the_secret_is_disconnected() -> None:
    async def ask() -> None:
        async with pair() as both:
            assert both.listener is not None
            ref, _ = both.payload(1000)
            question = PayloadFetch(ref).pack()
            reader, writer, greeting = await _greeted(both.listener)
            nonce = new_nonce()
            writer.write(
                nonce + reader_proof(bytes(32), greeting, nonce) + REQUEST_LENGTH.pack(len(question)) + question
            )
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            assert both.listener.refused == 1
            writer.close()

    run(ask)


def test_a_reader_that_does_not_authenticate_in_time_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_listener, "PROOF_TIMEOUT_S", 0.05)
    monkeypatch.setattr(direct_listener, "_CHECK_EVERY_S", 0.02)

    async def wait() -> None:
        async with pair() as both:
            assert both.listener is not None
            reader, writer, _ = await _greeted(both.listener)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), 10)
            assert both.listener.refused == 1
            writer.close()

    run(wait)


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_listener, "MAX_UNPROVEN", 2)

    async def connect() -> None:
        async with pair() as both:
            assert both.listener is not None
            kept = [await _greeted(both.listener) for _ in range(2)]
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await _greeted(both.listener)
            assert both.listener.refused == 1
            for _, writer, _ in kept:
                writer.close()

    run(connect)


@pytest.mark.parametrize("question", [b"\xff\xff", REQUEST_LENGTH.pack(3) + b"abc"])
def test_a_malformed_request_closes_the_connection(question: bytes) -> None:
    async def ask() -> None:
        async with pair() as both:
            reader, writer = await _proven(both)
            writer.write(question)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), 10)
            writer.close()

    run(ask)


async def _proven(both: Pair) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert both.listener is not None
    reader, writer, greeting = await _greeted(both.listener)
    nonce = new_nonce()
    writer.write(nonce + reader_proof(both.listener.address("").secret, greeting, nonce))
    await reader.readexactly(PROOF_BYTES)
    return reader, writer


def test_a_payload_that_is_freed_while_it_is_sent_is_reported_as_stale() -> None:
    async def ask() -> None:
        async with pair() as both:
            reader, writer = await _proven(both)
            slot = both.arena.allocate(16 * PEER_PIECE_BYTES)
            assert slot is not None
            slot.view[:] = b"a" * len(slot.view)
            for number in range(16):
                question = PayloadFetch(slot.ref(number * PEER_PIECE_BYTES, PEER_PIECE_BYTES)).pack()
                writer.write(REQUEST_LENGTH.pack(len(question)) + question)
            assert both.listener is not None
            while not both.listener.sent_bytes:  # some of it lies in the kernel, which takes no more
                await asyncio.sleep(0.001)
            slot.free()
            again = both.arena.allocate(16 * PEER_PIECE_BYTES)
            assert again is not None
            again.view[:] = b"b" * len(again.view)
            verdicts = []
            for _ in range(16):
                (length,) = CONTENT_LENGTH.unpack(await reader.readexactly(CONTENT_LENGTH.size))
                if length == GONE:
                    verdicts.append(GONE)
                    continue
                content = await reader.readexactly(length)
                verdicts.append((await reader.readexactly(1))[0])
                assert verdicts[-1] == STALE or content == b"a" * length
            assert CURRENT in verdicts
            assert GONE in verdicts
            writer.close()

    run(ask)


def test_a_listener_on_all_addresses_announces_that_of_the_broker_connection() -> None:
    async def tell() -> None:
        listener = PeerListener("x", ListenAddress("0.0.0.0"), NO_ACCESS, is_encrypted=False)
        await listener.start()
        assert listener.address("10.0.0.7").host == "10.0.0.7"
        assert not listener.address("").port, "while the broker is away nobody asks"
        listener.close()
        assert not listener.address("10.0.0.7").port

    run(tell)

"""The rest of a large body is received in its payload slot, and what follows it is the next request."""

import asyncio
import os
import select
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tests.support.gateway.http_frontend import CONFIG, HttpFrontend, head, run
from tests.support.waiting import eventually
from weir.bus.naming.identity import new_id
from weir.bus.payloads.arena import PayloadArena, PayloadBudget
from weir.calls.payload_store import PayloadStore
from weir.gateway.http.exchange import InferExchange
from weir.http_server.read_turns import TURN_BYTES, ReadTurns
from weir.http_server.stall_detection import STALL_PERIOD_S
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import internal

SIZE = 900_000
CONTENT = bytes(range(256)) * (SIZE // 256)


def request(content: bytes, *lines: str) -> bytes:
    tensor = len(content).to_bytes(4, "little") + content
    header = b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":%d}}]}' % len(
        tensor
    )
    lines = ("POST /v2/models/m/infer HTTP/1.1", "Host: x", *lines, f"Inference-Header-Content-Length: {len(header)}")
    length = f"Content-Length: {len(header) + len(tensor)}"
    return "\r\n".join((*lines, length, "", "")).encode() + header + tensor


@pytest.fixture(autouse=True)
def single_response_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIG.model_dump(), "model_transaction_policy": {"decoupled": False}}
    monkeypatch.setattr("tests.support.gateway.http_frontend.CONFIG", ModelConfig.model_validate(config))


@pytest.fixture
def payloads() -> Iterator[PayloadStore]:
    arena = PayloadArena(new_id("gateway"), 1 << 24, PayloadBudget(1 << 24))
    yield PayloadStore(arena, lambda _model: True)
    arena.close()


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pieces that exchanges got from the parser."""
    sizes: list[int] = []
    receive = InferExchange.receive

    def spy(exchange: InferExchange, data: bytes) -> None:
        sizes.append(len(data))
        receive(exchange, data)

    monkeypatch.setattr(InferExchange, "receive", spy)
    return sizes


async def answer(frontend: HttpFrontend, reader: asyncio.StreamReader, content: bytes) -> None:
    asked, respond = await frontend.next_request()
    assert bytes(asked.inputs[0].data)[4:] == content  # type: ignore[arg-type]
    respond(internal("it came"), True)
    status, headers = await head(reader)
    assert status == 500
    await reader.readexactly(int(headers["content-length"]))


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_pipelined_requests_after_a_large_body_are_read(
    runner: Callable[..., Any], payloads: PayloadStore, in_pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.gateway.http_frontend.asyncio.run", runner)
    bodies = [CONTENT, b"small", CONTENT[::-1], CONTENT[5:], b"last"]

    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await frontend.open()
        writer.write(b"".join(map(request, bodies)))
        for body in bodies:
            await answer(frontend, reader, body)
        writer.write(request(CONTENT))
        await answer(frontend, reader, CONTENT)
        writer.close()
        await eventually(lambda: not frontend.arriving_slots.total_bytes and not frontend.ledger.total_bytes)

    run(scenario, payloads=payloads)
    assert sum(in_pieces) < 3 * SIZE, "less than a part of each of the four large bodies went through the parser"


def test_a_client_that_disconnects_in_the_middle_leaves_nothing(payloads: PayloadStore) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        _, writer = await frontend.open()
        writer.write(request(CONTENT)[: SIZE // 2])
        await eventually(lambda: payloads.slots_in_use == 1)
        writer.close()
        await eventually(lambda: payloads.slots_in_use == 0)
        assert not frontend.listeners.connections("HTTP")
        assert not frontend.arriving_slots.total_bytes

    run(scenario, payloads=payloads)


def test_what_arrives_of_a_rejected_body_is_not_written_into_its_slot(payloads: PayloadStore) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await frontend.open()
        message = request(CONTENT)
        writer.write(message[: SIZE // 2])
        (connection,) = frontend.listeners.connections("HTTP")
        await eventually(lambda: payloads.slots_in_use == 1)
        exchange: Any = connection._latest
        await eventually(lambda: exchange.received_bytes > SIZE // 3)
        slot = exchange.body.slot
        frontend.check_progress(1000.0)
        frontend.check_progress(1000.0 + STALL_PERIOD_S)
        status, _ = await head(reader)
        assert status == 408
        assert payloads.slots_in_use == 0
        slot.view[:] = b"x" * len(slot.view)  # the slot may be another request's now
        writer.write(message[SIZE // 2 :])
        assert await reader.read() is not None
        await eventually(lambda: not frontend.listeners.connections("HTTP"))
        assert bytes(slot.view) == b"x" * len(slot.view)
        writer.close()

    run(scenario, payloads=payloads)


def test_a_body_without_a_slot_goes_through_the_parser(in_pieces: list[int]) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await frontend.open()
        writer.write(request(CONTENT))
        await answer(frontend, reader, CONTENT)
        writer.close()

    run(scenario, payloads=SimpleNamespace(slot_for_body=lambda _size: None))
    assert sum(in_pieces) > len(CONTENT)


def test_other_connections_have_their_turn_while_a_large_body_arrives(
    payloads: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.gateway.http_frontend.asyncio.run", uvloop.run)
    content = bytes(6_000_000)
    turns = [0]
    count = ReadTurns.count

    def spy(read_turns: ReadTurns, size: int) -> None:
        turns[-1] += size
        count(read_turns, size)

    monkeypatch.setattr(ReadTurns, "count", spy)

    def next_turn() -> None:
        turns.append(0)
        asyncio.get_running_loop().call_soon(next_turn)

    async def scenario(frontend: HttpFrontend) -> None:
        next_turn()
        reader, writer = await frontend.open()
        client = writer.get_extra_info("socket")
        # Sent by a thread: so there is always more to read than a turn takes.
        sending = asyncio.to_thread(_send_all, os.dup(client.fileno()), request(content))
        _, respond = (await asyncio.gather(frontend.next_request(), sending))[0]
        respond(internal("it came"), True)
        assert (await head(reader))[0] == 500
        writer.close()

    run(scenario, input_size=2 * len(content), payloads=payloads)
    assert sum(turns) > len(content)
    assert max(turns) < 2 * TURN_BYTES, "a read that begins before the limit may end after it"


def _send_all(fd: int, content: bytes) -> None:
    with socket.socket(fileno=fd) as client:
        while content:
            _, writable, _ = select.select([], [client], [], 20)
            assert writable
            content = content[client.send(content) :]

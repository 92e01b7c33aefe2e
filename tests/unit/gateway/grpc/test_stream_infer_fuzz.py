"""Streams of calls with frames changed, lost and repeated: nothing is raised, and nothing is left behind."""

import asyncio
import gzip
import random
from typing import Any

import pytest

from tests.support.gateway.grpc_frontend import Calculator, Models, make_context, raw_request, repeat_request
from tests.support.gateway.grpc_streams import STREAM_HEAD, framed
from tests.support.gateway.http2_peer import GREETING, data, frame, headers, uint32, window_update
from weir.gateway.grpc import stream_infer as stream_methods
from weir.gateway.grpc.options import GrpcOptions
from weir.gateway.grpc.server import GrpcServer
from weir.gateway.http2.connection import Connection
from weir.gateway.http2.frames import FrameType
from weir.gateway.http2.options import Http2Options
from weir.gateway.http2.send_buffer import SendBuffer
from weir.schemas.core.errors import not_found

SESSIONS = 50


def session(chance: random.Random) -> bytes:
    """The bytes of a client with some streams, not all of them well-formed."""
    frames = []
    for stream_id in range(1, 2 * chance.randint(1, 4), 2):
        encoding = chance.choice([b"identity", b"gzip"])
        more = [(b"grpc-encoding", encoding), (b"grpc-accept-encoding", b"gzip")]
        if chance.random() < 0.3:
            more.append((b"triton_grpc_error", b"true"))
        if chance.random() < 0.2:
            more.append((b"grpc-timeout", b"%dm" % chance.randint(1, 20)))
        frames.append(headers(stream_id, [*STREAM_HEAD, *more]))
        body = b"".join(message(chance, encoding) for _ in range(chance.randint(0, 12)))
        cut = chance.choice([5, 60, 700, 16_000])
        frames += [data(stream_id, body[at : at + cut]) for at in range(0, len(body), cut)]
        if chance.random() < 0.6:
            frames.append(data(stream_id, b"", end=True))
        if chance.random() < 0.2:
            frames.append(frame(FrameType.RST_STREAM, 0, stream_id, uint32(8)))
        if chance.random() < 0.5:
            frames.append(window_update(stream_id, chance.randint(1, 100_000)))
    for _ in range(chance.choice([0, 0, 1, 3])):
        at = chance.randrange(len(frames))
        change = chance.randrange(3)
        if change == 0:
            del frames[at : at + 1]
        elif change == 1:
            frames.insert(chance.randrange(len(frames)), frames[at])
        else:
            changed = bytearray(frames[at])
            changed[chance.randrange(len(changed))] = chance.randrange(256)
            frames[at] = bytes(changed)
        if not frames:
            break
    return GREETING + b"".join(frames)


def message(chance: random.Random, encoding: bytes) -> bytes:
    model = chance.choice(["same_FP32", "silent", "failing", "unknown", "repeat"])
    id = str(chance.randrange(100)) if chance.random() < 0.7 else ""
    size = chance.choice([4, 4, 200_000])
    request = repeat_request(chance.randrange(4), chance.randrange(4), size, id=id)
    if model != "repeat":
        request = raw_request(model, id=id)
    body = framed(request)
    if encoding == b"gzip" and chance.random() < 0.7:
        packed = gzip.compress(body[5:] + (b"" if chance.random() < 0.8 else bytes(2_000_000)))
        return b"\1" + len(packed).to_bytes(4, "big") + packed
    return body


@pytest.mark.parametrize("seed,level", [(1, "none"), (2, "low")])
async def test_nothing_is_raised_and_nothing_left(seed: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(stream_methods, "MAX_STREAM_REQUESTS", 4)
    faults: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context))
    calculator = Calculator()
    calculator.failure = not_found("told to fail")
    server = GrpcServer(make_context(Models(), calculator), GrpcOptions(infer_response_compression_level=level))
    server.ledger.limit_bytes = 1_000_000
    for _ in range(SESSIONS):
        await one_session(server, calculator, session(chance), chance)
    assert not faults
    assert len(calculator.requests) > len(calculator.cancelled) > 0


async def one_session(server: GrpcServer, calculator: Calculator, sent: bytes, chance: random.Random) -> None:
    loop = asyncio.get_running_loop()
    account = server.ledger.account("fuzz")
    output = SendBuffer(lambda: loop.call_soon(lambda: output.take()), account)
    connection = Connection(server, Http2Options(), loop.time, output)
    step = chance.choice([100, 5000, len(sent)])
    for at in range(0, len(sent), step):
        connection.receive(sent[at : at + step])
        await asyncio.sleep(0)
        while calculator.held and chance.random() < 0.5:
            calculator.held.pop()()
    connection.lose()
    await asyncio.sleep(0)
    assert not server.open_calls
    assert not connection.streams
    assert output.unsent_bytes == 0
    assert connection.buffered_bytes == 0
    assert account.held_bytes == 0

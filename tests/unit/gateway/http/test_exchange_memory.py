"""Over HTTP the memory ledger counts what has arrived and what is not read, and stalled clients lose their connection."""

import asyncio
import gc
import gzip
import json
from collections.abc import Callable

import pytest

from tests.support.gateway.http_frontend import CONFIG, HttpFrontend, head, run
from tests.support.waiting import eventually
from weir.bus.naming.identity import new_id
from weir.bus.payloads.arena import PayloadArena, PayloadBudget
from weir.calls.payload_store import PayloadStore
from weir.durable.api.reporting import read_ledger
from weir.gateway.http.body import SLOT_AFTER_BYTES
from weir.gateway.http.compression import BodyInflation
from weir.gateway.inflation import STEP_BYTES
from weir.gateway.metrics.weir import memory_families, refusal_family
from weir.http_server.connection import MAX_HEAD_BYTES
from weir.http_server.stall_detection import MIN_PROGRESS_BYTES, STALL_PERIOD_S, UNREAD_PERIOD_S
from weir.runtime.memory_ledger import MemoryLedger
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import internal
from weir.schemas.core.requests import InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.statistics import DispatchCounters

LARGE = 200_000
PIECE = b"a" * MIN_PROGRESS_BYTES
CHUNK = b"%x\r\n%b\r\n" % (len(PIECE), PIECE)
INFER = "/v2/models/m/infer"
BODY = b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"data":["%b"]}]}' % (b"a" * LARGE)


@pytest.fixture(autouse=True)
def single_response_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIG.model_dump(), "model_transaction_policy": {"decoupled": False}}
    monkeypatch.setattr("tests.support.gateway.http_frontend.CONFIG", ModelConfig.model_validate(config))


def request(body: bytes, *lines: str, path: str = INFER, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return (
        "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *lines, "", ""]).encode()
        + body
    )


def chunked(body: bytes) -> bytes:
    begin = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return begin + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


async def opened(frontend: HttpFrontend) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", frontend.port)


async def answered(frontend: HttpFrontend, reader: asyncio.StreamReader) -> int:
    (await frontend.next_request())[1](internal("it came"), True)
    status, headers = await head(reader)
    await reader.readexactly(int(headers["content-length"]))
    return status


@pytest.mark.parametrize("path", [INFER, "/v2/models/m/generate"])
def test_an_announced_body_holds_nothing_before_it_arrives(path: str) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        frontend.ledger.limit_bytes = 2_000_000
        silent = [await opened(frontend) for _ in range(20)]
        for _, writer in silent:
            writer.write(request(b"{", path=path, length=900_000))
        await eventually(lambda: frontend.ledger.total_bytes == len(silent))
        reader, writer = await opened(frontend)
        writer.write(request(BODY))
        assert await answered(frontend, reader) == 500
        assert frontend.ledger.refused == {}
        for _, each in silent:
            each.close()
        await eventually(lambda: not frontend.ledger.total_bytes)
        writer.close()

    run(scenario)


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_body_without_room_is_rejected_and_its_connection_stays_open(is_stated: bool) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        frontend.ledger.limit_bytes = LARGE * 3
        others = [await opened(frontend) for _ in range(2)]
        for number, (_, writer) in enumerate(others):
            writer.write(request(BODY[: -10 - number * LARGE // 4], length=len(BODY)))
        await eventually(lambda: frontend.ledger.total_bytes > LARGE * 7 // 4)
        reader, writer = await opened(frontend)
        writer.write(request(BODY) if is_stated else chunked(BODY))
        status, headers = await head(reader)
        assert (status, headers["retry-after"]) == (503, "1")
        await reader.readexactly(int(headers["content-length"]))
        assert frontend.ledger.refused == {"http": 1}
        others[0][1].write(BODY[-10:])
        assert await answered(frontend, others[0][0]) == 500
        writer.write(request(BODY))
        assert await answered(frontend, reader) == 500
        for _, each in others:
            each.close()  # the second one in the middle of its body
        await eventually(lambda: not frontend.ledger.total_bytes)
        writer.close()

    run(scenario)


def test_a_client_that_ends_its_connection_reads_the_rejection_too() -> None:
    """Closing while the client sends would reset the connection, and destroy the response in transit."""

    async def scenario(frontend: HttpFrontend) -> None:
        frontend.ledger.limit_bytes = LARGE * 3
        _, other = await opened(frontend)
        other.write(request(BODY[:-10], length=len(BODY)))
        await eventually(lambda: frontend.ledger.total_bytes > LARGE * 3 // 4)
        reader, writer = await opened(frontend)
        begin = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        piece = b"%x\r\n%b\r\n" % (LARGE, b"a" * LARGE)
        writer.write(begin.encode() + piece)
        await eventually(lambda: frontend.ledger.refused == {"http": 1})
        for _ in range(20):
            writer.write(piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        status, headers = await head(reader)
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        await reader.readexactly(int(headers["content-length"]))
        assert await reader.read() == b""
        for each in (other, writer):
            each.close()
        await eventually(lambda: not frontend.ledger.total_bytes)

    run(scenario)


@pytest.mark.parametrize("length", [900_000, None])
def test_a_body_of_another_route_counts_too(length: int | None) -> None:
    text = b'{"text":"%b' % (b"a" * 720_000)

    async def scenario(frontend: HttpFrontend) -> None:
        frontend.ledger.limit_bytes = 1_900_000
        first = await opened(frontend)
        first[1].write(request(text, path="/v2/models/m/generate", length=900_000))
        await eventually(lambda: frontend.ledger.total_bytes == len(text))
        reader, writer = await opened(frontend)
        if length is None:
            writer.write(
                b"POST /v2/models/m/generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            writer.write(b"%x\r\n%b" % (len(text), text))
        else:
            writer.write(request(text, path="/v2/models/m/generate", length=length))
        status, headers = await head(reader)
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert (
            "too many unfinished requests"
            in json.loads(await reader.readexactly(int(headers["content-length"])))["error"]
        )
        assert frontend.ledger.total_bytes <= frontend.ledger.principal_share_bytes
        first[1].close()
        await eventually(lambda: frontend.ledger.held_bytes.get("http", 0) <= len(text))
        writer.close()
        await eventually(lambda: not frontend.ledger.total_bytes)
        reader, writer = await opened(frontend)
        writer.write(request(text + b'"}', path="/v2/models/m/generate"))
        asked = await frontend.next_request()
        assert frontend.ledger.total_bytes == len(text) + 2
        asked[1](internal("it came"), True)
        assert (await head(reader))[0] == 500
        await eventually(lambda: not frontend.ledger.total_bytes)
        writer.close()

    run(scenario)


def test_decompressed_content_counts() -> None:
    packed = gzip.compress(BODY.replace(b"a" * LARGE, b"a" * 900_000))

    async def scenario(frontend: HttpFrontend) -> None:
        frontend.ledger.limit_bytes = 1_000_000
        reader, writer = await opened(frontend)
        writer.write(request(packed, "Content-Encoding: gzip"))
        status, headers = await head(reader)
        assert (status, headers["retry-after"]) == (503, "1")
        await reader.readexactly(int(headers["content-length"]))
        assert frontend.ledger.refused == {"decompressed": 1}
        assert frontend.ledger.total_bytes == 0
        frontend.ledger.limit_bytes = 2_000_000
        writer.write(request(packed, "Content-Encoding: gzip"))
        asked = await frontend.next_request()
        assert frontend.ledger.held_bytes["decompressed"] > 900_000
        asked[1](internal("it came"), True)
        assert (await head(reader))[0] == 500
        assert frontend.ledger.total_bytes == 0
        writer.close()

    run(scenario)


def test_a_body_gets_a_slot_only_after_a_part_of_it_has_arrived() -> None:
    body = b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":700004}}]}'
    length = str(len(body))
    body += (700_000).to_bytes(4, "little") + b"a" * 700_000
    arena = PayloadArena(new_id("gateway"), 1 << 24, PayloadBudget(1 << 24))
    payloads = PayloadStore(arena, lambda _model: True)
    lines = (f"Inference-Header-Content-Length: {length}",)

    async def scenario(frontend: HttpFrontend) -> None:
        frontend.arriving_slots.limit_bytes = 5 << 20
        connections = [await opened(frontend) for _ in range(4)]
        for _, writer in connections:
            writer.write(request(body[: SLOT_AFTER_BYTES - 1], *lines, length=len(body)))
        await eventually(lambda: frontend.ledger.total_bytes == 4 * (SLOT_AFTER_BYTES - 1))
        assert payloads.slots_in_use == 0
        for _, writer in connections:
            writer.write(body[SLOT_AFTER_BYTES - 1 : 500_000])
        # Three quarters of what bodies may reserve are this client's; the fourth body goes on in ordinary memory.
        await eventually(lambda: frontend.ledger.total_bytes == 500_000)
        assert payloads.slots_in_use == 3
        assert frontend.arriving_slots.total_bytes == 3 << 20
        for reader, writer in connections:
            writer.write(body[500_000:])
            asked, answer = await frontend.next_request()
            assert bytes(asked.inputs[0].data)[4:] == b"a" * 700_000  # type: ignore[arg-type]
            answer(internal("it came"), True)
            assert (await head(reader))[0] == 500
            writer.close()
        assert frontend.arriving_slots.total_bytes == frontend.ledger.total_bytes == 0

    try:
        run(scenario, payloads=payloads)
    finally:
        arena.close()


@pytest.mark.parametrize(
    "begun",
    [
        request(b"{", length=1000),
        request(b"{", path="/v2/models/m/generate", length=1000),
        b"POST /v2/models/m/generate HTTP/1.1\r\nHost: localhost\r\n",
    ],
)
def test_a_request_that_stops_arriving_is_answered_with_408(begun: bytes) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await opened(frontend)
        writer.write(begun)
        complete, idle = await opened(frontend), await opened(frontend)
        complete[1].write(request(BODY))
        asked = await frontend.next_request()
        frontend.check_progress(1000.0)
        frontend.check_progress(1000.0 + STALL_PERIOD_S - 1)
        frontend.check_progress(1000.0 + STALL_PERIOD_S)
        status, headers = await head(reader)
        assert (status, headers["connection"]) == (408, "close")
        assert "stalled" in json.loads(await reader.read())["error"]
        asked[1](internal("it came"), True)  # a request that waits for its model has not stalled
        assert (await head(complete[0]))[0] == 500
        idle[1].write(request(BODY))
        assert await answered(frontend, idle[0]) == 500
        for each in (writer, complete[1], idle[1]):
            each.close()

    run(scenario)


@pytest.mark.parametrize("begun_bytes", [40, len(request(BODY)) - 1000])
def test_each_request_of_a_connection_has_its_own_time_to_arrive(begun_bytes: int) -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await opened(frontend)
        for number in range(5):
            writer.write(request(BODY)[:begun_bytes])
            await eventually(lambda: frontend.ledger.total_bytes)
            frontend.check_progress(1000.0 + number * STALL_PERIOD_S)
            writer.write(request(BODY)[begun_bytes:])
            assert await answered(frontend, reader) == 500
            writer.write(request(BODY))  # what follows may lie where the one before this lay
            assert await answered(frontend, reader) == 500
        writer.close()

    run(scenario)


async def rejected(frontend: HttpFrontend) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with an upload that found no room and is answered at its end."""
    frontend.ledger.limit_bytes = 1000
    reader, writer = await opened(frontend)
    begin = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(begin.encode() + CHUNK)
    await eventually(lambda: frontend.ledger.refused)
    return reader, writer


def test_a_rejected_upload_that_stops_arriving_is_answered_with_its_rejection() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await rejected(frontend)
        frontend.check_progress(1000.0)
        frontend.check_progress(1000.0 + STALL_PERIOD_S)
        status, headers = await head(reader)
        assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
        writer.close()

    run(scenario)


def test_a_rejected_upload_that_is_slow_is_answered_at_its_end() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await rejected(frontend)
        (connection,) = frontend.listeners.connections("HTTP")
        for number in range(1, 4):
            size = number * len(PIECE)
            await eventually(lambda size=size: connection._latest and connection._latest.received_bytes == size)
            frontend.check_progress(1000.0 + number * STALL_PERIOD_S)
            writer.write(CHUNK)
        writer.write(b"0\r\n\r\n")
        assert (await head(reader))[0] == 503
        writer.close()

    run(scenario)


def test_an_unfinished_head_counts() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        frontend.ledger.limit_bytes = 40_000
        connections = [await opened(frontend) for _ in range(4)]
        for number, (_, writer) in enumerate(connections):
            writer.write(b"POST /v2/models/m/infer HTTP/1.1\r\n")
            await eventually(lambda number=number: frontend.ledger.total_bytes % 9000 > 0)
            writer.write(b"X: " + b"x" * (9000 - 3 - len(INFER)))
            await eventually(
                lambda number=number: frontend.ledger.total_bytes == 9000 * (number + 1) or frontend.ledger.refused
            )
        assert (await head(connections[3][0]))[0] == 503
        await eventually(lambda: frontend.ledger.total_bytes == 27_000)
        for reader, writer in connections[:3]:
            writer.write(b"\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            assert (await head(reader))[0] == 500  # this is not a request, but its head was read
        for _, writer in connections:
            writer.close()
        await eventually(lambda: not frontend.ledger.total_bytes)

    run(scenario)


def test_an_endless_header_is_rejected() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await opened(frontend)
        writer.write(b"POST /v2/models/m/infer HTTP/1.1\r\nX: ")
        await eventually(lambda: frontend.ledger.total_bytes)
        writer.write(b"x" * (MAX_HEAD_BYTES - 1000))
        await eventually(lambda: frontend.ledger.total_bytes > MAX_HEAD_BYTES - 1000)
        writer.write(b"x" * 1000)
        status, _ = await head(reader)
        assert status == 400
        assert b"URL and headers exceed" in await reader.read()
        assert frontend.ledger.peak_bytes <= MAX_HEAD_BYTES
        writer.close()

    run(scenario)


def test_a_slow_but_steady_client_is_served() -> None:
    async def scenario(frontend: HttpFrontend) -> None:
        reader, writer = await opened(frontend)
        writer.write(request(BODY[:100], length=len(BODY)))
        await eventually(lambda: frontend.ledger.total_bytes == 100)
        for number in range(1, 13):
            frontend.check_progress(1000.0 + number * (STALL_PERIOD_S - 1))
            writer.write(BODY[100 + (number - 1) * 16_384 : 100 + number * 16_384])
            await eventually(lambda number=number: frontend.ledger.total_bytes == 100 + number * 16_384)
        writer.write(BODY[100 + 12 * 16_384 :])
        assert await answered(frontend, reader) == 500
        writer.close()

    run(scenario)


def test_a_response_that_is_not_read_counts_and_ends_its_connection_after_a_while() -> None:
    size = 20_000_000
    response = InferResponse("m", "1", outputs=[Tensor("out", "BYTES", (1,), size.to_bytes(4, "little") + b"a" * size)])

    async def scenario(frontend: HttpFrontend) -> None:
        connections = [await opened(frontend) for _ in range(2)]
        for reader, writer in connections:
            writer.write(request(BODY))
            (await frontend.next_request())[1](response, True)
            assert (await head(reader))[0] == 200
        await eventually(lambda: frontend.ledger.held_bytes.get("unsent", 0) > size)  # the sockets have taken the rest
        (reader, _), (_, stalled) = connections
        await reader.readexactly(size)
        await eventually(lambda: 0 < frontend.ledger.held_bytes["unsent"] < size)
        frontend.check_progress(1000.0)
        frontend.check_progress(1000.0 + UNREAD_PERIOD_S - 1)
        assert frontend.ledger.held_bytes["unsent"]
        frontend.check_progress(1000.0 + UNREAD_PERIOD_S)
        await eventually(lambda: not frontend.ledger.total_bytes)
        stalled.close()
        connections[0][1].close()

    run(scenario)


def test_a_response_without_room_is_rejected() -> None:
    response = InferResponse(
        "m", "1", outputs=[Tensor("out", "BYTES", (1,), LARGE.to_bytes(4, "little") + b"a" * LARGE)]
    )

    async def scenario(frontend: HttpFrontend) -> None:
        frontend.ledger.limit_bytes = LARGE
        reader, writer = await opened(frontend)
        writer.write(request(BODY.replace(b"a" * LARGE, b"a")))
        (await frontend.next_request())[1](response, True)
        status, headers = await head(reader)
        assert (status, headers["retry-after"]) == (503, "1")
        assert frontend.ledger.refused == {"unsent": 1}
        writer.close()

    run(scenario)


def test_the_ledger_is_in_the_metrics() -> None:
    ledger = MemoryLedger(1000)
    account = ledger.account("a")
    assert account.charge("http", 300)
    assert account.charge("unsent", 200)
    assert not account.charge("http", 1)
    account.release("http", 100)
    page = {
        (family.name, *dict(sample.labels).values()): sample.value
        for family in memory_families(read_ledger(ledger))
        for sample in family.samples
    }
    assert page == {
        ("weir_memory_ledger_bytes", "http"): 200,
        ("weir_memory_ledger_bytes", "unsent"): 200,
        ("weir_memory_ledger_peak_bytes",): 500,
        ("weir_memory_ledger_limit_bytes",): 1000,
        ("weir_memory_ledger_refusals", "http"): 1,
    }
    refused = refusal_family(DispatchCounters(rejected={"wait": 2}), read_ledger(ledger))
    assert {dict(sample.labels)["reason"]: sample.value for sample in refused.samples} == {"received": 1, "wait": 2}


@pytest.mark.parametrize("damage", [lambda body: body, lambda body: body[:-9]], ids=["no room", "truncated"])
def test_nothing_keeps_what_was_decompressed_in_vain(damage: Callable[[bytes], bytes]) -> None:
    """Nor do cycles of an error and the frames that it went through: the collector may come late."""
    bomb = damage(gzip.compress(b" " * (3 * STEP_BYTES)))

    def inflations() -> int:
        return sum(type(found) is BodyInflation for found in gc.get_objects())

    async def scenario(frontend: HttpFrontend) -> None:
        frontend.ledger.limit_bytes = 2 * STEP_BYTES
        reader, writer = await opened(frontend)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                writer.write(request(bomb, "Content-Encoding: gzip"))
                status, headers = await head(reader)
                assert status in (400, 503)
                await reader.readexactly(int(headers["content-length"]))
            await eventually(lambda: inflations() == 0)
        finally:
            gc.enable()
        writer.close()

    run(scenario)

"""`ReceivedBytes`: bodies in ordinary memory are bounded, and refused by what was said of them."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from http_door import CONFIG, Door, head, run
from hypothesis import given
from hypothesis import strategies as st

from calls.inference import Inference
from gateway.metrics.load_families import refusal_family
from gateway.received_bytes import MAX_RECEIVED_BYTES, ReceivedBytes
from schemas.errors import internal
from schemas.model_config import ModelConfig

LARGE = 200_000


@given(st.lists(st.integers(1, MAX_RECEIVED_BYTES), max_size=20), st.randoms())
def test_no_more_is_held_than_may_be(sizes: list[int], chance: object) -> None:
    received, held = ReceivedBytes(), list[int]()
    for size in sizes:
        if received.take(size):
            held.append(size)
        assert received.held == sum(held) <= MAX_RECEIVED_BYTES
        if held and chance.random() < 0.3:  # type: ignore[attr-defined]
            received.give_back(held.pop())
    assert received.refused <= len(sizes)


def test_one_alone_may_be_larger() -> None:
    received = ReceivedBytes()
    assert received.take(MAX_RECEIVED_BYTES * 2)
    assert not received.take(1)
    received.give_back(MAX_RECEIVED_BYTES * 2)
    assert received.take(1)
    inference = SimpleNamespace(refused={"wait": 2})
    told = refusal_family(cast(Inference, inference), received)
    assert {dict(sample.labels)["reason"]: sample.value for sample in told.samples} == {"received": 1, "wait": 2}


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_body_that_finds_no_room_is_refused(monkeypatch: pytest.MonkeyPatch, is_stated: bool) -> None:
    config = {**CONFIG.model_dump(), "model_transaction_policy": {"decoupled": False}}
    monkeypatch.setattr("http_door.CONFIG", ModelConfig.model_validate(config))
    monkeypatch.setattr("gateway.received_bytes.MAX_RECEIVED_BYTES", LARGE * 3 // 2)
    body = b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"data":["%b"]}]}' % (b"a" * LARGE)

    def request() -> bytes:
        line = f"Content-Length: {len(body)}" if is_stated else "Transfer-Encoding: chunked"
        begin = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode()
        return begin + (body if is_stated else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))

    async def scenario(door: Door) -> None:
        first_reader, first = await asyncio.open_connection("127.0.0.1", door.port)
        first.write(request()[:-10])
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        while not is_stated and not door.received.held > LARGE:
            await asyncio.sleep(0.001)
        writer.write(request())
        status, headers = await head(reader)
        assert (status, headers["retry-after"]) == (503, "1")
        first.write(request()[-10:])
        (await door.asked())[1](internal("it came"), True)
        assert (await head(first_reader))[0] == 500
        assert door.received.held == 0
        if is_stated:  # its connection goes on
            await reader.readexactly(int(headers["content-length"]))
            writer.write(request())
            (await door.asked())[1](internal("it came"), True)
            assert (await head(reader))[0] == 500
        # Whoever goes gives back what was held for him.
        gone = (await asyncio.open_connection("127.0.0.1", door.port))[1]
        gone.write(request()[:-10])
        while not door.received.held:
            await asyncio.sleep(0.001)
        gone.close()
        while door.received.held:
            await asyncio.sleep(0.001)
        first.close()
        writer.close()

    run(scenario)

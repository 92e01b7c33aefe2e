"""An owner sends pieces to readers with links, and disconnects those that violate the protocol."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.payload_pairs import Pair, pair, run
from tests.support.raw_links import RawEnd, proven
from weir.bus.links.framing import pack_frames
from weir.bus.payloads.fetch_plan import PIECE_BYTES
from weir.bus.payloads.server import MAX_LINK_REQUESTS
from weir.schemas.wire.transfers import PayloadFetch


async def _reader(both: Pair) -> RawEnd:
    assert both.listener is not None
    return await proven(both.listener.address(""))


def test_a_piece_comes_on_the_subject_of_its_request() -> None:
    async def ask() -> None:
        async with pair() as both:
            ref, content = both.payload(70_000)
            end = await _reader(both)
            end.send("any.subject", PayloadFetch(ref).pack())
            assert await end.frame() == ("any.subject", content)
            assert await end.frame() == ("kept", b"")
            end.writer.close()

    run(ask)


@pytest.mark.parametrize("request_data", [b"", b"abc", b"\xff" * 900])
def test_a_malformed_request_closes_the_link(request_data: bytes) -> None:
    async def ask() -> None:
        async with pair() as both:
            end = await _reader(both)
            end.send("1.0", request_data)
            assert await end.is_closed()
            assert both.server.malformed_messages == 1

    run(ask)


def test_more_requests_than_a_reader_may_send_close_the_link() -> None:
    async def ask() -> None:
        async with pair() as both:
            ref, _ = both.payload(1_000)
            end = await _reader(both)
            request_data = PayloadFetch(ref).pack()
            end.writer.write(pack_frames([(f"{number}.0", request_data) for number in range(MAX_LINK_REQUESTS + 1)]))
            frames = 0
            while not await end.is_closed():
                frames += 1
            assert frames <= 2 * MAX_LINK_REQUESTS

    run(ask)


def test_what_is_no_piece_of_this_process_is_freed() -> None:
    async def ask() -> None:
        async with pair() as both:
            ref, _ = both.payload(3 * PIECE_BYTES)
            end = await _reader(both)
            for piece in (
                ref,
                ref._replace(segment="weir-gateway-01234567-1.131072", size=10),
                ref._replace(offset=1 << 40, size=10),
                ref._replace(generation=ref.generation + 1, size=10),
            ):
                end.send("1.0", PayloadFetch(piece).pack())
                assert await end.frame() == ("freed", b"")
            end.writer.close()

    run(ask)


def test_a_payload_that_is_freed_while_it_is_sent_is_reported_as_freed() -> None:
    async def ask() -> None:
        async with pair() as both:
            end = await _reader(both)
            slot = both.arena.allocate(16 * PIECE_BYTES)
            assert slot is not None
            slot.view[:] = b"a" * len(slot.view)
            for number in range(16):
                piece = slot.ref(number * PIECE_BYTES, PIECE_BYTES)
                end.send(f"1.{number}", PayloadFetch(piece).pack())
            while not both.server.sent_bytes:  # some of it lies in the kernel, which takes no more
                await asyncio.sleep(0.001)
            slot.free()
            again = both.arena.allocate(16 * PIECE_BYTES)
            assert again is not None
            again.view[:] = b"b" * len(again.view)
            verdicts, content = [], b""
            while len(verdicts) < 16:
                subject, data = await end.frame()
                if subject == "kept":
                    assert content == b"a" * PIECE_BYTES
                if subject in ("kept", "freed"):
                    verdicts.append(subject)
                else:
                    content = data
            assert "kept" in verdicts
            assert verdicts[-1] == "freed"
            end.writer.close()

    run(ask)

"""Bodies in payload slots when their requests are sent again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from weir.bus.naming.live_queues import LiveLayout
from weir.bus.payloads.arena import PayloadArena
from weir.calls.in_flight import InFlight, PendingRequest
from weir.calls.outbox import SMALL_BODY_BYTES, Outbox
from weir.calls.payload_store import FRAME_INLINE_BYTES, PayloadStore
from weir.schemas.wire.calls import RequestEnvelope, unpack_frame
from weir.schemas.wire.request_body import body_ref, is_body_ref

REQUESTS = 1000
BODY = bytes(SMALL_BODY_BYTES + 1)


class Broker:
    """Takes what is published; the connection is never lost."""

    losses = 0
    is_connected = True

    def __init__(self) -> None:
        self.live_layout = LiveLayout()
        self.frames: list[list[RequestEnvelope]] = []

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        self.frames.append([RequestEnvelope(*row) for row in unpack_frame(data)[1]])


def test_a_body_in_a_slot_is_not_placed_again() -> None:
    """It would stand there in the place of a body, and its worker would take it for one."""
    in_flight, broker, arena = InFlight(), Broker(), PayloadArena("resent")
    try:
        outbox = Outbox(
            cast(Any, broker),
            "g",
            PayloadStore(arena, lambda model: True),
            in_flight,
            lambda *_: None,
        )
        model = SimpleNamespace(name="m", queue="m")
        parts = [RequestEnvelope(key, -1, 1, "", 0, 0, 0, 0, 0, "", BODY) for key in range(REQUESTS)]
        for part in parts:
            in_flight.add(
                PendingRequest(
                    part.key, cast(Any, model), cast(Any, None), part, cast(Any, None), (), None, model.queue
                )
            )
        outbox._send("m", parts)
        (first,) = broker.frames
        assert all(is_body_ref(part.body) for part in first)
        later = RequestEnvelope(REQUESTS, -1, 1, "", 0, 0, 0, 0, 0, "", bytes(2 * FRAME_INLINE_BYTES))
        in_flight.add(
            PendingRequest(later.key, cast(Any, model), cast(Any, None), later, cast(Any, None), (), None, model.queue)
        )
        outbox._send("m", [pending.envelope for pending in in_flight.values()])
        again = [part for frame in broker.frames[1:] for part in frame]
        assert [part.body for part in again[:-1]] == [part.body for part in first]
        ref = body_ref(again[-1].body)
        assert ref is not None
        assert ref.size == len(later.body)
    finally:
        arena.close()

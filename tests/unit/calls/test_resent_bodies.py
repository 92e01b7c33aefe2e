"""Bodies that lie in shared memory when their requests are sent again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from bus.live_layout import LiveLayout
from bus.payloads import PayloadArena
from calls.in_flight import InFlight
from calls.outbox import Outbox
from calls.payload_store import FRAME_INLINE_BYTES, PayloadStore
from calls.pending import Pending
from schemas.bodies import body_ref, is_body_ref
from schemas.frames import unpack_frame_rows
from schemas.messages import Part

REQUESTS = 1000
BODY = bytes(100)


class Broker:
    """Takes what is published; the connection is never lost."""

    losses = 0
    is_connected = True

    def __init__(self) -> None:
        self.live_layout = LiveLayout()
        self.frames: list[list[Part]] = []

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        self.frames.append([Part(*row) for row in unpack_frame_rows(data)[1]])


def test_a_reference_is_not_put_into_a_slot_again() -> None:
    """It would stand there in the place of a body, and its worker would take it for one."""
    in_flight, broker, arena = InFlight(), Broker(), PayloadArena("resent")
    counters = SimpleNamespace(sent=lambda *_: None)
    try:
        outbox = Outbox(
            cast(Any, broker),
            "g",
            PayloadStore(arena, lambda model: True),
            in_flight,
            cast(Any, counters),
            lambda *_: None,
        )
        model = SimpleNamespace(name="m", queue="m")
        parts = [Part(key, -1, 1, "", 0, 0, 0, 0, 0, "", BODY) for key in range(REQUESTS)]
        for part in parts:
            in_flight.add(Pending(part.key, cast(Any, model), cast(Any, None), part, cast(Any, None), (), None))
        outbox._send("m", parts)
        (first,) = broker.frames
        assert all(is_body_ref(part.body) for part in first)
        assert sum(len(part.body) for part in first) > FRAME_INLINE_BYTES  # the references alone would go into a slot
        later = Part(REQUESTS, -1, 1, "", 0, 0, 0, 0, 0, "", bytes(2 * FRAME_INLINE_BYTES))
        in_flight.add(Pending(later.key, cast(Any, model), cast(Any, None), later, cast(Any, None), (), None))
        outbox._send("m", [pending.part for pending in in_flight])
        again = broker.frames[1]
        assert [part.body for part in again[:-1]] == [part.body for part in first]
        ref = body_ref(again[-1].body)
        assert ref is not None
        assert ref.size == len(later.body)
    finally:
        arena.close()

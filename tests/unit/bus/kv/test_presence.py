"""Records of live processes: published, queried, removed after silence."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgpack
import msgspec
import pytest
from msgspec.structs import replace

from tests.support.collecting_bus import CollectingBus
from weir.bus.kv.presence import Presence, PresenceView
from weir.bus.naming import subjects
from weir.bus.nats.connection import Message
from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage
from weir.schemas.wire.registry import RoleRecord

RECORD = RoleRecord(role="scheduler", id="scheduler-1", host="ab", pid=1, since_ms=1, queues=[("m", 0, 7)])


class AskableBus(CollectingBus):
    recover: Callable[[], Awaitable[None]]

    def on_reconnect(self, listener: Callable[[], Awaitable[None]]) -> None:
        self.recover = listener

    def tell(self, record: RoleRecord, subject: str = "") -> None:
        subject = subject or subjects.presence(record.role, record.id)
        self._callbacks[subjects.PRESENCE](Message(subject, "", record.pack(), ""))


class Seen:
    """A view with a clock of its own, and what its listener was told."""

    def __init__(self) -> None:
        self.bus = AskableBus()
        self.now_s = 100.0
        self.view = PresenceView(self.bus, clock=lambda: self.now_s)
        self.changes: list[tuple[str, bool]] = []
        self.view.on_change(lambda record, is_there: self.changes.append((record.id, is_there)))


@pytest.fixture
async def seen() -> Seen:
    seen = Seen()
    await seen.view.start()
    return seen


def test_each_change_of_a_process_is_reported_once(seen: Seen) -> None:
    assert seen.bus.taken(subjects.PRESENCE_QUERY) == [b""]
    seen.bus.tell(RECORD)
    seen.bus.tell(RECORD)
    seen.bus.tell(replace(RECORD, queues=[]))
    assert seen.changes == [("scheduler-1", True)] * 2
    seen.bus.tell(replace(RECORD, leaving=True))
    seen.bus.tell(replace(RECORD, leaving=True))
    assert seen.changes[2:] == [("scheduler-1", False)]
    assert seen.view.processes == {}


def test_a_changed_loop_lag_is_kept_but_is_no_change(seen: Seen) -> None:
    seen.bus.tell(RECORD)
    seen.bus.tell(replace(RECORD, loop_lag_s=0.25))
    assert seen.changes == [("scheduler-1", True)]
    assert seen.view.processes["scheduler-1"].loop_lag_s == 0.25


def test_a_silent_process_is_removed_and_may_return(seen: Seen) -> None:
    seen.bus.tell(RECORD)
    seen.now_s += 0.9
    assert seen.view.expire(1.0) == []
    seen.now_s += 0.2
    assert seen.view.expire(1.0) == ["scheduler-1"]
    seen.bus.tell(RECORD)
    assert seen.changes == [("scheduler-1", True), ("scheduler-1", False), ("scheduler-1", True)]


async def test_no_process_counts_as_gone_after_an_outage_of_the_broker(seen: Seen) -> None:
    seen.bus.tell(RECORD)
    seen.now_s += 60
    await seen.bus.recover()
    assert seen.view.expire(1.0) == []


def test_a_record_on_the_subject_of_another_process_is_dropped(seen: Seen) -> None:
    seen.bus.tell(RECORD, "presence.scheduler.scheduler-2")
    assert seen.view.processes == {}
    assert seen.view.malformed == 1


async def test_a_process_publishes_its_record_on_a_query_and_when_it_leaves() -> None:
    bus = CollectingBus()
    presence = Presence(bus, "gateway", "gateway-1", lambda: {"urls": ["http://localhost:8000"]})  # type: ignore[arg-type]
    presence.publish()
    presence.publish(leaving=True)
    first, last = map(RoleRecord.unpack, bus.taken("presence.gateway.gateway-1"))
    assert (first.id, first.urls, first.leaving) == ("gateway-1", ["http://localhost:8000"], False)
    assert last == replace(first, leaving=True)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", msgpack.packb([WIRE_VERSION + 1, {}]), msgpack.packb([WIRE_VERSION, []]), msgpack.packb([1, 2, 3])]
    + [
        msgpack.packb([WIRE_VERSION, msgspec.to_builtins(RECORD) | change])
        for change in ({"role": "king"}, {"id": "a.b"}, {"id": "a*"}, {"pid": "1"}, {"queues": [["m", "0", 1]]})
    ],
)
def test_garbage_is_none(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        RoleRecord.unpack(data)

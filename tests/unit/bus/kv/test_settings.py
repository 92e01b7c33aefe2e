"""Settings are applied everywhere, survive a lost bucket, and are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tests.support.waiting import eventually
from weir.bus.kv import typed_bucket
from weir.bus.kv.settings import LOGGING, MAX_SETTING_BYTES, TRACE, SharedSettings, follow_log
from weir.bus.kv.view import KvBucket
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.declarations import ensure_streams
from weir.schemas.core.errors import ErrorCode, WeirError


@pytest.fixture
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def connected(nats: EmbeddedNats) -> AsyncIterator[Bus]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        await ensure_streams(bus)
        yield bus
        await bus.close()


class Role:
    """A role that follows the trace settings."""

    def __init__(self, bus: Bus) -> None:
        self.shared = SharedSettings(bus)
        self.applied: dict[str, bytes] = {}
        self.shared.follow(TRACE, self._apply)

    def _apply(self, model: str, value: bytes) -> None:
        if value == b"malformed":
            raise ValueError("malformed")
        self.applied[model] = value


async def test_a_change_is_applied_here_at_once_and_everywhere_else(nats: EmbeddedNats) -> None:
    async with connected(nats) as first, connected(nats) as second:
        writer, reader = Role(first), Role(second)
        await writer.shared.start()
        await writer.shared.change(TRACE, "", lambda _known: b"{}")
        await writer.shared.change(TRACE, "m.1", lambda _known: b"{1}")
        assert writer.applied == {"": b"{}", "m.1": b"{1}"}
        await reader.shared.start()
        assert reader.applied == writer.applied
        await writer.shared.change(TRACE, "m.1", lambda _known: b"")
        await eventually(lambda: reader.applied == {"": b"{}", "m.1": b""})


async def test_changes_of_one_setting_at_the_same_time_are_both_made(nats: EmbeddedNats) -> None:
    async with connected(nats) as first, connected(nats) as second:
        roles = Role(first), Role(second)
        for role in roles:
            await role.shared.start()
        await asyncio.gather(
            *(role.shared.change(TRACE, "m", lambda known: known + b"x") for role in roles for _ in range(5))
        )
        await eventually(lambda: [role.applied for role in roles] == 2 * [{"m": 10 * b"x"}])


async def test_settings_are_written_again_to_a_broker_that_lost_them(nats: EmbeddedNats) -> None:
    async with connected(nats) as bus:
        role = Role(bus)
        await role.shared.start()
        await role.shared.change(TRACE, "m", lambda _known: b"{}")
        nats.stop()
        nats.start()
        await eventually(lambda: bus.is_connected)
        async with connected(nats) as other:
            late = Role(other)
            await late.shared.start()
            await eventually(lambda: late.applied == {"m": b"{}"})


async def test_malformed_and_excessive_settings_are_dropped_and_counted(
    nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(typed_bucket, "MAX_RECORDS", 1)
    async with connected(nats) as bus:
        role = Role(bus)
        await role.shared.start()
        bucket = KvBucket(bus, subjects.SETTINGS_BUCKET)
        await bucket.put(subjects.settings_key(TRACE, "a"), b"malformed")
        await bucket.put(subjects.settings_key(TRACE, "a"), bytes(MAX_SETTING_BYTES + 1))
        await bucket.put(subjects.settings_key(TRACE, "a"), b"{}")
        await bucket.put(subjects.settings_key(TRACE, "b"), b"{}")
        await bucket.put("unknown", b"{}")
        await eventually(lambda: caplog.text.count("bucket settings: dropped a record, it holds 1") == 2)
        assert (role.applied, role.shared.malformed) == ({"a": b"{}"}, 2)
        assert f"larger than {MAX_SETTING_BYTES} bytes" in caplog.text


async def test_a_change_without_a_broker_is_an_error(nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(nats) as bus:
        role = Role(bus)
        await role.shared.start()
        await bus.jetstream.delete_stream(f"KV_{subjects.SETTINGS_BUCKET}")
        with pytest.raises(WeirError, match="the message broker is not available") as raised:
            await role.shared.change(TRACE, "m", lambda _known: b"{}")
        assert raised.value.code is ErrorCode.UNAVAILABLE
        assert role.applied == {}


class Log:
    """A log with settings."""

    def __init__(self) -> None:
        self.values: list[bytes] = []

    def take(self, _model: str, data: bytes) -> None:
        self.values.append(data)


async def test_a_role_s_log_follows_the_log_settings(nats: EmbeddedNats) -> None:
    async with connected(nats) as bus:
        log = Log()
        await follow_log(bus, log)
        await KvBucket(bus, subjects.SETTINGS_BUCKET).put(subjects.settings_key(LOGGING, ""), b"{}")
        await eventually(lambda: log.values == [b"{}"])

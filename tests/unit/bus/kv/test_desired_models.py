"""The desired state and the files of load requests, with a real nats-server that loses its memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from weir.bus.kv.desired_models import DesiredModels, next_revision
from weir.bus.kv.model_files import ModelFiles, object_name, revision_of
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.declarations import ensure_streams
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.wire.model_control import DesiredModel, WantedModel

LOADED = DesiredModel("a.b", 7, WantedModel(True, "{}"))


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path)
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


async def put(desired: DesiredModels, entry: DesiredModel) -> None:
    await desired.update(entry.name, lambda _known: entry)


async def test_what_one_writes_the_others_see_and_the_late_read(nats: EmbeddedNats) -> None:
    async with connected(nats) as bus, connected(nats) as other:
        writer, reader, late = DesiredModels(bus), DesiredModels(other), DesiredModels(other)
        seen: list[DesiredModel | None] = []
        reader.on_change(lambda name: seen.append(reader.get(name)))
        await writer.start()
        await reader.start()
        await put(writer, LOADED)
        await eventually(lambda: reader.get("a.b") == LOADED)
        bus.publish("$KV.models.a=2Eb", b"garbage")
        bus.publish("$KV.models.x", LOADED.pack())
        newer = DesiredModel("a.b", 8, WantedModel(False))
        await put(writer, newer)
        await eventually(lambda: reader.get("a.b") == newer)
        assert (seen, reader.malformed) == ([LOADED, newer], 2)
        assert reader.is_unwanted("a.b")
        await late.start()
        assert late.all() == [newer]
        await writer.update("a.b", lambda _known: None)
        await eventually(lambda: not reader.all())
        with pytest.raises(WeirError) as refused:
            await put(writer, DesiredModel("m", 9, WantedModel(True, "x" * bus.max_payload_bytes)))
        assert refused.value.code is ErrorCode.INVALID_ARG


async def test_entries_are_written_again_when_the_broker_has_lost_them(nats: EmbeddedNats) -> None:
    async with connected(nats) as bus:
        desired = DesiredModels(bus)
        await desired.start()
        await put(desired, LOADED)
        await eventually(lambda: desired.get("a.b") == LOADED)
        bus.on_reconnect(lambda: ensure_streams(bus))
        nats.stop()
        nats.start()
        async with connected(nats) as other:
            fresh = DesiredModels(other)
            await fresh.start()
            await eventually(lambda: fresh.get("a.b") == LOADED)


async def test_files_of_any_size_come_out_as_they_went_in_and_can_be_removed(nats: EmbeddedNats) -> None:
    async with connected(nats) as bus:
        files = ModelFiles(bus)
        now_ns = time.time_ns()
        kept, left, young = (object_name("m", revision, 0) for revision in (1, 2, now_ns))
        contents = {kept: b"", left: bytes(range(256)) * 40_000, young: b"x"}
        await files.put(contents)
        fetched = await files.fetch({"1/a": kept, "1/b": left})
        assert fetched == {"1/a": b"", "1/b": contents[left]}
        assert await files.missing([kept, "other"]) == {"other"}
        await files.sweep({kept}, now_ns)
        assert await files.missing([kept, left, young]) == {left}
        await files.remove([kept, kept, "other"])
        with pytest.raises(WeirError, match="file '1/a' of the load request is gone"):
            await files.fetch({"1/a": kept})
        assert (await bus.jetstream.stream_info(subjects.MODEL_FILES_STREAM)).state.messages == 2, "one file is left"


def test_revisions_only_grow() -> None:
    assert next_revision(None, 5) == 5
    assert next_revision(LOADED, 5) == 8
    assert next_revision(LOADED, 50) == 50
    assert [revision_of(name) for name in ("m.17.0", "m.x.0", "m", "a.b.c.d")] == [17, 0, 0, 0]

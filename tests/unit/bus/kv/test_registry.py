"""The records of a worker are written again after a reconnection, while its models change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from weir.bus.kv import registry
from weir.bus.kv.registry import RegistryWriter
from weir.bus.message import Message
from weir.bus.naming import subjects
from weir.schemas.wire.registry import ModelRecord, WorkerRecord


class Broker:
    """A bus and its bucket; `meanwhile()` happens with the next write."""

    def __init__(self) -> None:
        self.jetstream = self
        self.values: dict[str, bytes] = {}
        self.meanwhile: Any = None
        self.failures = 0
        self.callbacks: list[Callable[[Message], None]] = []

    async def subscribe(self, _subject: str, callback: Callable[[Message], None]) -> None:
        self.callbacks.append(callback)

    def removes(self, key: str) -> None:
        """Somebody takes the worker for dead, and its own subscription says so."""
        self.values.pop(key, None)
        self.callbacks[0](Message(subjects.registry_subject(key), "", b"", ""))

    def on_reconnect(self, _listener: object) -> None:
        pass

    async def find_stream(self, stream: str) -> str:
        if self.failures:
            self.failures -= 1
            raise TimeoutError
        return stream

    async def publish(self, subject: str, value: bytes, headers: Mapping[str, str] | None = None) -> None:
        key = subject.removeprefix(subjects.registry_subject(""))
        if headers:
            assert headers == {"KV-Operation": "DEL"}
            self.values.pop(key, None)
            return
        self.values[key] = value
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()


async def test_models_come_and_go_while_all_is_written_again() -> None:
    broker = Broker()
    writer = RegistryWriter(cast(Any, broker), "w")
    await writer.write_worker(WorkerRecord("w", 1))
    await writer.write_model(ModelRecord("goes"))
    await writer.write_model(ModelRecord("stays"))

    async def meanwhile() -> None:
        await writer.remove_model("goes")
        await writer.write_model(ModelRecord("comes"))

    broker.values.clear()
    broker.meanwhile = meanwhile
    await writer._write_all()
    assert broker.values.keys() == {"w", "w.stays", "w.comes"}


async def test_a_removed_registration_is_written_again_until_it_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_RETRY_S", 0.0)
    broker, _ = await _registered()
    broker.failures = 3
    broker.removes("w.m")
    broker.removes("w")
    await _until(lambda: broker.values.keys() == {"w", "w.m"})
    assert broker.failures == 0


async def test_what_is_removed_while_it_is_written_again_is_written_once_more() -> None:
    broker, writer = await _registered()

    async def meanwhile() -> None:
        async def later() -> None:
            broker.removes("w")

        broker.meanwhile = later  # when all but the last acknowledgement has come

    broker.meanwhile = meanwhile
    broker.removes("w.m")
    await _until(lambda: broker.meanwhile is None and broker.values.keys() == {"w", "w.m"})
    assert writer._rewriting is not None
    await writer._rewriting
    assert broker.values.keys() == {"w", "w.m"}


async def _registered() -> tuple[Broker, RegistryWriter]:
    broker = Broker()
    writer = RegistryWriter(cast(Any, broker), "w")
    await writer.start()
    await writer.write_worker(WorkerRecord("w", 1))
    await writer.write_model(ModelRecord("m"))
    return broker, writer


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)

"""What a worker tells again when the broker came back, while its models come and go."""

from __future__ import annotations

from typing import Any, cast

from bus.registry import RegistryWriter
from schemas.registry import ModelRecord, WorkerRecord


class Broker:
    """A bus and its bucket; `meanwhile()` happens with the next write."""

    def __init__(self) -> None:
        self.jetstream = self
        self.values: dict[str, bytes] = {}
        self.meanwhile: Any = None

    def on_reconnect(self, _listener: object) -> None:
        pass

    async def key_value(self, _bucket: str) -> Broker:
        return self

    async def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()

    async def delete(self, key: str) -> None:
        self.values.pop(key, None)


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

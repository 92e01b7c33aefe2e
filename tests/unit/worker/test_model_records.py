"""What the registry is told of models, whatever the broker makes of it."""

from __future__ import annotations

from typing import Any

from nats.errors import ConnectionClosedError, MaxPayloadError

from schemas.errors import ErrorCode
from schemas.registry import ModelRecord, ModelState, VersionRecord, pack_record
from worker.model_records import ModelRecords


class Registry:
    """Takes records of up to 1000 bytes, as long as `is_there`."""

    def __init__(self) -> None:
        self.is_there = True
        self.written: list[ModelRecord] = []

    async def write_model(self, record: ModelRecord) -> None:
        if not self.is_there:
            raise ConnectionClosedError
        if len(pack_record(record)) > 1000:
            raise MaxPayloadError
        self.written.append(record)

    async def remove_model(self, name: str) -> None:
        raise NotImplementedError

    async def describe(self, **changes: Any) -> None:
        raise NotImplementedError


READY = ModelRecord("m", {1: VersionRecord(ModelState.READY, instances=1)}, {"name": "m"}, {"y": ["cat"]})


async def test_a_model_whose_labels_do_not_fit_a_message_is_unavailable_with_the_reason() -> None:
    registry = Registry()
    records = ModelRecords(registry)
    await records.write(READY)
    large = ModelRecord("m", READY.versions, READY.config, {"y": ["x" * 2000]})
    await records.write(large)
    first, second = registry.written
    assert first == READY
    assert (second.versions[1].state, second.labels) == (ModelState.UNAVAILABLE, {})
    assert "larger than a message of NATS may be" in second.versions[1].reason
    assert second.error_code == ErrorCode.INVALID_ARG.number


async def test_a_broker_that_is_away_is_no_failure_of_the_model() -> None:
    registry = Registry()
    registry.is_there = False
    await ModelRecords(registry).write(READY)
    assert registry.written == []

"""Records of workers, models and processes: what survives packing, and what is malformed."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage
from weir.schemas.wire.registry import (
    MAX_INSTANCES,
    MAX_LOAD_LENGTH,
    Heartbeat,
    ModelRecord,
    ModelState,
    RoleRecord,
    VersionRecord,
)

VERSION = VersionRecord(ModelState.READY, "", 2, 1.5, "digest", (7, 9))
MODEL = ModelRecord("m", {1: VERSION}, {"name": "m"}, {"OUT": ["cat"]})
ROLE = RoleRecord(role="gateway", id="gateway-1", host="a", pid=1, since_ms=1)


def packed(record: msgspec.Struct, **changes: Any) -> bytes:
    fields = {field: getattr(record, field) for field in record.__struct_fields__}
    return msgspec.msgpack.encode([WIRE_VERSION, {**fields, **changes}])


def test_instances_without_numbers_count_from_zero() -> None:
    assert VERSION.instance_numbers == (7, 9)
    assert list(VersionRecord(ModelState.READY, instances=2).instance_numbers) == [0, 1]


def test_records_survive_packing() -> None:
    assert ModelRecord.unpack(MODEL.pack()) == MODEL
    assert RoleRecord.unpack(ROLE.pack()) == ROLE


@pytest.mark.parametrize(
    "change",
    [
        {"state": "RUNNING"},
        {"reason": None},
        {"instances": -1},
        {"instances": MAX_INSTANCES + 1, "numbers": ()},
        {"instances": True},
        {"load_duration_s": -1.0},
        {"load_duration_s": float("inf")},
        {"load_duration_s": float("nan")},
        {"load": "x" * (MAX_LOAD_LENGTH + 1)},
        {"numbers": (7,)},
        {"numbers": (7, 7)},
        {"numbers": (7, -1)},
        {"numbers": (7, 1 << 53)},
        {"checks_readiness": 1},
    ],
)
def test_malformed_versions(change: dict[str, Any]) -> None:
    version = {field: getattr(VERSION, field) for field in VERSION.__struct_fields__}
    with pytest.raises(MalformedMessage):
        ModelRecord.unpack(packed(MODEL, versions={1: {**version, **change}}))


@pytest.mark.parametrize(
    "change",
    [
        {"name": 1},
        {"versions": []},
        {"versions": {"one": VERSION}},
        {"config": {"name": 5}},
        {"config": {"unknown_field": 1}},
        {"labels": {"OUT": "cat"}},
        {"labels": {"OUT": [1]}},
        {"revision": "1"},
        {"elsewhere": None},
    ],
)
def test_malformed_models(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        ModelRecord.unpack(packed(MODEL, **change))


@pytest.mark.parametrize("batches", [[], {"s": 1}, {"s": ["1"]}, {1: [1]}])
def test_malformed_heartbeats(batches: Any) -> None:
    with pytest.raises(MalformedMessage):
        Heartbeat.unpack(msgpack.packb([WIRE_VERSION, {"worker": "w", "batches": batches}]))


def test_a_changed_lag_alone_is_no_difference() -> None:
    lagging = msgspec.structs.replace(ROLE, loop_lag_s=0.5)
    assert not lagging.differs_from(ROLE)
    assert msgspec.structs.replace(ROLE, leaving=True).differs_from(ROLE)
    assert ROLE.differs_from(None)

"""Rows of the index, from repositories and the registry."""

from __future__ import annotations

from weir.gateway.admin.repository import index_rows
from weir.repository.layout import DUPLICATE
from weir.schemas.wire.registry import UNLOADED, ModelRecord, ModelState, VersionRecord

LOADING, READY, UNLOADING, UNAVAILABLE = ModelState


def test_a_model_that_was_never_loaded_is_a_name() -> None:
    assert index_rows({"b": "", "a": ""}, {}) == [{"name": "a"}, {"name": "b"}]


def test_there_is_a_row_for_each_version() -> None:
    record = ModelRecord(
        "m", {2: VersionRecord(READY, "", 1), 10: VersionRecord(LOADING), 1: VersionRecord(UNAVAILABLE, UNLOADED)}
    )
    assert index_rows({"m": ""}, {"m": [record]}) == [
        {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "m", "version": "2", "state": "READY"},
        {"name": "m", "version": "10", "state": "LOADING"},
    ]


def test_a_version_is_as_well_as_on_the_worker_where_it_is_best() -> None:
    records = [
        ModelRecord("m", {1: VersionRecord(UNAVAILABLE, "Internal: no")}),
        ModelRecord("m", {1: VersionRecord(UNLOADING, "", 1)}),
        ModelRecord("m", {1: VersionRecord(READY, "", 1)}),
    ]
    assert [row["state"] for row in index_rows({}, {"m": records})] == ["READY"]
    assert [row["state"] for row in index_rows({}, {"m": records[:2]})] == ["UNLOADING"]


def test_what_is_wrong_with_the_whole_model_is_one_row_without_a_version() -> None:
    assert index_rows({"m": DUPLICATE}, {}) == [{"name": "m", "state": "UNAVAILABLE", "reason": DUPLICATE}]
    told = {"m": [ModelRecord("m", reason="Invalid argument: why")]}
    assert index_rows({"m": ""}, told) == [{"name": "m", "state": "UNAVAILABLE", "reason": "Invalid argument: why"}]


def test_a_change_that_was_rejected_is_the_reason_of_the_ready_row() -> None:
    versions = {1: VersionRecord(READY, "", 1), 2: VersionRecord(UNAVAILABLE, "Internal: no")}
    ready, failed = index_rows({"m": ""}, {"m": [ModelRecord("m", versions, rejected="Internal: no")]})
    assert ready["state"] == "READY"
    assert ready["reason"] == (
        "serves as it was loaded before: the model's files as they are now could not be loaded: Internal: no"
    )
    assert failed["reason"] == "Internal: no"

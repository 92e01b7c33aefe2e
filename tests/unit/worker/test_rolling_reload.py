"""Whose turn it is to reload a model, as the registry tells."""

from __future__ import annotations

from schemas.errors import ErrorCode
from schemas.registry import ModelRecord, ModelState, VersionRecord
from worker.rolling_reload import failure_among, records_ahead


def told(revision: int, state: ModelState = ModelState.READY, code: int = 0, elsewhere: bool = False) -> ModelRecord:
    version = VersionRecord(state)
    return ModelRecord("m", {1: version}, revision=revision, error_code=code, error="why", elsewhere=elsewhere)


def test_those_that_serve_the_model_and_have_a_smaller_name_come_first() -> None:
    records = {"c": told(1), "a": told(2), "b": told(3, ModelState.LOADING), "d": told(4)}
    assert [record.revision for record in records_ahead("d", records)] == [2, 1]
    assert records_ahead("a", records) == []


def test_a_failure_of_this_operation_stops_the_roll() -> None:
    bad = ErrorCode.INVALID_ARG.number
    failure = failure_among([told(5), told(5, code=bad)], 5)
    assert failure is not None
    assert (failure.code, failure.message) == (ErrorCode.INVALID_ARG, "why")
    assert failure_among([told(4, code=bad)], 5) is None, "that was another one"
    assert failure_among([told(5, code=bad, elsewhere=True)], 5) is None, "it is nothing to that worker"
    assert failure_among([told(5, code=ErrorCode.INTERNAL.number)], 5) is None, "it has no such folder"

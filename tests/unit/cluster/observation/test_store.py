"""The reports that an observer keeps: in order, joined, and within a bound of bytes."""

from __future__ import annotations

from typing import Any

from weir.cluster.observation.store import ObservedStore
from weir.schemas.wire.observation import BatchedRequest, BatchEndReport, BatchReason, BatchReport, TraceReport


def batch(id: int, *keys: int, model: str = "m", **more: Any) -> BatchReport:
    requests = [BatchedRequest("g", key, "live", 1, 10) for key in keys]
    facts: dict[str, Any] = {"sent_us": id * 1000, "reason": BatchReason.FREE, **more}
    return BatchReport(
        scheduler="s", id=id, model=model, version=1, worker="w", instance=0, size=len(keys), rows=len(keys),
        requests=requests, **facts,
    )  # fmt: skip


def trace(key: int, id: str = "", model: str = "m", batch: int | None = None) -> TraceReport:
    times = [("HTTP_RECV_START", key * 1000), ("REQUEST_END", key * 1000 + 500)]
    return TraceReport(
        gateway="g", key=key, id=id, model=model, times=times, scheduler="s" if batch else "", batch=batch
    )


def test_a_reader_gets_what_it_has_not_seen() -> None:
    store = ObservedStore()
    for id in range(1, 6):
        store.add(batch(id, id))
    page = store.batches("m")
    assert ([each.seq for each in page.batches], page.next, page.dropped) == ([1, 2, 3, 4, 5], 5, 0)
    assert store.batches("m", page.next).batches == []
    store.add(batch(6, 6, dropped=7))
    page = store.batches("m", page.next)
    assert ([each.report.id for each in page.batches], page.next, page.dropped) == ([6], 6, 7)
    assert store.batches("unknown", 3) == (3, 0, [])


def test_a_reader_learns_how_many_it_has_missed() -> None:
    store = ObservedStore()
    for id in range(1, 11):
        store.add(batch(id, id))
    page = store.batches("m", 2, limit=3)
    assert ([each.seq for each in page.batches], page.next, page.dropped) == ([8, 9, 10], 10, 5)


def test_a_batch_gets_its_end() -> None:
    store = ObservedStore()
    store.add(batch(1, 1))
    assert store.batches("m").batches[0].busy_us is None
    store.add(BatchEndReport(scheduler="s", id=1, ended_us=9000, busy_us=700, is_answered=True))
    store.add(BatchEndReport(scheduler="other", id=1, ended_us=9000, busy_us=1, is_answered=True))
    ended = store.batches("m").batches[0]
    assert (ended.busy_us, ended.is_answered, ended.ended_us) == (700, True, 9000)


def test_a_request_is_found_with_its_batch_by_its_id_and_by_its_key() -> None:
    store = ObservedStore()
    store.add(batch(4, 11, 12, 13))
    store.add(trace(12, "mine", batch=4))
    for name in ("mine", "g/12"):
        found = store.trace(name)
        assert found is not None
        assert found.batch is not None
        assert (found.trace.key, found.batch.report.id) == (12, 4)
        assert [other.key for other in found.others] == [11, 13]
    assert store.trace("yours") is None
    assert store.trace("g/99") is None
    assert store.trace("") is None


def test_a_request_is_found_by_the_batch_that_its_worker_named() -> None:
    store = ObservedStore()
    store.add(batch(4, *range(64)))  # a report does not list all requests
    store.add(trace(500, "late", batch=4))
    found = store.trace("late")
    assert found is not None
    assert found.batch is not None
    assert found.batch.report.id == 4


def test_traces_come_latest_first() -> None:
    store = ObservedStore()
    for key in range(1, 6):
        store.add(trace(key, model="a" if key % 2 else "b"))
    assert [each.key for each in store.traces("a")] == [5, 3, 1]
    assert [each.key for each in store.traces("", 3)] == [5, 4, 3]
    store.add(trace(5, model="a"))  # delivered twice
    assert len(store.traces("a")) == 3


def test_the_oldest_reports_make_room() -> None:
    store = ObservedStore(max_bytes=100_000)
    for id in range(1, 1001):
        store.add(batch(id, id))
        store.add(trace(id, f"id{id}", batch=id))
    assert store.size_bytes <= 100_000
    page = store.batches("m", limit=1000)
    assert 10 < len(page.batches) < 100
    assert (page.next, page.dropped) == (1000, 1000 - len(page.batches))
    assert store.trace("id1") is None
    assert store.trace("g/1") is None
    assert store.trace("id1000") is not None


def test_a_model_that_is_not_watched_any_more_is_forgotten() -> None:
    store = ObservedStore()
    store.add(batch(1, 1))
    store.add(trace(1, "mine"))
    store.forget("m")
    assert (store.traces("m"), store.batches("m").batches, store.trace("mine")) == ([], [], None)
    store.add(batch(2, 2))
    assert [each.seq for each in store.batches("m", 1).batches] == [2]

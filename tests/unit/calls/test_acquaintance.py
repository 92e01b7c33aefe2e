"""When a gateway knows that what nobody tells of is not there."""

from hypothesis import given
from hypothesis import strategies as st

from calls.acquaintance import LOADING_PATIENCE_S, Acquaintance
from schemas.registry import WorkerRecord

LOADING, SETTLED = WorkerRecord("loading", 1), WorkerRecord("settled", 1, settled=True)
LEAVING = WorkerRecord("leaving", 1, settled=True, draining=True)


def test_a_cluster_that_is_whole_is_known_at_once() -> None:
    assert Acquaintance().is_made(0.0, [SETTLED, LEAVING], False)


def test_where_models_wait_for_workers_they_are_what_there_is() -> None:
    assert Acquaintance().is_made(0.0, [], True)


def test_those_that_load_are_waited_for_but_not_for_ever() -> None:
    acquaintance = Acquaintance()
    assert not acquaintance.is_made(0.0, [], False)
    assert not acquaintance.is_made(90.0, [LOADING, LEAVING], False)
    assert not acquaintance.is_made(100.0, [LOADING, SETTLED], False)
    assert not acquaintance.is_made(99.9 + LOADING_PATIENCE_S, [LOADING, SETTLED], False)
    assert acquaintance.is_made(100.0 + LOADING_PATIENCE_S, [LOADING, SETTLED], False)


def test_a_worker_that_comes_later_changes_nothing() -> None:
    acquaintance = Acquaintance()
    assert acquaintance.is_made(0.0, [SETTLED], False)
    assert acquaintance.is_made(5.0, [SETTLED, LOADING], False)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 50), st.lists(st.builds(WorkerRecord, st.just("w"), st.just(1), st.booleans(), st.booleans()))
        )
    )
)
def test_without_a_worker_nobody_knows_and_with_one_somebody_does_in_time(
    steps: list[tuple[float, list[WorkerRecord]]],
) -> None:
    acquaintance, now_s, some_since_s, was_made = Acquaintance(), 0.0, -1.0, False
    for wait_s, workers in steps:
        now_s += wait_s
        is_any = any(worker.settled and not worker.draining for worker in workers)
        some_since_s = now_s if is_any and some_since_s < 0 else some_since_s
        is_made = acquaintance.is_made(now_s, workers, False)
        assert is_any or not is_made
        assert is_made or not is_any or not (was_made or now_s - some_since_s >= LOADING_PATIENCE_S)
        was_made = was_made or is_made

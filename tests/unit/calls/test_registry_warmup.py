"""When a gateway may call a model unknown."""

from hypothesis import given
from hypothesis import strategies as st

from weir.calls.catalog import WARMUP_TIMEOUT_S, RegistryWarmup
from weir.schemas.wire.registry import WorkerRecord

LOADING, SETTLED = WorkerRecord("loading", 1), WorkerRecord("settled", 1, settled=True)
LEAVING = WorkerRecord("leaving", 1, settled=True, draining=True)


def test_the_warmup_ends_at_once_with_settled_workers() -> None:
    assert RegistryWarmup().is_over(0.0, [SETTLED, LEAVING], False)


def test_the_warmup_ends_at_once_with_known_models_alone() -> None:
    assert RegistryWarmup().is_over(0.0, [], True)


def test_loading_workers_delay_the_end_up_to_a_timeout() -> None:
    acquaintance = RegistryWarmup()
    assert not acquaintance.is_over(0.0, [], False)
    assert not acquaintance.is_over(90.0, [LOADING, LEAVING], False)
    assert not acquaintance.is_over(100.0, [LOADING, SETTLED], False)
    assert not acquaintance.is_over(99.9 + WARMUP_TIMEOUT_S, [LOADING, SETTLED], False)
    assert acquaintance.is_over(100.0 + WARMUP_TIMEOUT_S, [LOADING, SETTLED], False)


def test_a_later_worker_does_not_restart_the_warmup() -> None:
    acquaintance = RegistryWarmup()
    assert acquaintance.is_over(0.0, [SETTLED], False)
    assert acquaintance.is_over(5.0, [SETTLED, LOADING], False)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 50), st.lists(st.builds(WorkerRecord, st.just("w"), st.just(1), st.booleans(), st.booleans()))
        )
    )
)
def test_the_warmup_needs_a_settled_worker_and_then_ends_in_time(
    steps: list[tuple[float, list[WorkerRecord]]],
) -> None:
    acquaintance, now_s, some_since_s, was_made = RegistryWarmup(), 0.0, -1.0, False
    for wait_s, workers in steps:
        now_s += wait_s
        is_any = any(worker.settled and not worker.draining for worker in workers)
        some_since_s = now_s if is_any and some_since_s < 0 else some_since_s
        is_made = acquaintance.is_over(now_s, workers, False)
        assert is_any or not is_made
        assert is_made or not is_any or not (was_made or now_s - some_since_s >= WARMUP_TIMEOUT_S)
        was_made = was_made or is_made

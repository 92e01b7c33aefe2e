"""How the instances of a model are divided among its partitions, by random clusters of workers that come and go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.partition_share import Instance, Shares, divide, share_of

workers = st.dictionaries(st.uuids().map(lambda id: f"worker-{id.hex[:12]}"), st.integers(1, 6), max_size=12)
partition_counts = st.integers(1, 16)


def instances_of(counts: dict[str, int]) -> frozenset[Instance]:
    return frozenset((worker, number) for worker, count in counts.items() for number in range(count))


def homes(shares: Shares) -> dict[Instance, int]:
    return {instance: partition for partition, share in enumerate(shares) for instance in share}


def moved(before: Shares, after: Shares) -> int:
    """Instances that are there before and after, in another share."""
    earlier, later = homes(before), homes(after)
    return sum(later[instance] != partition for instance, partition in earlier.items() if instance in later)


@given(workers, partition_counts, st.booleans())
def test_shares_cover_all_and_are_disjoint(counts: dict[str, int], partitions: int, exclusive: bool) -> None:
    instances = instances_of(counts)
    shares = divide(instances, partitions, exclusive)
    assert len(shares) == partitions
    assert frozenset().union(*shares) == instances
    sizes = [len(share) for share in shares]
    if len(instances) >= partitions:
        assert sum(sizes) == len(instances), "each instance has one partition"
        assert min(sizes) >= max(1, len(instances) // (2 * partitions))
        assert max(sizes) <= -(-5 * len(instances) // (4 * partitions))
    elif exclusive:
        assert sum(sizes) == len(instances), "none is in two shares"
    elif instances:
        assert set(sizes) == {1}, "each partition has one"


@given(workers, partition_counts, st.randoms(use_true_random=False))
def test_all_schedulers_compute_the_same(counts: dict[str, int], partitions: int, random: object) -> None:
    told = list(instances_of(counts))
    random.shuffle(told)  # type: ignore[attr-defined]
    divide.cache_clear()
    first = divide(frozenset(told), partitions)
    divide.cache_clear()
    assert divide(frozenset(sorted(told)), partitions) == first


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.uuids())
def test_nothing_moves_where_workers_have_a_multiple(others: int, partitions: int, times: int, new: object) -> None:
    before = {f"worker-{number}": times * partitions for number in range(others)}
    shares = divide(instances_of(before), partitions, True)
    grown = divide(instances_of({**before, f"worker-{new}": times * partitions}), partitions, True)
    assert moved(shares, grown) == 0
    assert len({len(share) for share in shares}) == len({len(share) for share in grown}) == 1


@settings(max_examples=200)
@given(workers.filter(bool), st.integers(2, 8), st.integers(1, 6))
def test_few_move_when_a_worker_comes_or_goes(counts: dict[str, int], partitions: int, more: int) -> None:
    before = instances_of(counts)
    after = before | {("worker-new", number) for number in range(more)}
    if len(before) < partitions:
        return
    assert moved(divide(before, partitions, True), divide(after, partitions, True)) <= 2 * more + partitions


def test_on_average_fewer_move_than_come() -> None:
    came = moves = 0
    for workers_before in range(4, 40):
        for partitions in (2, 3, 4, 8):
            for per_worker in (1, 2, 3):
                counts = {f"w{n}": per_worker for n in range(workers_before)}
                before, after = instances_of(counts), instances_of({**counts, "w-new": per_worker})
                if len(before) >= partitions:
                    came += per_worker
                    moves += moved(divide(before, partitions, True), divide(after, partitions, True))
    assert moves < 0.5 * came, f"{moves} moved for {came} that came"


def test_a_partition_that_is_left_over() -> None:
    shares = divide(frozenset({("w", 0), ("w", 1)}), 2)
    assert share_of(shares, 3, exclusive=False) == shares[1]
    assert share_of(shares, 3, exclusive=True) == frozenset()

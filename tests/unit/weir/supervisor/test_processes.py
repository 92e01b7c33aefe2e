"""How many processes of each role a machine gets, and which of its processors."""

from __future__ import annotations

import pytest

from weir.options import UsageError
from weir.supervisor.processes import ProcessCounts, count_processes, divide_processors

DEFAULTS = {"gateways": 1, "schedulers": 1, "workers": None}
AUTO = {"gateways": "auto", "schedulers": "auto", "workers": "auto"}


@pytest.mark.parametrize("gpus", [0, 1])
def test_without_options_there_is_one_of_each(gpus: int) -> None:
    assert count_processes(DEFAULTS, 64, gpus) == ProcessCounts(1, 1, 1)


def test_without_options_each_gpu_has_a_worker() -> None:
    assert count_processes(DEFAULTS, 2, 8) == ProcessCounts(1, 1, 8)


@pytest.mark.parametrize(
    ("processors", "expected"),
    [(1, (1, 1, 1)), (2, (1, 1, 1)), (4, (1, 1, 1)), (8, (2, 1, 2)), (16, (4, 2, 4)), (256, (8, 8, 8))],
)
def test_auto_follows_the_processors(processors: int, expected: tuple[int, int, int]) -> None:
    assert count_processes(AUTO, processors, 0) == expected


def test_auto_has_a_worker_for_each_gpu() -> None:
    assert count_processes(AUTO, 64, 2).workers == 2


def test_numbers_are_taken_as_they_are() -> None:
    values = {"gateways": 3, "schedulers": 2, "workers": 5}
    assert count_processes(values, 1, 4) == ProcessCounts(3, 2, 5)
    assert count_processes({**DEFAULTS, "workers": 1}, 1, 4).workers == 1


def test_several_workers_need_one_for_each_gpu() -> None:
    with pytest.raises(UsageError, match="4 GPUs, so it must be 1 or at least 4"):
        count_processes({**DEFAULTS, "workers": 2}, 16, 4)


COUNTS = ProcessCounts(4, 2, 4)


def test_nothing_is_reserved_unless_it_is_asked_for() -> None:
    assert divide_processors(0, range(16), 16, COUNTS) is None


def test_workers_get_neighbours_of_their_own() -> None:
    shares = divide_processors(8, range(16), 16, COUNTS)
    assert shares is not None
    assert shares.workers == ({8, 9}, {10, 11}, {12, 13}, {14, 15})
    assert shares.others == set(range(8))


def test_a_remainder_is_used_too() -> None:
    shares = divide_processors(7, range(16), 16, ProcessCounts(1, 1, 3))
    assert shares is not None
    assert sorted(number for share in shares.workers for number in share) == list(range(9, 16))
    assert [len(share) for share in shares.workers] == [2, 2, 3]


@pytest.mark.parametrize(
    ("processors", "counts", "reserved"),
    [
        (16, COUNTS, 8),
        (16, ProcessCounts(1, 1, 4), 10),
        (64, ProcessCounts(1, 1, 1), 46),
        (2, ProcessCounts(1, 1, 1), 1),
    ],
)
def test_auto_leaves_what_other_processes_need(processors: int, counts: ProcessCounts, reserved: int) -> None:
    shares = divide_processors("auto", range(processors), processors, counts)
    assert shares is not None
    assert sum(map(len, shares.workers)) == reserved


@pytest.mark.parametrize(("processors", "quota", "workers"), [(1, 1, 1), (2, 2, 2), (16, 8, 2)])
def test_auto_reserves_nothing_where_there_are_too_few(processors: int, quota: int, workers: int) -> None:
    assert divide_processors("auto", range(processors), quota, ProcessCounts(1, 1, workers)) is None


@pytest.mark.parametrize("reserved", [1, 3, 16, 17])
def test_each_worker_and_the_others_need_a_processor(reserved: int) -> None:
    with pytest.raises(
        UsageError, match=r"at least the number of workers \(4\), and less than that of processors \(16\)"
    ):
        divide_processors(reserved, range(16), 16, COUNTS)

"""GPUs are counted as CUDA will show them, whole ones and parts of divided ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from weir.commands.gpu_count import count_gpus

UUIDS = ("GPU-5ab1", "GPU-6cd2", "GPU-7ef3", "GPU-8ab4")


class NvmlError(Exception):
    pass


class Nvml:
    """NVML on a machine with these GPUs: None is a whole one, a number one with so many parts; "old" can't be divided."""

    NVMLError = NvmlError

    def __init__(self, gpus: Sequence[int | str | None] = (None,) * 4, fails: bool = False) -> None:
        self._gpus = gpus
        self._fails = fails
        self.is_open = False

    def nvmlInit(self) -> None:
        if self._fails:
            raise NvmlError
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        assert self.is_open
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if self._gpus[handle] == "old":
            raise NvmlError
        return [int(self._gpus[handle] is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, number: int) -> int:
        parts = self._gpus[handle]
        if not isinstance(parts, int) or number >= parts:
            raise NvmlError
        return number


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("2, 0", 2),
        ("0,7,1", 1),
        ("-1", 0),
        ("GPU-5ab,GPU-6cd", 2),
        ("GPU-5ab,GPU-0,GPU-6cd", 1),
        ("MIG-1,MIG-2", 1),
    ],
)
def test_gpus_are_counted_as_cuda_will(visible: str | None, expected: int) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    nvml = Nvml()
    assert count_gpus(lambda: nvml, environment) == expected
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        ([7], None, 1),
        ([2, 3, None], None, 1),
        ([2, None, None], "1,2", 2),
        ([2, None, None], "1,GPU-5ab1", 1),
        ([0, None], None, 1),
        ([0], None, 0),
        (["old", "old"], None, 2),
    ],
)
def test_cuda_shows_one_part_of_a_divided_gpu_and_nothing_else(
    gpus: list[int | str | None], visible: str | None, expected: int
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(lambda: Nvml(gpus), environment) == expected


def test_without_nvml_none_are_counted() -> None:
    assert count_gpus(lambda: None, {}) == 0
    assert count_gpus(lambda: Nvml(fails=True), {}) == 0

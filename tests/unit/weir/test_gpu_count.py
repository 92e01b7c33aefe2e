from __future__ import annotations

from types import SimpleNamespace

import pytest

from weir.gpu_count import count_gpus


class NvmlError(Exception):
    pass


def nvml(count: int, fails: bool = False) -> SimpleNamespace:
    def start() -> None:
        if fails:
            raise NvmlError

    return SimpleNamespace(
        NVMLError=NvmlError, nvmlInit=start, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: count
    )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 4), ("", 0), ("0", 1), ("2, 0", 2), ("0,7,1", 1), ("-1", 0), ("GPU-5ab,GPU-6cd", 2)],
)
def test_gpus_are_counted_as_cuda_will(visible: str | None, expected: int) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(lambda: nvml(4), environment) == expected


def test_without_nvml_none_are_counted() -> None:
    assert count_gpus(lambda: None, {}) == 0
    assert count_gpus(lambda: nvml(1, fails=True), {}) == 0

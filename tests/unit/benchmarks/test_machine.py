"""The shapes that `benchmarks.machine` compares."""

import pytest

from benchmarks.compare.measurement import Measurement
from benchmarks.machine import Shape, rows_of
from weir.options import SERVE, options_of


@pytest.mark.parametrize(
    ("text", "options", "partitions"),
    [
        ("auto", ["auto", "auto", "auto", "0"], 1),
        ("2x3x4", ["2", "3", "4", "0"], 3),
        ("1x1xauto/4", ["1", "1", "auto", "4"], 1),
    ],
)
def test_a_shape_is_options_of_weir_serve(text: str, options: list[str], partitions: int) -> None:
    shape = Shape.of(text)
    names = [option.partition("=")[0] for option in shape.options]
    assert [option.partition("=")[2] for option in shape.options] == options
    assert {name.removeprefix("--").replace("-", "_") for name in names} <= options_of(SERVE).keys()
    assert shape.partitions == partitions


@pytest.mark.parametrize("text", ["", "1", "1x1", "1x1x1x1", "1x1x1/", "1x-1x1", "axbxc"])
def test_another_text_is_none(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        Shape.of(text)


def measured(server: str, number: int, requests_per_s: float, cpu_ms: float) -> Measurement:
    return Measurement(server, "", number, "", 1, requests_per_s, 1.0, 2.0, cpu_ms, {"gateway": 5.0})


def test_ratios_are_those_of_the_same_round() -> None:
    measurements = [
        *(measured("1x1x1", number, 1000.0 * (number + 1), 0.1 * (number + 1)) for number in range(3)),
        *(measured("2x1x2", number, 1500.0 * (number + 1), 0.2 * (number + 1)) for number in range(3)),
    ]
    first, second = rows_of(["1x1x1", "2x1x2"], 8, measurements)
    assert first[:6] == ("1x1x1", 8, "2000", "1.00", "200.0", "1.00")
    assert second[:6] == ("2x1x2", 8, "3000", "1.50", "400.0", "2.00")

"""The highest values of an output, as a running Triton 2.51 ranks and writes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve import response as classification
from weir.schemas.kserve.response import classify

NUMPY = {"FP32": "f4", "FP64": "f8", "UINT8": "u1", "UINT64": "u8", "INT8": "i1", "INT64": "i8", "INT32": "i4"}


def ranked(
    values: Any, count: int, datatype: str = "FP32", batching: bool = False, labels: list[str] | None = None
) -> tuple[list[int], list[str]]:
    tensor = Tensor.from_numpy("X", np.array(values, NUMPY[datatype]), datatype)
    classes = classify(tensor, count, batching, labels)
    assert (classes.name, classes.datatype) == ("X", "BYTES")
    return list(classes.shape), [text.decode() for text in classes.to_numpy().ravel()]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_no_more_classes_than_elements(count: int) -> None:
    best = ["3.500000:1", "2.000000:2", "1.000000:0"][:count]
    assert ranked([1, 3.5, 2], count) == ([len(best)], best)


def test_rows_of_a_batch_and_labels() -> None:
    assert ranked([[1, 3, 2], [7, 5, 9e20]], 2, batching=True, labels=["cat", "dog"]) == (
        [2, 2],
        ["3.000000:1:dog", "2.000000:2", "899999982852417519616.000000:2", "7.000000:0:cat"],
    )


def test_an_empty_label_is_left_out() -> None:
    assert ranked([1], 1, labels=[""])[1] == ["1.000000:0"]


def test_all_dimensions_but_the_batch_are_one() -> None:
    values = [[[1, 2], [3, 4]], [[8, 7], [6, 5]]]
    assert ranked(values, 1, batching=True) == ([2, 1], ["4.000000:3", "8.000000:0"])
    assert ranked(values, 1) == ([1], ["8.000000:4"])


def test_equal_values_come_in_order() -> None:
    assert ranked([1] * 20, 20)[1] == [f"1.000000:{index}" for index in range(20)]
    assert ranked([3, 3, 5], 3, "UINT8")[1] == ["5:2", "3:0", "3:1"]


def test_not_a_number_is_last() -> None:
    assert ranked([1, math.nan, 2, math.inf], 4)[1] == ["inf:3", "2.000000:2", "1.000000:0", "nan:1"]


@pytest.mark.parametrize(
    ("datatype", "values", "classes"),
    [
        ("UINT8", [1, 255, 0], ["255:1", "1:0", "0:2"]),
        ("INT8", [-128, 127, 0], ["127:1", "0:2", "-128:0"]),
        ("UINT64", [0, 2**64 - 1, 2**63], ["18446744073709551615:1", "9223372036854775808:2", "0:0"]),
        ("INT64", [-(2**63), 2**63 - 1, -1], ["9223372036854775807:1", "-1:2", "-9223372036854775808:0"]),
        ("FP64", [0.1234567, -1, 0], ["0.123457:0", "0.000000:2", "-1.000000:1"]),
    ],
)
def test_every_width_is_ranked_in_full(datatype: str, values: list[float], classes: list[str]) -> None:
    assert ranked(values, 3, datatype) == ([3], classes)


def test_nothing_to_rank() -> None:
    assert ranked([], 3) == ([0], [])
    assert ranked(np.zeros((0, 3)), 2, batching=True) == ([0, 2], [])
    assert ranked(np.zeros((2, 0)), 2, batching=True) == ([2, 0], [])


@pytest.mark.parametrize("datatype", ["BOOL", "FP16", "BF16", "BYTES"])
def test_datatypes_without_classes(datatype: str) -> None:
    with pytest.raises(WeirError) as caught:
        classify(Tensor("X", datatype, [1], b"\0\0"), 1, False, None)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == f"class result not available for output due to unsupported type '{datatype}'"


def test_too_many_elements() -> None:
    most = classification.MAX_CLASSIFIED_ELEMENTS
    assert ranked(np.zeros(most), 1, "INT8")[0] == [1]
    with pytest.raises(WeirError, match=r"^INVALID_ARG: classification output tensor too large$"):
        ranked(np.zeros(most + 1), 1, "INT8")

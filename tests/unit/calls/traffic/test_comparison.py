from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from weir.calls.traffic.comparison import ComparisonTotals, Difference, compare
from weir.schemas.core.tensors import DATATYPES, Tensor
from weir.schemas.wire.traffic import OutputRow, TrafficReport

NUMBERS = [name for name in DATATYPES if name != "BYTES"]


def tensor(array: np.ndarray, datatype: str, name: str = "OUT") -> Tensor:
    return Tensor.from_numpy(name, array, datatype)


def differ(live: list, copied: list, datatype: str = "FP32") -> Difference:
    kind = np.object_ if datatype == "BYTES" else DATATYPES[datatype].numpy
    return compare([tensor(np.array(live, kind), datatype)], [tensor(np.array(copied, kind), datatype)])


@pytest.mark.parametrize(
    ("live", "copied", "datatype", "expected"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], "FP32", OutputRow(3, 0, 0, 0, 1, 0)),
        ([[1, 2, 4]], [[1, 2, 3]], "FP32", OutputRow(3, 1, 1, 0.25, 1, 0)),
        ([[1, 2, 3], [3, 2, 1]], [[4, 2, 3], [3, 2, 1]], "FP64", OutputRow(6, 1, 3, 0.75, 2, 1)),
        ([[2.0]], [[-2.0]], "FP32", OutputRow(1, 1, 4, 2, 0, 0)),
        ([math.nan, 1], [math.nan, 1], "FP32", OutputRow(2, 0, 0, 0, 1, 0)),
        ([math.nan, 1], [0, 1], "FP32", OutputRow(2, 1, math.inf, math.inf, 1, 0)),
        ([math.inf, -math.inf], [math.inf, -math.inf], "FP16", OutputRow(2, 0, 0, 0, 1, 0)),
        ([math.inf], [1], "FP32", OutputRow(1, 1, math.inf, math.inf, 0, 0)),
        ([0.0], [-0.0], "FP32", OutputRow(1, 0, 0, 0, 0, 0)),
        ([5, 7], [5, 9], "INT64", OutputRow(2, 1, 2, 2 / 9, 2, 1)),
        ([2**62], [2**62 + 1], "INT64", OutputRow(1, 1, 0, 0, 1, 1)),
        ([True, False], [True, True], "BOOL", OutputRow(2, 1, 1, 1, 2, 1)),
        ([b"cat", b"dog"], [b"cat", b"cow"], "BYTES", OutputRow(2, 1, 0, 0, 2, 1)),
        ([], [], "FP32", OutputRow(0, 0, 0, 0, 0, 0)),
    ],
)
def test_differences(live: list, copied: list, datatype: str, expected: OutputRow) -> None:
    assert differ(live, copied, datatype) == Difference({"OUT": expected})


def test_responses_that_can_t_be_compared() -> None:
    one = tensor(np.ones((1, 2), np.float32), "FP32")
    assert (
        "is FP32 [1, 2], and FP32 [2, 1] in the copy"
        in compare([one], [one.__class__("OUT", "FP32", [2, 1], one.data)]).mismatch
    )
    assert compare([one], []).mismatch == "only one of the versions has the outputs: OUT"
    assert "malformed" in compare([one], [Tensor("OUT", "FP32", [1, 2], b"\1")]).mismatch
    assert compare([one], []).score == math.inf


@given(st.data(), st.sampled_from(NUMBERS))
def test_equal_outputs_never_differ_and_others_do(data: st.DataObject, datatype: str) -> None:
    kind = np.dtype(DATATYPES[datatype].numpy)
    content = data.draw(hnp.arrays(np.uint8, (data.draw(st.integers(0, 12)), kind.itemsize)))
    if datatype == "BOOL":
        content &= 1
    live = Tensor("OUT", datatype, [len(content)], content.tobytes())
    same = compare([live], [Tensor("OUT", datatype, [len(content)], content.tobytes())])
    assert same.score == 0
    assert same.outputs["OUT"].differing == 0
    changed = data.draw(hnp.arrays(np.uint8, content.shape))
    if datatype == "BOOL":
        changed &= 1
    other = Tensor("OUT", datatype, [len(content)], changed.tobytes())
    row = compare([live], [other]).outputs["OUT"]
    back = compare([other], [live]).outputs["OUT"]
    assert row == back, "the comparison is symmetric"
    assert (row.differing == 0) or row.largest_absolute > 0 or datatype in ("INT64", "UINT64")
    assert row.largest_relative <= 2 or row.largest_relative == math.inf


def test_sums_survive_their_way() -> None:
    totals, other = ComparisonTotals(), ComparisonTotals()
    totals.add(differ([[1, 2, 4]], [[1, 2, 3]]))
    totals.add(differ([[1, 2, 3]], [[1, 2, 3]]))
    totals.add(Difference({}, "shapes"))
    totals.failed, totals.skipped = 2, 1
    report = TrafficReport.unpack(TrafficReport("gateway-1", [], [totals.row("m", 2)]).pack())
    other.add_row(report.comparisons[0])
    other.add_row(report.comparisons[0])
    assert (other.compared, other.mismatched, other.differing, other.failed, other.skipped) == (6, 2, 4, 4, 2)
    assert other.outputs == {"OUT": OutputRow(12, 2, 1, 0.25, 4, 0)}
    infinite = differ([math.inf], [0]).outputs
    totals.add(Difference(infinite))
    assert (
        TrafficReport.unpack(TrafficReport("g", [], [totals.row("m", 2)]).pack()).comparisons[0].outputs
        == totals.outputs
    )


def test_signalling_nans_are_equal() -> None:
    bits = np.array([0x7F807F7F, 0x7F807F7F], np.uint32).tobytes()
    both = [[Tensor("OUT", "FP32", [2], bits)] for _ in range(2)]
    assert compare(*both).outputs["OUT"].differing == 0

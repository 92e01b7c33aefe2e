"""Which change of a model a rollback undoes: a ramp with its steps is one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.wire.history import (
    LOAD,
    RAMP,
    RAMP_BEGINS,
    ROLLBACK,
    TRAFFIC,
    ModelChange,
    NumberedChange,
    change_to_undo,
)


def made(*rows: tuple[str, str, int]) -> list[NumberedChange]:
    """Changes 1, 2, ... of these kinds, notes, and numbers of what they undo."""
    return [
        NumberedChange(number, ModelChange("m", kind, 0, note=note, undoes=undoes))
        for number, (kind, note, undoes) in enumerate(rows, 1)
    ]


def undone(*rows: tuple[str, str, int]) -> int | None:
    found = change_to_undo(made(*rows))
    return None if found is None else found.number


SET, BEGIN = (TRAFFIC, "", 0), (TRAFFIC, f"{RAMP_BEGINS}2 to 100 %", 0)
STEP, WENT_BACK, LOADED = (RAMP, "step to 5 %", 0), (RAMP, "went back: 3 % failed", 0), (LOAD, "", 0)


def test_a_ramp_is_undone_as_a_whole_however_it_ended() -> None:
    assert undone(SET, BEGIN) == 2
    assert undone(SET, BEGIN, STEP, STEP) == 2
    assert undone(SET, BEGIN, STEP, WENT_BACK) == 2
    assert undone(SET, BEGIN, STEP, WENT_BACK, (ROLLBACK, "", 2)) == 1
    assert undone(SET, BEGIN, STEP, (ROLLBACK, "", 3)) == 1, "as earlier releases have undone a step"
    assert undone(STEP, WENT_BACK) == 1, "what began it is not kept any more"


def test_other_changes_beside_a_ramp_are_undone_alone() -> None:
    copies = (TRAFFIC, "copies of 5 % run on version 2", 0)
    assert undone(SET, BEGIN, STEP, LOADED) == 4
    assert undone(SET, BEGIN, STEP, LOADED, (ROLLBACK, "", 4)) == 2
    assert undone(BEGIN, copies, STEP) == 1
    assert undone(BEGIN, copies, STEP, (ROLLBACK, "", 1)) == 2


@given(st.lists(st.sampled_from([SET, BEGIN, STEP, WENT_BACK, LOADED]), max_size=12))
def test_rollbacks_come_to_an_end_and_undo_each_change_once(rows: list[tuple[str, str, int]]) -> None:
    numbers: list[int] = []
    while (number := undone(*rows)) is not None:
        numbers.append(number)
        rows = [*rows, (ROLLBACK, "", number)]
    assert len(numbers) == len({*numbers})
    steps = {place for place, (kind, _, undoes) in enumerate(rows, 1) if kind == RAMP}
    starts = {place for place, row in enumerate(rows, 1) if row[0] in (TRAFFIC, LOAD)}
    assert starts <= {*numbers} <= starts | steps

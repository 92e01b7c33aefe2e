"""The rows of `weir top`: what they show, their order and their width."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.cluster.status.findings import findings_of
from weir.cluster.status.snapshot import ClusterStatus, DeadLetters, ModelStatus, Problem, VersionStatus
from weir.commands.top.rows import (
    COLUMNS,
    TABLE_WIDTH,
    ModelRow,
    cut_name,
    duration_text,
    filter_rows,
    number_text,
    problems_text,
    rows_of,
    sort_rows,
    state_of,
    table_lines,
    totals_text,
)


def model(name: str, *states: str, **more: object) -> ModelStatus:
    versions = [
        VersionStatus(version=number, state=state, workers=1, instances=1, busy=0, reasons=[])
        for number, state in enumerate(states, 1)
    ]
    facts = {
        "namespace": "", "workers": ["w"], "reasons": [], "scaled_to_zero": False, "utilization": None,
        "desired_workers": None, **more,
    }  # fmt: skip
    return ModelStatus(name=name, versions=versions, **facts)


def status(*models: ModelStatus, **more: object) -> ClusterStatus:
    return ClusterStatus(taken_ms=1, state="healthy", models=list(models), **more)


def test_a_row_joins_the_load_and_the_state() -> None:
    load = {"a": {"requests_per_s": 5.0, "p50_ms": 2.0, "batch_size": None}, "b": {"requests_per_s": 1.0}}
    rows = {row.key: row for row in rows_of(load, status(model("a", "READY"), model("c", "LOADING")))}
    assert rows["a"] == ModelRow("a", "ready", 5.0, None, 2.0, workers=1)
    assert (rows["b"].state, rows["c"].state, rows["c"].requests_per_s) == ("", "loads", None)
    assert rows_of({}, None) == []


@pytest.mark.parametrize(
    ("given_model", "state"),
    [
        (model("a", "READY"), "ready"),
        (model("a", "READY", "UNAVAILABLE"), "ready"),
        (model("a", "READY", rejected=["broken"]), "partly"),
        (model("a", "LOADING"), "loads"),
        (model("a", "UNAVAILABLE"), "down"),
        (model("a"), "down"),
        (model("a", scaled_to_zero=True), "zero"),
    ],
)
def test_the_state_is_one_word(given_model: ModelStatus, state: str) -> None:
    assert state_of(given_model) == state


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (math.nan, ""), (0, "0"), (0.25, "0.25"), (3, "3"), (12.34, "12.3"), (1234.4, "1234"), (12_345, "12.3k"),
     (7_654_321, "7654k"), (76_543_210, "76.5M")],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, ""), (0.123, "0.12"), (12.34, "12.3"), (842, "842"), (1844, "1.84s"), (125_000, "125s"), (3_600_000, "60m"),
     (86_400_000, "24h")],
)  # fmt: skip
def test_durations(ms: float | None, text: str) -> None:
    assert duration_text(ms) == text


@given(st.floats(0, 1e10))
def test_no_number_is_wider_than_its_column(value: float) -> None:
    assert len(number_text(value)) <= 6
    assert len(duration_text(value)) <= 6


ROWS = [
    ModelRow("b", "ready", 1.0, p99_ms=7.0),
    ModelRow("A", "down", 3.0),
    ModelRow("c", "ready", 3.0, p99_ms=9.0),
    ModelRow("d", "", None),
]


def order(title: str, reverse: bool = False) -> list[str]:
    column = next(number for number, each in enumerate(COLUMNS) if each.title == title)
    return [row.key for row in sort_rows(ROWS, column, reverse)]


def test_numbers_are_sorted_from_the_largest_and_texts_from_a() -> None:
    assert order("REQ/S") == ["A", "c", "b", "d"]
    assert order("P99") == ["c", "b", "A", "d"]
    assert order("MODEL") == ["A", "b", "c", "d"]
    assert order("STATE") == ["A", "b", "c", "d"]


def test_in_reverse_rows_without_a_value_come_last_too() -> None:
    assert order("REQ/S", True) == ["b", "A", "c", "d"]
    assert order("P99", True) == ["b", "c", "A", "d"]
    assert order("MODEL", True) == ["d", "c", "b", "A"]


def test_a_filter_finds_parts_of_names_and_states() -> None:
    assert [row.key for row in filter_rows(ROWS, " a ")] == ["A"]
    assert [row.key for row in filter_rows(ROWS, "DOWN")] == ["A"]
    assert [row.key for row in filter_rows(ROWS, "")] == ["b", "A", "c", "d"]


def test_names_are_cut_in_the_middle_and_steer_no_terminal() -> None:
    assert cut_name("short", 10) == "short"
    assert cut_name("a_model_with_a_long_name", 10) == "a_mode…ame"
    assert ModelRow("evil\x1b[2J\nname", "").name == "evil?[2J name"


@pytest.mark.parametrize("width", [79, 80, 100, 200])
def test_the_table_fits(width: int) -> None:
    full = ModelRow("m" * 100, "partly", 9999.4, 12.5e6, 999.4, 1e7, 99_999, 86_400, 1024, 1.0, 999)
    lines = table_lines([full, ModelRow("m", "")], width)
    assert max(map(len, lines)) <= max(width, TABLE_WIDTH)
    assert TABLE_WIDTH == 79
    assert lines[1].endswith("partly")


def test_the_head_says_what_is_wrong() -> None:
    problem = Problem(level="down", kind="no worker", about="", text="no worker\nreplies" + "x" * 200)
    letters = Problem(level="note", kind="dead letters", about="m", text="3 dead letters of 'm'")
    found = findings_of([problem, letters])
    lines = problems_text(status(findings=found).model_copy(update={"state": "down"}), 60)
    assert lines[0] == "down: 1 warning, 1 note"
    assert lines[1].startswith("no worker replies")
    assert len(lines[1]) == 60
    assert problems_text(status(findings=found[1:]), 60) == ["healthy: 0 warnings, 1 note", "3 dead letters of 'm'"]
    assert problems_text(None, 80) == ["collecting the state of the cluster…"]
    lost = ClusterStatus(taken_ms=1, state="unreachable", error="no NATS server answers")
    assert problems_text(lost, 80) == ["unreachable: no NATS server answers"]


def test_the_totals_fit_into_a_line() -> None:
    load = {
        "requests_per_s": 123_456.7, "failures_per_s": 9_999.0, "p50_ms": 99.99, "p99_ms": 123_456.0,
        "queue_depth": 50_000, "utilization": 1.0, "cpu_utilization": 1.0, "gpu_utilization": 1.0,
    }  # fmt: skip
    dead = [DeadLetters(model="m", namespace="", letters=12_345)]
    assert len(totals_text(load, status(dead=dead))) <= 80
    assert totals_text({}, None) == "– req/s  – fail/s  queue –"
    idle = {"requests_per_s": 0.0, "failures_per_s": 0.0, "queue_depth": 0.0}
    assert totals_text(idle, None) == "0 req/s  0 fail/s  queue 0"

"""The progress of a watched job, on terminals of several widths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from weir.commands.batch_jobs import batch_display
from weir.commands.batch_jobs.batch_client import JobsClient, Unreachable

ID = "batch-0123456789abcdef"
JOB = {
    "id": ID,
    "model": "resnet",
    "state": "running",
    "total": 100_000,
    "done": 25_000,
    "failed": 3,
    "rate_per_s": 1250.0,
    "left_s": 60.0,
    "started_ms": 1_000,
    "ended_ms": 81_000,
    "output": "/data/a folder with a rather long name/of the results of this job",
    "output_format": "jsonl",
    "note": "",
    "error": "",
}


class Told(JobsClient):
    """A server that tells these states, one after the other."""

    def __init__(self, *states: dict[str, Any] | Exception) -> None:
        super().__init__("somewhere.example:8000")
        self.option = " --url somewhere.example:8000"
        self._states: Iterator[dict[str, Any] | Exception] = iter(states)

    def status(self, id: str) -> dict[str, Any]:
        state = next(self._states)
        if isinstance(state, Exception):
            raise state
        return {**JOB, **state}


@pytest.mark.parametrize("columns", [0, 20, 40, 60, 120])
def test_what_is_to_be_copied_is_never_folded(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(batch_display, "_POLL_S", 0.0)
    if columns:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))
    waits = {"note": "the job's output can't be written: No space left on device"}
    batch_display.watch(Told(waits, {"state": "succeeded", "done": 100_000}), JOB)
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert f"output: {JOB['output']}\n" in said
    assert f"grep '\"error\":' '{JOB['output']}'/part-*\n" in said
    assert f"weir batch retry {ID} --url somewhere.example:8000\n" in said
    assert "100,000 items, 3 failed, in 0:01:20 (1,250/s)\n" in said
    assert f"{waits['note']}" in said
    assert "…" not in said


REFUSED = "somewhere.example:8000 is not reachable: Connection refused"


class Clock:
    """Time that goes on by a second with each look at it."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        self._now_s += 1.0
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        pass


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_server_that_is_away_is_shown_as_away(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_display, "time", Clock())
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "120")
    shown: list[str] = []
    client = Told({}, *[Unreachable(REFUSED)] * 40, {"done": 30_000}, {"state": "succeeded", "done": 100_000})
    real_update = batch_display.Progress.update

    def update(progress: Any, task: Any, **fields: Any) -> None:
        shown.append(f"{fields['left']}|{fields['rate']}")
        real_update(progress, task, **fields)

    monkeypatch.setattr(batch_display.Progress, "update", update)
    assert batch_display.watch(client, JOB)["state"] == "succeeded"
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    if is_terminal:
        assert said.count(f"waiting: {REFUSED}") == 1
        away = shown[2:42]
        assert all(re.fullmatch(r"no response for \S+( s)?\|", one) for one in away)
        assert len(set(away)) == 40, "the time goes on"
        assert [shown[0], shown[42]] == ["0:01:00 left|1,250/s"] * 2
    else:
        lines = [line for line in said.splitlines() if "waiting" in line]
        assert len(lines) > 2, "again from time to time"
        assert all(f"waiting: {REFUSED} (no response for " in line for line in lines)
        assert f"{ID}: running, 30,000 of 100,000 items" in said

"""What is seen of a job that is watched, at terminals of several widths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from weir import batch_display
from weir.batch_client import JobsClient

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

    def __init__(self, *states: dict[str, Any]) -> None:
        super().__init__("somewhere.example:8000")
        self._states: Iterator[dict[str, Any]] = iter(states)

    def status(self, id: str) -> dict[str, Any]:
        return {**JOB, **next(self._states)}


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

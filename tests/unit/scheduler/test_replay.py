"""The replay of event logs: modified or foreign files are noticed, and the command reports differences."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from tests.support.scheduling.recording import (
    differences,
    numbers,
    recorded,
    rewritten,
    rows,
)
from weir.scheduler.replay import NotAnEventLog, main, read_log


def test_a_missing_event_is_noticed(tmp_path: Path):
    path = recorded(tmp_path)
    head, *events = rows(path)
    rewritten(path, [head, *events[:40], *events[41:]])
    assert (42, "event 41 is missing") in differences(path)


def test_a_changed_event_is_noticed(tmp_path: Path):
    path = recorded(tmp_path)
    head, *events = rows(path)
    number, _, _, by_name = msgpack.unpackb(events[40][0])
    events[40][0] = msgpack.packb((number, "expire", [1], by_name))
    rewritten(path, [head, *events])
    assert differences(path)[0][0] == 41


def test_a_policy_with_other_decisions_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = recorded(tmp_path)
    choose = "weir.scheduler.sequences.scheduler.SequenceStrategy.choose"
    monkeypatch.setattr(choose, lambda self, instance, now_us: (list(instance.ready)[:1], 0))
    assert differences(path)


def test_a_file_that_ends_within_a_row_is_replayed_up_to_it(tmp_path: Path):
    path = recorded(tmp_path)
    whole = numbers(path)
    path.write_bytes(path.read_bytes()[:-3])
    assert differences(path) == []
    assert numbers(path) == whole[:-1]


@pytest.mark.parametrize("content", [b"", b"\xc1", b"text", msgpack.packb({"format": "other"}), msgpack.packb([1])])
def test_other_files_are_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(NotAnEventLog):
        read_log(path)


def test_the_command_prints_events_and_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def command(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["replay", *map(str, arguments)])
        return main()

    path = recorded(tmp_path)
    assert command(path) == 0
    same = capsys.readouterr().out
    assert "enqueue g/1" in same
    assert "batch 2 of version 1 to " in same  # the first number is that of the sequence
    assert same.splitlines()[-1].endswith(" 0 differences")
    head, *events = rows(path)
    events[-1][2] = b"otherwise"
    rewritten(path, [head, *events])
    assert command(path, "--quiet") == 1
    assert "DIFFERENT" in capsys.readouterr().out
    assert command(__file__) == 2


def test_the_command_exists():
    asked = [sys.executable, "-m", "weir.scheduler.replay", "--help"]
    assert "event log" in subprocess.run(asked, capture_output=True, text=True, check=True).stdout

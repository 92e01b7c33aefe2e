"""The file of lines: batches, bounds, rotation, and a disk that is full."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from weir.schemas.core.errors import WeirError
from weir.telemetry import line_writer as module
from weir.telemetry.line_writer import LineWriter


def encode(texts: Sequence[str]) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.log"


@pytest.fixture
def writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LineWriter[str]]:
    """A writer whose thread sleeps: tests write."""
    monkeypatch.setattr(module, "WRITE_INTERVAL_S", 3600.0)
    writer = LineWriter("--access-log", str(path), encode)
    yield writer
    writer.close()


def test_lines_are_appended_in_their_order(writer: LineWriter[str], path: Path) -> None:
    path.write_text("before\n")
    writer.put("one")
    writer.put("two")
    writer.write_waiting()
    writer.put("three")
    writer.close()
    assert path.read_text() == "before\none\ntwo\nthree\n"
    assert writer.dropped == 0


def test_the_thread_writes_by_itself(path: Path) -> None:
    writer = LineWriter("--access-log", str(path), encode)
    try:
        writer.put("one")
        wait_until(lambda: path.read_text() == "one\n")
    finally:
        writer.close()


def test_a_file_that_can_not_be_opened_is_an_error_of_the_option(tmp_path: Path) -> None:
    with pytest.raises(WeirError, match=r"--audit-log .*missing/lines.log can't be written: No such file"):
        LineWriter("--audit-log", str(tmp_path / "missing" / "lines.log"), encode)


def test_what_waits_is_bounded(writer: LineWriter[str], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    for number in range(5):
        writer.put(str(number))
    writer.write_waiting()
    assert path.read_text() == "0\n1\n2\n"
    assert writer.dropped == 2


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_renamed_file_is_opened_again(writer: LineWriter[str], path: Path, is_replaced: bool) -> None:
    writer.put("old")
    writer.write_waiting()
    rotated = path.rename(path.with_suffix(".1"))
    if is_replaced:
        path.touch()
    for _ in range(module._CHECKS_EVERY):
        writer.write_waiting()
    writer.put("new")
    writer.write_waiting()
    assert rotated.read_text() == "old\n"
    assert path.read_text() == "new\n"


def test_a_full_disk_is_logged_once_and_its_lines_are_counted(
    writer: LineWriter[str], path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = os.write
    room = [4]

    def write(fd: int, data: bytes) -> int:
        """A disk with `room` bytes left, which takes a part of a write first, as the kernel does."""
        size = min(len(data), room[0])
        if not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= size
        return written(fd, bytes(data[:size]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        for _ in range(3):
            writer.put("a line")
            writer.write_waiting()
    assert writer.dropped == 3
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "--access-log can't be written" in caplog.text
    writer.put("after")
    writer.write_waiting()
    assert path.read_text() == "a li\nafter\n"  # the line that was cut stands alone
    assert writer.dropped == 3
    assert "3 lines were dropped" in caplog.records[-1].getMessage()


def test_lines_may_go_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    writer = LineWriter("--access-log", "-", encode)
    writer.put("one")
    writer.close()
    assert capfd.readouterr().out == "one\n"

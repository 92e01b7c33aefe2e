"""The lines of the access log: their fields, and what clients can not do to them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weir.access.audit import MAX_TEXT
from weir.access.principal import NOBODY, Principal, Proof
from weir.telemetry.access_log import AccessLog, CallLine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


@pytest.fixture
def log(path: Path) -> Iterator[AccessLog]:
    log = AccessLog(str(path))
    log.open()
    yield log
    log.close()


def lines(log: AccessLog, path: Path) -> list[dict[str, Any]]:
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_what_was_recorded(log: AccessLog, path: Path) -> None:
    alice = Principal("alice", "red", frozenset(), Proof.KEY, "k-17")
    log.record("http", "GET", "/v2/models/{model}", "m", "2", 200, 3, 4, time.monotonic_ns() - 5_000_000, alice)
    (line,) = lines(log, path)
    assert line.pop("time") > 1e9
    assert line.pop("duration_us") >= 5000
    assert line == {
        "door": "http",
        "method": "GET",
        "route": "/v2/models/{model}",
        "model": "m",
        "version": "2",
        "status": 200,
        "bytes_in": 3,
        "bytes_out": 4,
        "principal": "alice",
    }


@pytest.mark.parametrize("text", ["a\nb", "a\ud800\x00", "\u2028", "x" * (1 << 20), "\n" * (1 << 20)])
def test_texts_of_clients_are_bounded_and_make_one_line(log: AccessLog, path: Path, text: str) -> None:
    log.record("http", text, text, text, text, 200, 0, 0, 0, NOBODY._replace(name=text))
    log.close()
    content = path.read_text()
    assert content.count("\n") == 1
    assert len(content) < 6 * MAX_TEXT + 300
    assert "\x00" not in content


def test_what_waits_holds_no_long_texts(log: AccessLog) -> None:
    text = "x" * (1 << 20)
    waiting: list[Any] = []
    log._writer = type("Writer", (), {"put": waiting.append, "close": lambda self: None})()  # type: ignore[assignment]
    log.record("http", "GET", text, text, text, 200, 0, 0, 0, NOBODY)
    assert max(len(waiting[0].route), len(waiting[0].model), len(waiting[0].version)) <= MAX_TEXT + 1


def test_a_log_that_is_not_open_drops_its_lines() -> None:
    log = AccessLog("/nowhere/access.log")
    log.record("http", "GET", "", "", "", 200, 0, 0, 0, NOBODY)
    log.close()
    assert log.dropped == 0


def test_a_call_is_cancelled_unless_it_has_a_status(log: AccessLog, path: Path) -> None:
    line = CallLine(log, b"/a/B")
    line.write(NOBODY)
    line = CallLine(log, b"/a/B\xff")
    line.model, line.status, line.bytes_in, line.bytes_out = "m", 0, 1, 2
    line.write(NOBODY)
    first, second = lines(log, path)
    assert (first["door"], first["route"], first["status"]) == ("grpc", "/a/B", 1)
    assert (second["route"], second["model"], second["status"]) == ("/a/Bÿ", "m", 0)
    assert (second["bytes_in"], second["bytes_out"]) == (1, 2)

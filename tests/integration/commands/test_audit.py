"""`weir audit` against a real broker, with events that a recorder has stored."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.weir_server import clean_environment
from weir.access.audit import event_of
from weir.access.gate import Gate
from weir.access.policy.actions import Action
from weir.access.principal import NOBODY, Principal, Proof
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.cluster.audit import AuditOptions, AuditRecorder

ALICE = Principal("alice", "red", frozenset(["operator"]), Proof.KEY, "k-17")


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


def audit(folder: Path, url: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "weir", "audit", f"--nats={url}", *options],
        env={**clean_environment(folder), "XDG_DATA_HOME": str(folder / "nothing")},
        capture_output=True,
        text=True,
        timeout=60,
    )


async def record(url: str, path: Path) -> None:
    """An allowed load two hours ago, and three refusals just now."""
    now_s = time.time()
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "test", background)
        publisher = AckedPublisher(bus, "test")
        await publisher.start(background)
        recorder = AuditRecorder(bus, publisher, Gate(time.time), AuditOptions(str(path), 1 << 20))
        recorder.start(background)
        recorder.record(
            event_of(
                now_s - 7200, "http", "POST /load", ALICE, Action.LOAD, allowed=True, why="rule 1", model="resnet50"
            )
        )
        for _ in range(3):
            recorder.record(
                event_of(now_s, "grpc", "ModelInfer", NOBODY, Action.INFER, allowed=False, why="no rule", model="b\n")
            )
        await recorder.stop()
        publisher.stop()
        await bus.close()


def test_events_of_the_stream_are_listed(nats: EmbeddedNats, tmp_path: Path) -> None:
    assert audit(tmp_path, nats.url).stdout == "no audit events\n"
    asyncio.run(record(nats.url, tmp_path / "audit.log"))
    listed = [json.loads(line) for line in audit(tmp_path, nats.url, "--json").stdout.splitlines()]
    assert [(event["model"], event["allowed"], event.get("count", 1)) for event in listed] == [
        ("resnet50", True, 1),
        ("b\N{REPLACEMENT CHARACTER}", False, 3),
    ]
    assert [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()] == listed
    title, row = audit(tmp_path, nats.url, "--since=1h", "--denied").stdout.splitlines()
    assert title.startswith("when")
    assert "denied ×3" in row
    assert "resnet50" in audit(tmp_path, nats.url, "--until=1h").stdout
    assert audit(tmp_path, nats.url, "--model=res*", "--json", "--denied").stdout == ""


def test_a_broker_that_is_away_is_an_error(tmp_path: Path) -> None:
    ended = audit(tmp_path, "nats://127.0.0.1:1")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")

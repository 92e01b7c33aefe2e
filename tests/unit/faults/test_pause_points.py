"""Pause points name existing functions, and replace them only if the environment names a folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.pause_points import POINTS, VARIABLE, arm, resolve_point


@pytest.mark.parametrize("name", POINTS)
def test_a_point_is_a_function_of_its_role(name: str) -> None:
    owner, attribute, function = resolve_point(POINTS[name])
    assert attribute in vars(owner)
    assert callable(function)


def test_without_the_variable_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = {name: resolve_point(point)[2] for name, point in POINTS.items()}
    for role in ("gateway", "scheduler", "worker"):
        arm(role)
    assert {name: resolve_point(point)[2] for name, point in POINTS.items()} == before


ARMED = """
import os, socket, sys
from pathlib import Path
import weir.scheduler.service.served_queues
from tests.faults.pause_points import arm
folder = Path(sys.argv[1])
driver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
driver.bind(str(folder / "driver"))
driver.settimeout(5)
weir.scheduler.service.served_queues.ServedQueues._send = lambda self, owned, batch, now_us: print("sent", flush=True)
arm("scheduler")
driver.sendto(b"batched kill 2 0", str(folder / str(os.getpid())))
import time
deadline = time.monotonic() + 5
while time.monotonic() < deadline:
    weir.scheduler.service.served_queues.ServedQueues._send(None, None, None, 0)
    time.sleep(0.01)
"""


def test_a_process_dies_at_the_passage_that_was_ordered(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", ARMED, str(folder)],
        env={VARIABLE: str(folder), "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        timeout=30,
    )
    assert ended.returncode == -9, ended.stderr.decode()
    assert b"sent" in ended.stdout


HALVED = """
import asyncio, socket
from tests.faults.pause_points import OwnLinks
from weir.bus.links.framing import FrameReader
from weir.bus.links.link import Link

async def main():
    ours, theirs = socket.socketpair()
    links = OwnLinks()
    link = Link("peer", ours, lambda link, frames: None, lambda link, end: None, 1.0)
    links.harm("halve")
    link.send([("first", b"1"), ("second", b"2" * 1000)])
    received = theirs.recv(65536)
    print(len(received) > 0, list(FrameReader().feed(received)), [subject for subject, _ in link.take_unsent()])
asyncio.run(main())
"""


def test_a_link_that_ends_in_a_frame_delivers_no_message_that_is_sent_again() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HALVED],
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        timeout=30,
    )
    assert ended.stdout == b"True [] ['first', 'second']\n", ended.stderr.decode()

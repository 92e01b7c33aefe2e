"""The event log of a running scheduler is replayed offline: parallel calls, a cancelled call and a kill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_slow
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

CALLS = 60


def test_what_a_server_recorded_is_replayed(serve: Callable[..., Server], tmp_path: Path) -> None:
    write_slow(tmp_path / "models", more="dynamic_batching { max_queue_delay_microseconds: 2000 }")
    log = tmp_path / "log"
    server = serve(tmp_path / "models", f"--event-log={log}")

    def call(number: int) -> int:
        inputs = http_inputs({"VALUE": np.array([[number]]), "DELAY_MS": np.array([[5.0]], np.float32)})
        with server.http() as client:
            return int(client.infer("slow", inputs).as_numpy("VALUE_OUT")[0, 0])

    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(call, range(CALLS))
        assert [next(answers) for _ in range(10)] == list(range(10))
        server.kill("worker")
        assert list(answers) == list(range(10, CALLS))
    wait_until(lambda: len(server.pids()) == 5)
    assert server.stop() == 0

    (path,) = log.glob("slow.*.events")
    reply = subprocess.run(
        [sys.executable, "-m", "weir.scheduler.replay", path], capture_output=True, text=True, timeout=30
    )
    assert reply.returncode == 0, reply.stdout[-2000:] + reply.stderr
    assert f" {CALLS} requests ended, 0 differences" in reply.stdout
    assert "worker_lost" in reply.stdout

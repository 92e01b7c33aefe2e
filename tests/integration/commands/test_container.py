"""`weir serve` in a container's limits: each is found, printed in one line, and used.

The limits are those of real control groups, of a small `/dev/shm` and of a small volume, in a mount namespace of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nats
import psutil
import pytest

from tests.support.control_group import ControlGroup, NoControlGroups, control_group
from tests.support.models.zoo import write_identity
from tests.support.servers.weir_server import Server
from weir.runtime.limits.budgets import PROCESS_BYTES
from weir.runtime.limits.process_limits import show_bytes

MEMORY_BYTES = 1200 << 20
SHARED_MEMORY_BYTES = 100 << 20
VOLUME_BYTES = 400 << 20
PROCESSES = 320

MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        text = os.environ.get("OMP_NUM_THREADS", "")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([text], object))]) for _ in requests]
"""
CONFIG = 'backend: "python" output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }'


@pytest.fixture(scope="module")
def group() -> Iterator[ControlGroup]:
    try:
        with control_group(("memory", "cpu", "pids")) as made:
            made.limit(memory_bytes=MEMORY_BYTES, processors=1.0, processes=PROCESSES)
            yield made
    except NoControlGroups as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def volume(group: ControlGroup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("volume")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={VOLUME_BYTES}", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no volume can be mounted: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="module")
def server(group: ControlGroup, volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("container")
    write_identity(folder / "models", "same", "UINT8")
    environment = folder / "models" / "environment"
    (environment / "1").mkdir(parents=True)
    (environment / "config.pbtxt").write_text(CONFIG)
    (environment / "1" / "model.py").write_text(MODEL)
    enter = (
        f'mount -t tmpfs -o size={SHARED_MEMORY_BYTES} tmpfs /dev/shm && {group.entering} ulimit -S -n 256; exec "$@"'
    )
    before = ("unshare", "--mount", "sh", "-c", enter, "sh")
    options = (f"--data-dir={volume}", "--gateways=auto", "--schedulers=auto")
    server = Server(folder, folder / "models", *options, before=before)
    try:
        yield server
        assert server.stop() == 0, server.log()
    finally:
        server.close()


def limits_line(server: Server, role: str) -> str:
    """The line of a role's log with its limits."""
    (line,) = [line for line in server.log().splitlines() if '"limits: ' in line and f" {role} " in line]
    return line.partition('"limits: ')[2]


def test_they_are_printed_by_every_role(server: Server) -> None:
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for role in ("supervisor", "gateway", "durable", "scheduler", "worker"):
        line = limits_line(server, role)
        assert re.match(r"1 processor( \(CPU quota; \d+ in all\))?, 1\.2 GiB of memory \(control group\), ", line), line
        assert f", {PROCESSES} processes and threads, {open_files} open files, 100 MiB in /dev/shm" in line, line


def test_every_process_may_open_as_many_files_as_the_hard_limit_allows(server: Server) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for role, pid in {"supervisor": server.process.pid, **server.pids()}.items():
        assert psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard), role


def test_the_cpu_quota_bounds_processes_and_threads(server: Server) -> None:
    line = limits_line(server, "supervisor")
    assert "; gateways: 1; schedulers: 1; workers: 1; threads of nats server: 1; " in line
    assert limits_line(server, "worker").count("; threads of a pool: 1; ") == 1
    assert psutil.Process(server.pids()["nats"]).environ()["GOMAXPROCS"] == "1"
    if len(psutil.Process().cpu_affinity() or ()) > 1:
        body = json.dumps({"inputs": [], "outputs": [{"name": "OUT"}]}).encode()
        request = urllib.request.Request(f"http://{server.http_place}/v2/models/environment/infer", body)
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert json.loads(reply.read())["outputs"][0]["data"] == ["1"]


def test_the_memory_limit_bounds_what_requests_hold(server: Server) -> None:
    left_bytes = MEMORY_BYTES - 6 * PROCESS_BYTES
    # A sixth for the gateway, half of that for the process of durable requests, a quarter for the payloads of three.
    assert server.metrics()["weir_memory_ledger_limit_bytes", ""] == pytest.approx(left_bytes / 4, abs=2)
    payloads = show_bytes(left_bytes // 12)
    assert f"; requests: {show_bytes(left_bytes // 6)}; payloads: {payloads}" in limits_line(server, "gateway")
    assert limits_line(server, "worker").endswith(f'; payloads: {payloads}"')
    limit_bytes = int(psutil.Process(server.pids()["nats"]).environ()["GOMEMLIMIT"])
    assert limit_bytes == MEMORY_BYTES // 2


def large_request(size_bytes: int) -> bytes:
    """An HTTP request with a tensor of this size."""
    tensor = {"name": "IN", "shape": [1, size_bytes], "datatype": "UINT8"}
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": size_bytes}}]}).encode()
    return (
        f"POST /v2/models/same/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + size_bytes}\r\n\r\n"
    ).encode() + (head + bytes(size_bytes))


async def send(writer: asyncio.StreamWriter, request: bytes) -> None:
    """Sends a request piece by piece: this process does not hold it once more for each connection."""
    view = memoryview(request)
    with contextlib.suppress(ConnectionError):  # a rejected request need not be read
        for start in range(0, len(view), 1 << 18):
            writer.write(view[start : start + (1 << 18)])
            await writer.drain()


async def ask(place: str, request: bytes) -> tuple[int, bool]:
    """The status of the response, and whether it says when to try again."""
    host, port = place.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sending = asyncio.create_task(send(writer, request))
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    assert length
    await reader.readexactly(int(length[1]))
    sending.cancel()
    writer.close()
    return int(head.split()[1]), b"\r\nretry-after: " in head


@pytest.mark.parametrize(("size_bytes", "count"), [(15_000_000, 40), (4_000_000, 60)])
async def test_what_has_no_room_is_to_be_tried_again_and_nothing_is_killed(
    server: Server, group: ControlGroup, size_bytes: int, count: int
) -> None:
    lives = server.pids()
    request = large_request(size_bytes)
    outcomes = Counter(await asyncio.gather(*(ask(server.http_place, request) for _ in range(count))))
    assert outcomes.keys() <= {(200, False), (503, True)}, outcomes
    assert await ask(server.http_place, large_request(100_000)) == (200, False)
    assert group.kills == 0
    assert group.peak_memory_bytes < MEMORY_BYTES
    assert server.pids() == lives


async def test_the_volume_bounds_the_streams(server: Server) -> None:
    client = await nats.connect(server.nats_url)
    try:
        jetstream = client.jetstream()
        sizes = {
            name: (await jetstream.stream_info(name)).config.max_bytes or 0 for name in ("QUEUE", "RESULT", "DEAD")
        }
    finally:
        await client.close()
    assert sizes["QUEUE"] == sizes["RESULT"]
    assert VOLUME_BYTES // 4 < sizes["QUEUE"] < VOLUME_BYTES * 2 // 5
    assert sum(sizes.values()) < VOLUME_BYTES * 0.8
    assert re.search(r"; its storage: 3\d\d MiB", limits_line(server, "supervisor"))

"""F-23: the wall clock of a role jumps forward and back by hours."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from tests.faults.loads.http_caller import HttpCaller
from tests.faults.models import DIGEST, bytes_request
from tests.faults.report import FaultReport
from tests.faults.scene import Task, scene

_JUMPS_S = (3600, -3600, 86_400, -86_400)
_STAYS_S = 2.5
_ROLES = ("scheduler", "worker", "gateway")

_SITE = '''"""The wall clock of this process is that of the machine and what a file says: it is read anew all the time."""

import datetime
import mmap
import os
import struct
import time

_path = os.environ.get("FAULTS_CLOCK")
if _path:
    _file = open(_path, "rb")
    _map = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
    _time, _time_ns = time.time, time.time_ns
    _read = struct.Struct("<q").unpack_from

    def _shifted():
        return _time() + _read(_map)[0]

    def _shifted_ns():
        return _time_ns() + _read(_map)[0] * 1_000_000_000

    time.time, time.time_ns = _shifted, _shifted_ns
'''


async def jumps(task: Task) -> FaultReport:
    """F-23: the wall clock of each role jumps forward and back by 1 h and by 24 h; no request expires because of it."""
    line = FaultReport("F-23", "wall clock of one role ±1 h, ±24 h", seed=task.seed)
    site = task.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    names = [name for role in _ROLES for name in task.shape().names(role)]
    files = {name: task.folder / f"{name}.clock" for name in names}
    for file in files.values():
        _set(file, 0)
    root = str(Path(__file__).parents[3])
    environment = {
        name: {"FAULTS_CLOCK": str(file), "PYTHONPATH": os.pathsep.join((str(site), root))}
        for name, file in files.items()
    }
    async with scene(task, line, task.shape(environment=environment), clients=6, rate=40.0) as on:
        caller = HttpCaller(on.cluster.http())
        for _ in range(task.times(1)):
            for name in names:
                for jump_s in _JUMPS_S:
                    _set(files[name], jump_s)
                    moment_s = time.monotonic()
                    line.faults[f"{name.rpartition('-')[0]} jumps"] += 1
                    await on.recovered(moment_s)
                    if not name.startswith("gateway"):
                        await _with_deadline(caller, line, name, jump_s)
                    await asyncio.sleep(_STAYS_S)
                _set(files[name], 0)
                await asyncio.sleep(0.5)
        caller.close()
        expired = on.durable.verdict.outcomes["expired"] if on.durable else 0
        line.expect(expired == 0, f"{expired} durable requests expired")
    return line


async def _with_deadline(caller: HttpCaller, line: FaultReport, name: str, jump_s: int) -> None:
    """A request with a deadline in a minute, which fails if a role's clock is wrong by more than that."""
    body, headers = bytes_request(b"in time")
    deadline = {"Weir-Deadline-Ms": str(time.time_ns() // 1_000_000 + 60_000)}
    answer = await caller.ask(f"/v2/models/{DIGEST}/infer", body, {**headers, **deadline})
    line.requests += 1
    is_told = answer.status == 200 or (abs(jump_s) >= 60 and answer.status in (499, 503, 504))
    line.expect(is_told, f"{name} {jump_s:+} s: a request with a deadline was answered {answer.status}")
    if answer.status != 200:
        line.notes.append(f"deadline of 60 s, {name.rpartition('-')[0]} {jump_s:+} s: {answer.status}")


def _set(file: Path, seconds: int) -> None:
    if not file.exists():
        file.write_bytes(bytes(8))
    with file.open("r+b") as opened:
        opened.write(seconds.to_bytes(8, "little", signed=True))

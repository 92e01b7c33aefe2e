"""Faults by operators and hosts: F-26, F-28, F-29."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import nats
import psutil
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import NotFoundError

from tests.faults.models import write_models
from tests.faults.report import FaultReport
from tests.faults.scene import Scene, Task, scene
from tests.support.durable.restarting_server import tireless
from weir.bus.naming.durable_subjects import QUEUE_STREAM

_GONE_S = 15.0
_FILLS_S = 0.5


async def changed_streams(task: Task) -> FaultReport:
    """F-26: streams and consumers are deleted and changed: live requests continue, and the log has an error."""
    line = FaultReport("F-26", "streams and consumers deleted, a stream changed", seed=task.seed)
    async with scene(task, line, clients=6, rate=0) as on:
        client = await nats.connect(on.cluster.nats_url)
        jetstream = client.jetstream()
        for _ in range(task.times(3)):
            for consumer in await jetstream.consumers_info("LIVE"):
                await jetstream.delete_consumer("LIVE", consumer.name)
                line.faults["LIVE consumer deleted"] += 1
                await on.recovered(time.monotonic())
            await jetstream.delete_stream("LIVE")
            line.faults["LIVE deleted"] += 1
            await on.recovered(time.monotonic())
            await _delete_what_lies_there(on, jetstream)
        await jetstream.delete_stream(QUEUE_STREAM)
        line.faults["QUEUE deleted"] += 1
        await on.recovered(time.monotonic())
        await on.cluster.until(lambda: _said(on.cluster.log("gateway-0"), "QUEUE"), 20, "the log tells of QUEUE")
        line.notes.append(f"QUEUE deleted: {_said(on.cluster.log('gateway-0'), 'QUEUE')[-110:]}")
        config = await _config_once_there(jetstream, QUEUE_STREAM)
        config.max_age = 600.0
        await jetstream.update_stream(StreamConfig(**vars(config)))
        line.faults["QUEUE changed"] += 1
        on.cluster.members["gateway-0"].is_kept = False
        on.cluster.kill("gateway-0", signal.SIGTERM)
        await on.cluster.until(lambda: not on.cluster.members["gateway-0"].is_running, 30, "the gateway ends")
        on.cluster.members["gateway-0"].is_kept = True
        await on.cluster.until(
            lambda: "max_age" in on.cluster.log("gateway-0"), 20, "the gateway says what was changed"
        )
        line.notes.append(f"QUEUE changed: {_said(on.cluster.log('gateway-0'), 'max_age')[-140:]}")
        kept = (await jetstream.stream_info(QUEUE_STREAM)).config.max_age
        line.expect(kept == 600.0, f"what was changed was changed back unasked: max_age {kept}")
        config.max_age = 0
        await jetstream.update_stream(config)
        await on.cluster.whole()
        await on.recovered(time.monotonic())
        await client.close()
    return line


async def _config_once_there(jetstream: JetStreamContext, stream: str) -> StreamConfig:
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(NotFoundError):
                return (await jetstream.stream_info(stream)).config
            await asyncio.sleep(0.05)


async def _delete_what_lies_there(on: Scene, jetstream: JetStreamContext) -> None:
    """Delete LIVE while it holds requests and all clients wait: no publish fails, because none happens."""
    owner = await on.busy("scheduler")
    stopped = [member.name for member in on.cluster.of("scheduler")]
    await on.kill(stopped, signal.SIGSTOP)
    await asyncio.sleep(_FILLS_S)
    state = (await jetstream.stream_info("LIVE")).state
    on.line.expect(state.messages > 0, "nothing lay in LIVE")
    await jetstream.delete_stream("LIVE")
    on.line.faults["LIVE deleted with what lay there"] += 1
    moment_s = time.monotonic()
    await on.kill(stopped, signal.SIGCONT)
    await on.recovered(moment_s)
    on.line.notes.append(f"{state.messages} frames of {owner.name} deleted")


def _said(log: str, word: str) -> str:
    found = [text for text in log.splitlines() if text.startswith("E") and word in text]
    return found[-1] if found else ""


async def killed_parent(task: Task) -> FaultReport:
    """F-28: kill -9 of `weir serve` itself ends every process that it started."""
    line = FaultReport("F-28", "kill -9 of weir serve", seed=task.seed)
    write_models(task.folder / "models")
    left = kept = 0
    for number in range(task.times(5)):
        folder = task.folder / str(number)
        folder.mkdir()
        options = [f"--access-policy={task.policy}"] if task.policy is not None else []
        with tireless(folder, task.folder / "models", *options) as server:
            children = psutil.Process(server.process.pid).children(recursive=True)
            segments = _segments([child.pid for child in children])
            await asyncio.sleep(task.draw.uniform(0.0, 0.5))
            moment_s = time.monotonic()
            server.process.kill()
            line.faults["kill weir serve"] += 1
            _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=_GONE_S)
            line.recoveries_s.append(time.monotonic() - moment_s)
            left += len(alive)
            line.expect(not alive, f"{len(alive)} of {len(children)} processes were left")
            line.expect(len(children) >= 5, f"there were only {len(children)}")
            kept += sum(os.path.exists(f"/dev/shm/{name}") for name in segments)  # noqa: ASYNC240
    line.notes.append(f"processes left {left}, shared memory left {kept} segments")
    return line


def _segments(pids: list[int]) -> set[str]:
    names: set[str] = set()
    for pid in pids:
        try:
            names.update(re.findall(r"/dev/shm/(\.?weir-[^\s]+)", Path(f"/proc/{pid}/maps").read_text()))
        except OSError:
            continue
    return names


async def bad_starts(task: Task) -> FaultReport:
    """F-29: ports in use, a data folder that is unusable or in use, a broker that can't start: one error each."""
    line = FaultReport("F-29", "starts that can't be: port, data folder, lock, binaries", seed=task.seed)
    repository = task.folder / "models"
    write_models(repository)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (task.folder / "a-file").write_text("")
        held = task.folder / "held"
        held.mkdir()
        broken = task.folder / "nats-broken"
        broken.write_text("#!/bin/sh\nexit 9\n")
        broken.chmod(0o755)
        cases = {
            "HTTP port taken": (f"--http-port={port}",),
            "gRPC port taken": (f"--grpc-port={port}",),
            "NATS port taken": (f"--nats-port={port}",),
            "data folder is a file": (f"--data-dir={task.folder / 'a-file'}",),
            "data folder in none": ("--data-dir=/proc/none/data",),
            "no nats-server": (f"--nats-server={task.folder / 'none'}",),
            "a nats-server that dies": (f"--nats-server={broken}",),
            "no such repository": (f"--model-repository={task.folder / 'none'}",),
            "no broker": ("--nats=nats://127.0.0.1:1",),
        }
        for what, options in cases.items():
            await _starts_not(line, what, task.folder, repository, options)
    with tireless(held, repository, "--exit-timeout-secs=5"):
        await _starts_not(line, "data folder is another's", task.folder, repository, (f"--data-dir={held / 'data'}",))
    return line


async def _starts_not(line: FaultReport, what: str, folder: Path, repository: Path, options: tuple[str, ...]) -> None:
    ports = [
        f"--{door}-port=0" for door in ("http", "grpc", "metrics") if not any(f"--{door}-port" in o for o in options)
    ]
    given = [] if any("--model-repository" in option for option in options) else [f"--model-repository={repository}"]
    if not any("--data-dir" in option or "--nats=" in option for option in options):
        given.append(f"--data-dir={folder / what.replace(' ', '-')}")
    command = [sys.executable, "-P", "-m", "weir", "serve", *given, *ports, *options]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    line.faults[what] += 1
    try:
        _, said = await asyncio.wait_for(process.communicate(), 60)
    except TimeoutError:
        line.failures.append(f"{what}: it did not end within 60 s")
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        return
    text = said.decode(errors="replace")
    line.expect(process.returncode not in (0, None), f"{what}: it ended with status {process.returncode}")
    line.expect("Traceback" not in text, f"{what}: a traceback")
    line.expect(bool(text.strip()), f"{what}: nothing was said")
    left = [p.pid for p in psutil.process_iter() if _is_of(p, process.pid)]
    line.expect(not left, f"{what}: processes were left: {left}")


def _is_of(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session
    except OSError:
        return False

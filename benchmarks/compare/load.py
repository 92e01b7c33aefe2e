"""Closed-loop load: each connection or stream sends its next request when the previous one is answered.

It uses wrk and h2load if they are installed: written in C, they leave the machine to the server. `loops` is the
fallback.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.compare import loops
from benchmarks.compare.payload import Payload
from benchmarks.compare.targets import Protocol

_STREAMS_PER_CONNECTION = 8
_WRK_SCRIPT = Path(__file__).with_name("wrk.lua")


@dataclass(frozen=True)
class Load:
    """What came of it. Latencies are those of answered requests."""

    engine: str
    answered: int
    refused: int
    seconds: float
    p50_ms: float
    p99_ms: float


def apply_load(address: str, payload: Payload, in_flight: int, seconds: int, threads: int = 1) -> Load:
    """Loads the server at `address` (host:port) for `seconds`. Raises RuntimeError when nothing was answered.

    wrk and h2load send from so many `threads`.
    """
    if payload.protocol is Protocol.GRPC:
        engine = _h2load if shutil.which("h2load") else _own_loop
    else:
        engine = _wrk if shutil.which("wrk") else _own_loop
    load = engine(address, payload, in_flight, seconds, min(threads, in_flight))
    if not load.answered:
        raise RuntimeError(f"{address} answered nothing")
    return load


def _wrk(address: str, payload: Payload, in_flight: int, seconds: int, threads: int) -> Load:
    command = ["wrk", f"-t{threads}", f"-c{in_flight}", f"-d{seconds}s", "--timeout", "30s", "-s", str(_WRK_SCRIPT)]
    with tempfile.NamedTemporaryFile() as body:
        body.write(payload.body)
        body.flush()
        environment = {"BODY": body.name, "HEADERS": "\n".join(f"{k}:{v}" for k, v in payload.headers.items())}
        output = _run([*command, f"http://{address}{payload.path}"], environment)
    result = json.loads(output[output.rindex("\n{") :])
    return Load(
        "wrk",
        result["requests"] - result["bad_status"],
        result["bad_status"] + result["broken"],
        result["us"] / 1e6,
        result["p50_us"] / 1e3,
        result["p99_us"] / 1e3,
    )


def _h2load(address: str, payload: Payload, in_flight: int, seconds: int, threads: int) -> Load:
    connections = max(1, in_flight // _STREAMS_PER_CONNECTION)
    with tempfile.TemporaryDirectory() as folder:
        body, log = Path(folder, "body"), Path(folder, "log")
        body.write_bytes(b"\0" + struct.pack(">I", len(payload.body)) + payload.body)
        command = [
            "h2load",
            f"-t{min(threads, connections)}",
            f"-c{connections}",
            f"-m{in_flight // connections}",
            f"-D{seconds}",
        ]
        command += ["-w24", "-W24", "-d", str(body), f"--log-file={log}"]
        command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        _run([*command, f"http://{address}{payload.path}"], {})
        # One line a request: microsecond of its start, HTTP status, microseconds to its answer. A gRPC status stands in
        # the trailers, which h2load does not read: `measurement` looks at the server's own counters.
        rows = np.loadtxt(log, dtype=np.int64, ndmin=2, usecols=(0, 1, 2))
    start_us, status, taken_us = rows.T
    good = taken_us[status == 200]
    lasted_us = (start_us + taken_us).max() - start_us.min()
    return _summary("h2load", good / 1e3, len(rows) - len(good), lasted_us / 1e6)


def _own_loop(address: str, payload: Payload, in_flight: int, seconds: int, _threads: int) -> Load:
    window = loops.run(address, payload, in_flight, seconds)
    p50_ms, p99_ms = (window.latency.quantile_s(share) * 1e3 for share in (0.5, 0.99))
    return Load("own", window.succeeded, window.failed, window.seconds, p50_ms, p99_ms)


def _summary(engine: str, latencies_ms: np.ndarray, refused: int, seconds: float) -> Load:
    p50, p99 = np.percentile(latencies_ms, [50, 99]) if len(latencies_ms) else (0.0, 0.0)
    return Load(engine, len(latencies_ms), refused, float(seconds), float(p50), float(p99))


def _run(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stdout[-300:]}{done.stderr[-300:]}")
    return done.stdout

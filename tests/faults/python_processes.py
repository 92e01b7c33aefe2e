"""Killed and hanging processes of Python models, under load through `weir serve`.

Every request is accounted for. Clients call two models with several instances over HTTP and gRPC; the instances in turn are
killed (kill -9) or suspended (SIGSTOP).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc
import tritonclient.http

import weir
from tests.support.models.processes import model_processes
from weir.bus.naming.identity import SHARED_MEMORY_DIRECTORY

MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pid = np.array([[os.getpid()]], np.int64)
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() * 3),
                    pb_utils.Tensor("PID", pid),
                ]
            )
            for request in requests
        ]
"""

CONFIG = """
name: "m"
backend: "python"
max_batch_size: 8
input { name: "IN" data_type: TYPE_INT64 dims: [%(elements)d] }
output { name: "OUT" data_type: TYPE_INT64 dims: [%(elements)d] }
output { name: "PID" data_type: TYPE_INT64 dims: [1] }
dynamic_batching { }
instance_group { count: %(instances)d kind: KIND_CPU }
parameters { key: "weir_execution_timeout_ms" value { string_value: "%(timeout_ms)d" } }
"""


def segments_of(processes: list[psutil.Process]) -> set[str]:
    """The names of the payload segments that these have mapped."""
    names: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            names |= {
                Path(line.split()[5]).name for line in maps.splitlines() if f"{SHARED_MEMORY_DIRECTORY}/weir-" in line
            }
    return names


class Clients:
    """Threads that ask until they are told to stop, and what came of it."""

    def __init__(self, server: weir.Server, threads: int, elements: int) -> None:
        self._elements = elements
        self.answered: list[tuple[float, float, int]] = []  # (sent, answered, process)
        self.errors: list[str] = []
        self.wrong = 0
        self.sent = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._server = server
        asks = [self._over_http, self._over_grpc]
        self._threads = [threading.Thread(target=asks[number % 2], daemon=True) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> int:
        """Wait for the last responses; returns the number of missing ones."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        return self.sent - len(self.answered) - len(self.errors) - self.wrong

    def first_answer_after(self, moment: float, *other_than: int) -> float | None:
        """The time at which a process other than these answered a request sent after `moment`."""
        with self._lock:
            recent = self.answered[-2000:]
        return min(
            (answered for sent, answered, pid in recent if sent > moment and pid not in other_than), default=None
        )

    def _over_http(self) -> None:
        with tritonclient.http.InferenceServerClient(self._server.http_address, network_timeout=120) as client:
            self._ask(client, tritonclient.http)

    def _over_grpc(self) -> None:
        with tritonclient.grpc.InferenceServerClient(self._server.grpc_url) as client:
            self._ask(client, tritonclient.grpc)

    def _ask(self, client: object, library: object) -> None:
        while not self._stop.is_set():
            with self._lock:
                self.sent += 1
                number = self.sent
            given = np.arange(number, number + self._elements, dtype=np.int64)[None]
            tensor = library.InferInput("IN", given.shape, "INT64")  # type: ignore[attr-defined]
            tensor.set_data_from_numpy(given)
            began = time.monotonic()
            try:
                answer = client.infer("m", [tensor])  # type: ignore[attr-defined]
                is_right = np.array_equal(answer.as_numpy("OUT"), given * 3)
                pid = answer.as_numpy("PID").item()
            except Exception as error:
                with self._lock:
                    self.errors.append(f"{type(error).__name__}: {error}")
                continue
            with self._lock:
                if is_right:
                    self.answered.append((began, time.monotonic(), pid))
                else:
                    self.wrong += 1
            time.sleep(0.005)


def hurt_in_turn(clients: Clients, worker: psutil.Process, number: signal.Signals, faults: int, pause_s: float) -> None:
    """Run `count` faults and print a line of figures."""
    recoveries: list[float] = []
    replaced: list[float] = []
    begun = len(clients.answered)
    hurt: list[int] = []
    for _ in range(faults):
        alive = sorted(model_processes(worker.pid), key=lambda child: child.create_time())
        if not alive:
            time.sleep(0.05)
            continue
        victim = alive[0].pid  # who has lived for longest
        known = {child.pid for child in alive}
        moment = time.monotonic()
        os.kill(victim, number)
        hurt.append(victim)
        while (answered := clients.first_answer_after(moment, victim)) is None:
            time.sleep(0.001)
        recoveries.append(answered - moment)
        while (answered := clients.first_answer_after(moment, *known)) is None:
            time.sleep(0.001)
        replaced.append(answered - moment)
        time.sleep(pause_s)
    requests = len(clients.answered) - begun
    latencies = sorted(answered - sent for sent, answered, _ in clients.answered[begun:])
    print(
        f"{number.name}: {len(hurt)} faults, {requests} requests answered meanwhile; "
        f"another process answers after p50 {statistics.median(recoveries) * 1000:.0f} ms, "
        f"max {max(recoveries) * 1000:.0f} ms; a new one after p50 {statistics.median(replaced) * 1000:.0f} ms, "
        f"max {max(replaced) * 1000:.0f} ms; latency p50 {latencies[len(latencies) // 2] * 1000:.0f} ms, "
        f"p99 {latencies[len(latencies) * 99 // 100] * 1000:.0f} ms, max {latencies[-1] * 1000:.0f} ms",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="of each kind")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--elements", type=int, default=16, help="of the tensor, 8 bytes each")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--timeout-ms", type=int, default=500, help="the model's execution time-out")
    parser.add_argument("--pause-s", type=float, default=0.3, help="between two faults")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "m" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        (version.parent / "config.pbtxt").write_text(CONFIG % vars(options))
        with weir.Server(folder) as server:
            clients = Clients(server, options.threads, options.elements)
            time.sleep(1)
            (worker,) = (
                p for p in psutil.Process().children(recursive=True) if "worker" in " ".join(p.cmdline()).split()[1:5]
            )
            before = worker.num_fds(), worker.num_threads()
            for number in (signal.SIGKILL, signal.SIGSTOP):
                hurt_in_turn(clients, worker, number, options.faults, options.pause_s)
            lost = clients.stop()
            time.sleep(1)
            after = worker.num_fds(), worker.num_threads()
            kinds = sorted(set(clients.errors))[:3]
            print(
                f"{clients.sent} requests: lost {lost}, wrong {clients.wrong}, errors {len(clients.errors)} {kinds}; "
                f"descriptors of the worker {before[0]} -> {after[0]}, threads {before[1]} -> {after[1]}"
            )
            segments = segments_of([psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)])
        left = [name for name in segments if (SHARED_MEMORY_DIRECTORY / name).exists()]
        print(f"left in shared memory: {len(left)} of {len(segments)} segments")
    return 1 if lost or clients.wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())

"""`Measurement`: one window of load on one server, and its cost; and the check of the server's responses.

The check sends many different requests at once and compares with ONNX Runtime: a server that mixes up the responses of
a batch is fast, and so is one that answers with errors.
"""

from __future__ import annotations

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from benchmarks.compare.load import apply_load
from benchmarks.compare.networks import Network
from benchmarks.compare.payload import Payload
from benchmarks.compare.servers import Server, machine_busy_s
from benchmarks.compare.targets import Protocol, Workload

ONNXRUNTIME_BATCH = 8


@dataclass(frozen=True)
class Measurement:
    """CPU is user and system time of all processes of the server, per answered request."""

    server: str
    workload: str
    round: int
    engine: str
    answered: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    cpu_us_by_role: dict[str, float] = field(default_factory=dict)
    batch_size: float = 0.0
    other_cores: float = 0.0  # what neither the server nor the load generator used: somebody else on this machine


def measure(
    server: Server, network: Network, workload: Workload, round_number: int, seconds: int, threads: int = 1
) -> Measurement:
    """One window. Raises SystemExit when the server's own count of answers is not the client's, or a process has ended.

    What is still in flight when the client stops has been paid for as well: the server's time is read once it is at
    rest, and divided by the server's own count.
    """
    payload = Payload.of(workload.protocol, network, network.sample(0))
    processes = server.processes()
    counted = server.counters(network.name)
    began, cpu, load_cpu, busy = time.perf_counter(), processes.cpu_s_by_role(), _own_cpu_s(), machine_busy_s()
    load = apply_load(server.address(workload.protocol), payload, workload.in_flight, seconds, threads)
    load_cpu = _own_cpu_s() - load_cpu
    processes.wait_until_quiet()
    by_role = processes.cpu_s_by_role()
    by_role.subtract(cpu)
    others = (machine_busy_s() - busy - load_cpu - by_role.total()) / (time.perf_counter() - began)
    counted = server.counters(network.name) - counted
    # gRPC's status stands in trailers that the load generator does not read, so that its word alone is not enough.
    if load.refused or not load.answered <= counted.answered <= load.answered + workload.in_flight:
        raise SystemExit(
            f"{server.name}, {workload}: {load.answered} answers, {load.refused} refused; the server itself counts "
            f"{counted.answered:.0f} successes"
        )
    cpu_us_by_role = {role: cpu_s * 1e6 / counted.answered for role, cpu_s in by_role.items()}
    return Measurement(
        server=server.name,
        workload=str(workload),
        round=round_number,
        engine=load.engine,
        answered=load.answered,
        requests_per_s=load.answered / load.seconds,
        p50_ms=load.p50_ms,
        p99_ms=load.p99_ms,
        cpu_ms=sum(cpu_us_by_role.values()) / 1e3,
        cpu_us_by_role=cpu_us_by_role,
        batch_size=counted.inferences / max(counted.executions, 1),
        other_cores=max(0.0, others),
    )


def measure_onnxruntime(network: Network, workload: Workload, round_number: int, seconds: float) -> Measurement:
    """ONNX Runtime in a bare loop: a batch of as many single requests as are in flight, joined, run and split again."""
    inputs = [network.sample(seed) for seed in range(min(workload.in_flight, ONNXRUNTIME_BATCH))]
    network.run(np.concatenate(inputs))
    latencies = []
    began, cpu, busy = time.perf_counter(), time.process_time(), machine_busy_s()
    while (started := time.perf_counter()) < began + seconds:
        outputs = network.run(np.concatenate(inputs))
        _ = [outputs[i : i + 1] for i in range(len(inputs))]
        latencies.append(time.perf_counter() - started)
    others = machine_busy_s() - busy
    cpu, lasted, items = time.process_time() - cpu, time.perf_counter() - began, len(latencies) * len(inputs)
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    return Measurement(
        server="onnxruntime",
        workload=str(workload),
        round=round_number,
        engine="",
        answered=items,
        requests_per_s=items / lasted,
        p50_ms=float(p50),
        p99_ms=float(p99),
        cpu_ms=cpu * 1e3 / items,
        batch_size=len(inputs),
        other_cores=max(0.0, (others - cpu) / lasted),
    )


def _own_cpu_s() -> float:
    """Seconds of CPU of the load generator, which is this process or a child of it that has ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


_AT_ONCE = 32


def check_answers(server: Server, network: Network, protocol: Protocol) -> None:
    """Raises SystemExit when an answer is missing or wrong."""
    inputs = [network.sample(seed) for seed in range(16 if network.name == "cnn" else 64)]
    payloads = [Payload.of(protocol, network, x) for x in inputs]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            answers = list(pool.map(lambda payload: payload.ask(server.address(protocol)), payloads))
        except Exception as error:  # whatever a client library raises
            raise SystemExit(f"{server.name} does not answer {network.name} over {protocol}: {error}") from error
    expected = [network.run(x) for x in inputs]
    wrong = sum(not np.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in zip(answers, expected, strict=True))
    if wrong:
        raise SystemExit(f"{server.name} answers {wrong} of {len(inputs)} requests of {network.name} wrongly")

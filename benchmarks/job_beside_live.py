"""Cost of an offline job for the live requests of its model, simulated: `python -m benchmarks.job_beside_live`.

For several kinds of models, numbers of instances and loads, the simulation runs the same live traffic without and with
a job that always has requests waiting, against the scheduler's own policies. It prints the latency of live requests,
the items per second of the job, and the share of its items that fill batches of live requests. The last column is the
job alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.simulation.cluster import simulate
from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.scenario import DEFAULT, Scenario

BATCH = 32
MODELS = {
    "rows are free: 5 ms": Scenario(service_us=5000, service_row_us=0, max_batch_size=BATCH),
    "5 ms + 50 us a row": Scenario(service_us=5000, service_row_us=50, max_batch_size=BATCH),
    "1 ms + 250 us a row": Scenario(service_us=1000, service_row_us=250, max_batch_size=BATCH),
    "1 ms a row": Scenario(service_us=0, service_row_us=1000, max_batch_size=BATCH),
    "5 ms, no batches": Scenario(service_us=5000, service_row_us=0, policy=DEFAULT, max_batch_size=0),
}
# Real executions differ by some per cent; exponential times would hide what is looked for.
_COMMON = {"service": "lognormal", "service_sigma": 0.15, "hop_us": 100}


def scenarios(requests: int, instances: Sequence[int], loads: Sequence[float]) -> list[tuple[str, Scenario]]:
    """What is simulated, without the job, and what it is called."""
    found = []
    for name, model in MODELS.items():
        for count in instances:
            for load in loads:
                # As a share of what it could carry if each request ran alone, which is how light traffic runs.
                rate = load * count * 1e6 / (model.service_us + model.service_row_us)
                found.append(
                    (name, replace(model, **_COMMON, instances=count, load=load, rate=rate, requests=requests))
                )
    return found


def line(name: str, scenario: Scenario, window: int, arrivals: str) -> str:
    """One row of the table."""
    scenario = replace(scenario, arrivals=arrivals)
    without, beside = simulate(scenario), simulate(replace(scenario, job_window=window))
    p50_us, p99_us = _p50_p99(without)
    beside_p50_us, beside_p99_us = _p50_p99(beside)
    return (
        f"{name:22}{scenario.instances:>4}{scenario.load:>6.0%}  {p50_us / 1000:8.2f}{beside_p50_us / 1000:8.2f}"
        f"{beside_p50_us / p50_us - 1:>+7.1%}  {p99_us / 1000:8.2f}{beside_p99_us / 1000:8.2f}"
        f"{beside_p99_us / p99_us - 1:>+7.1%}"
        f"{beside.job_items / beside.end_us * 1e6:10,.0f}{beside.job_riders / max(1, beside.job_items):8.0%}"
        f"{beside.utilisation:8.0%}"
    )


def _p50_p99(outcome: Outcome) -> tuple[float, float]:
    p50_us, _, p99_us, _, _ = outcome.percentiles_us(outcome.latencies_us)
    return p50_us, p99_us


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.job_beside_live")
    parser.add_argument("--requests", type=int, default=20_000, help="live requests of each run (default: %(default)s)")
    parser.add_argument("--instances", default="1,2,4", help="default: %(default)s")
    parser.add_argument("--loads", default="0.05,0.3,0.7", help="default: %(default)s")
    parser.add_argument("--window", type=int, default=128, help="items of the job in flight (default: %(default)s)")
    parser.add_argument("--arrivals", default="poisson", help="poisson, constant or bursty (default: %(default)s)")
    parser.add_argument("--models", default="", help="only those with this in their name")
    given = parser.parse_args(arguments)
    print(f"{'model':22}{'inst':>4}{'load':>6}  {'p50 ms':>8}{'w. job':>8}{'':7}  {'p99 ms':>8}{'w. job':>8}{'':7}"
          f"{'items/s':>10}{'riding':>8}{'busy':>8}")  # fmt: skip
    instances, loads = [int(n) for n in given.instances.split(",")], [float(n) for n in given.loads.split(",")]
    for name, scenario in scenarios(given.requests, instances, loads):
        if given.models in name:
            print(line(name, scenario, given.window, given.arrivals), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

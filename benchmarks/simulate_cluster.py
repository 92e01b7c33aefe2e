"""A large cluster on a virtual clock: `python -m benchmarks.simulate_cluster` reports latency and losses.

A thousand workers, a hundred schedulers and hundreds of models with a Zipf distribution. Arrivals are Poisson with a
daily cycle and bursts per model; schedulers and workers join and die. The policies are those of `weir scheduler`. An
equal seed gives an equal outcome.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields

import numpy as np

from benchmarks.cluster.clients import table
from benchmarks.simulation.fleet import FleetRun, Happening
from benchmarks.simulation.owners import TICK_US
from benchmarks.simulation.traffic import FleetScenario, fleet_of

_HAPPENINGS = (
    (0.2, "scheduler lost"),
    (0.35, "scheduler added"),
    (0.5, "worker lost"),
    (0.65, "worker added"),
    (0.8, "scheduler lost"),
)
_AFTER_US = 1_000_000


def simulate(scenario: FleetScenario) -> str:
    """Plays it; the report."""
    began_s = time.perf_counter()
    fleet = fleet_of(scenario)
    # At any moment between two looks of the schedulers.
    dice = np.random.default_rng([scenario.seed, 3])
    moments = [share * scenario.seconds * 1e6 + dice.integers(TICK_US) for share, _ in _HAPPENINGS]
    happenings = [Happening(kind, int(at_us)) for at_us, (_, kind) in zip(moments, _HAPPENINGS, strict=True)]
    run = FleetRun(scenario, fleet, happenings)
    drawn_s = time.perf_counter()
    run.run()
    took_s = time.perf_counter() - drawn_s
    came = np.array(fleet.times_us)
    answered = run.begun_us >= 0
    waits_ms = (run.begun_us - came)[answered] / 1000
    seconds = int(scenario.seconds)
    busy = run.busy_us[:seconds] / 1e6 / scenario.workers
    p50, p99, p999 = (np.percentile(waits_ms, share) for share in (50, 99, 99.9))
    lines = [
        f"{scenario.workers} workers, {scenario.schedulers} schedulers, {scenario.models} models, {len(came):,} requests "
        f"in {scenario.seconds:g} s ({len(came) / scenario.seconds:,.0f}/s), seed {scenario.seed}",
        f"utilisation {busy.mean():.1%}, of the busiest second {busy.max():.1%}; "
        f"{len(came) / run.batches:.2f} requests a batch",
        f"wait for execution: p50 {p50:.2f} ms, p99 {p99:.1f} ms, p99.9 {p999:.1f} ms, longest {waits_ms.max():.0f} ms",
        f"failed {run.failed}, unanswered {int((run.ended_us < 0).sum())}",
        "",
        _events(run, came, happenings),
        "",
        f"simulated {run.events:,} events in {took_s:.1f} s ({run.events / took_s:,.0f}/s), "
        f"drawn in {drawn_s - began_s:.1f} s",
    ]
    return "\n".join(lines)


def _events(run: FleetRun, came: np.ndarray, happenings: list[Happening]) -> str:
    rows = []
    for happening, figures in zip(happenings, run.figures, strict=True):
        p99 = []
        for begin_us in (happening.at_us - _AFTER_US, happening.at_us):
            chosen = (came >= begin_us) & (came < begin_us + _AFTER_US) & (run.begun_us >= 0)
            waits_ms = (run.begun_us - came)[chosen] / 1000
            p99.append(f"{np.percentile(waits_ms, 99):.1f}" if len(waits_ms) else "-")
        reply = (figures["moved"], figures["longest stall ms"], figures["run again"])
        rows.append((happening.kind, f"{happening.at_us / 1e6:.1f}", *reply, *p99))
    head = ("event", "at s", "queues moved", "longest stall ms", "run again", "p99 ms before", "p99 ms after")
    return table(head, rows)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate_cluster", description=(__doc__ or "").partition("\n")[0]
    )
    for one in fields(FleetScenario):
        kind = type(one.default)
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=kind, default=one.default, help="%(default)s")
    print(simulate(FleetScenario(**vars(parser.parse_args(arguments)))))


if __name__ == "__main__":
    main(sys.argv[1:])

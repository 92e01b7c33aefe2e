"""The scheduler's own policies on a virtual clock: `python -m benchmarks.simulate` reports latency and utilisation.

With `--sweep NAME=V1,V2,…` each of these settings is simulated under each of `--loads`, and latency is plotted against
throughput in `--plot`. Several sweeps form every combination. Equal options and an equal seed give an equal outcome.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path

from benchmarks.simulation.cluster import simulate
from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.plot import Curve, Point, latency_over_throughput
from benchmarks.simulation.scenario import Scenario, add_options

LOADS = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,0.95"


def settings_of(scenario: Scenario, sweeps: Sequence[str]) -> Iterator[tuple[str, Scenario]]:
    """Each combination of the values of the sweeps, with its name. Raises ValueError for what is no sweep."""
    axes = []
    for sweep in sweeps:
        name, _, values = sweep.partition("=")
        if not values:
            raise ValueError(f"not a sweep: {sweep}")
        axes.append([(name, value) for value in values.split(",")])
    for chosen in product(*axes):
        changed = scenario
        for name, value in chosen:
            changed = changed.changed(name, value)
        yield ", ".join(f"{name} {value or 'none'}" for name, value in chosen), changed


def swept(scenario: Scenario, sweeps: Sequence[str], loads: Sequence[str]) -> Iterator[tuple[str, Curve]]:
    """For each setting its report, and its curve, which is called by the values."""
    for name, setting in settings_of(scenario, sweeps):
        points, lines = [], [name]
        for load in loads:
            outcome = simulate(setting.changed("load", load))
            p50_us, _, p99_us, _, _ = outcome.percentiles_us(outcome.latencies_us)
            points.append(Point(outcome.throughput, p50_us / 1000, p99_us / 1000))
            lines.append(_line(load, outcome, points[-1]))
        # The title names what is swept, so the legend need not.
        values = ", ".join(part.rpartition(" ")[2] for part in name.split(", "))
        yield "\n".join(lines), Curve(values, points)


def _line(load: str, outcome: Outcome, point: Point) -> str:
    return (
        f"  load {load:>5}: {point.throughput:10,.0f}/s  p50 {point.p50_ms:9.3f} ms  p99 {point.p99_ms:9.3f} ms  "
        f"batches of {outcome.mean_batch_requests:5.1f}  utilisation {outcome.utilisation:6.1%}  "
        f"failed {sum(outcome.failures.values()):,}"
    )


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate", description=(__doc__ or "").partition("\n")[0]
    )
    add_options(parser)
    parser.add_argument("--sweep", action="append", default=[], help="NAME=V1,V2,…: simulate each of these settings")
    parser.add_argument("--loads", default=LOADS, help="the loads of each setting of a sweep (default: %(default)s)")
    parser.add_argument(
        "--plot", type=Path, default=Path("simulation.svg"), help="picture of a sweep (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    scenario = Scenario(**{one.name: getattr(given, one.name) for one in fields(Scenario)})
    began = time.perf_counter()
    try:
        if not given.sweep:
            outcome = simulate(scenario)
            print(*outcome.report(), sep="\n")
        else:
            curves = []
            for report, curve in swept(scenario, given.sweep, given.loads.split(",")):
                print(report)
                curves.append(curve)
            title = f"{scenario.policy}, by {', '.join(sweep.partition('=')[0] for sweep in given.sweep)}"
            given.plot.write_text(latency_over_throughput(title, _subtitle(scenario), curves))
            print(f"drawn in {given.plot}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"simulated in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return 0


def _subtitle(scenario: Scenario) -> str:
    count = scenario.workers * scenario.instances
    takes = f"{scenario.service_us:g} us + {scenario.service_row_us:g} us a row ({scenario.service})"
    return (
        f"{count} instance{'s' * (count > 1)}, batches of up to {scenario.max_batch_size} that take {takes}, "
        f"{scenario.arrivals} arrivals"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

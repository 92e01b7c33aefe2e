"""Cluster benchmarks: simulations are repeatable, and figures are computed correctly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.cluster.clients import quantile, table
from benchmarks.simulate_cluster import simulate
from benchmarks.simulation.fleet import FleetRun, Happening
from benchmarks.simulation.owners import TICK_US, EvenSpread
from benchmarks.simulation.traffic import FleetScenario, fleet_of
from benchmarks.soak import slope_of

SMALL = FleetScenario(workers=20, schedulers=4, models=8, seconds=2.0, owners="even")
KINDS = ("scheduler lost", "scheduler added", "worker lost", "worker added")


def test_an_equal_seed_gives_an_equal_outcome() -> None:
    reports = [simulate(replace(SMALL, seed=seed)).partition("simulated")[0] for seed in (1, 1, 2)]
    assert reports[0] == reports[1] != reports[2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_has_one_end_whatever_happens(kind: str) -> None:
    fleet = fleet_of(replace(SMALL, load=0.9))
    run = FleetRun(SMALL, fleet, [Happening(kind, 1_000_000 + 1000)])
    run.run()
    assert (run.ended_us >= np.array(fleet.times_us)).all()
    assert run.failed == 0
    moved = run.figures[0]["moved"]
    # A dead one's queues all move; with the new one there are five, so one comes from each of at most two.
    assert {"scheduler lost": moved == 2, "scheduler added": moved == 1}.get(kind, moved == 0)
    if kind == "scheduler lost":
        assert 0 < run.figures[0]["longest stall ms"] <= TICK_US / 1000


def test_models_lie_on_as_many_workers_as_their_work_needs() -> None:
    fleet = fleet_of(SMALL)
    counts = [len(workers) for workers in fleet.workers_of]
    assert min(counts) >= 2
    assert all(len(set(workers)) == len(workers) for workers in fleet.workers_of)


def test_an_even_spread_stays_even() -> None:
    owners = EvenSpread([f"q{number}" for number in range(10)], ["a", "b", "c"])
    owners.lost(0, "b")
    assert {move.is_orderly for move in owners.tick(0)} == {False}
    owners.joined(1, "d")
    assert {(move.owner, move.is_orderly) for move in owners.tick(1)} == {("d", True)}
    held = sorted(list(owners.owner_of.values()).count(scheduler) for scheduler in "acd")
    assert held == [3, 3, 4]
    assert owners.tick(2) == []


def test_slopes_know_noise_from_growth() -> None:
    x = np.arange(60) / 360
    noise = np.random.default_rng(1).normal(0, 1, 60)
    slope, error = slope_of(np.stack([x, 100 + 50 * x + noise], axis=1))
    assert abs(slope - 50) < 3 * error
    assert slope > 3 * error
    flat, flat_error = slope_of(np.stack([x, 100 + noise], axis=1))
    assert abs(flat) < 3 * flat_error
    # What goes up and down slowly has few independent samples.
    _, slow_error = slope_of(np.stack([x, 100 + np.cumsum(noise)], axis=1))
    assert slow_error > 3 * flat_error


def test_tables_and_quantiles() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.5, 0.99)] == [2.0, 4.0]
    assert quantile([], 0.5) == 0.0
    assert table(("a", "b"), [("x", 1), ("long", 22)]).splitlines() == ["a      b", "x      1", "long  22"]

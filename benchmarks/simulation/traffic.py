"""Arrivals for a fleet and the placement of its models: Zipf popularity, a daily cycle, and bursts per model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_STEP_S = 0.02


@dataclass(frozen=True, kw_only=True)
class FleetScenario:
    """What is simulated. A worker has one device, which its models share."""

    workers: int = 1000
    schedulers: int = 100
    models: int = 300
    models_per_worker: int = 3
    seconds: float = 30.0
    load: float = 0.6
    zipf: float = 0.9
    service_ms: float = 40.0
    row_ms: float = 5.0
    max_batch: int = 8
    sigma: float = 0.2
    hop_us: int = 300
    day: float = 0.3
    burst: float = 2.0
    burst_s: float = 1.0
    quiet_s: float = 4.0
    owners: str = "auto"
    seed: int = 1


@dataclass(frozen=True)
class Fleet:
    """The workers of each model, most popular first, mean service by model (us), and what comes: times (us) and models."""

    workers_of: list[list[int]]
    service_us: list[float]
    times_us: list[int]
    models: list[int]


def fleet_of(scenario: FleetScenario) -> Fleet:
    """Drawn by the seed. Models lie on as many workers as their work needs, at least on two."""
    dice = np.random.default_rng(scenario.seed)
    shares = 1.0 / np.arange(1, scenario.models + 1) ** scenario.zipf
    shares /= shares.sum()
    service_us = scenario.service_ms * 1000 * dice.lognormal(-0.125, 0.5, scenario.models)
    # The load is a share of what the devices carry one by one: batches are cheaper.
    each_us = service_us + scenario.row_ms * 1000
    rate = scenario.load * scenario.workers * 1e6 / float((shares * each_us).sum())
    work = shares * each_us / (shares * each_us).sum()
    places = scenario.workers * scenario.models_per_worker
    wanted = np.minimum(scenario.workers, np.maximum(2, np.round(work * places))).astype(int)
    return Fleet(_placed(scenario, wanted, work, dice), service_us.tolist(), *_arrivals(scenario, shares * rate, dice))


def _placed(
    scenario: FleetScenario, wanted: np.ndarray, work: np.ndarray, dice: np.random.Generator
) -> list[list[int]]:
    """Each model goes where least work is expected by now, the one with most for each of its places first."""
    expected = np.zeros(scenario.workers)
    workers_of: list[list[int]] = [[] for _ in wanted]
    for model in np.argsort(-work / wanted, kind="stable"):
        noise = dice.random(scenario.workers) * 1e-9
        chosen = np.argsort(expected + noise, kind="stable")[: wanted[model]]
        expected[chosen] += work[model] / wanted[model]
        workers_of[model] = sorted(int(worker) for worker in chosen)
    return workers_of


def _arrivals(scenario: FleetScenario, rates: np.ndarray, dice: np.random.Generator) -> tuple[list[int], list[int]]:
    steps = int(scenario.seconds / _STEP_S)
    # The simulation is one day long: it begins in the morning, and the middle is the peak.
    day = 1 - scenario.day * np.cos(2 * np.pi * np.arange(steps) / steps)
    times, models = [], []
    for model, rate in enumerate(rates):
        counts = dice.poisson(rate * _STEP_S * day * _bursts(scenario, steps, dice))
        starts = np.repeat(np.arange(steps), counts)
        times.append((starts + dice.random(len(starts))) * _STEP_S * 1e6)
        models.append(np.full(len(starts), model))
    came = np.concatenate(times).astype(np.int64)
    order = np.argsort(came, kind="stable")
    return came[order].tolist(), np.concatenate(models)[order].tolist()


def _bursts(scenario: FleetScenario, steps: int, dice: np.random.Generator) -> np.ndarray:
    """A factor for each step with mean 1: `burst` times as much in bursts as between them."""
    on, off = scenario.burst_s, scenario.quiet_s
    factor = np.ones(steps)
    at_s = -float(dice.uniform(0, on + off))
    while at_s < scenario.seconds:
        end_s = at_s + float(dice.exponential(on))
        factor[max(0, int(at_s / _STEP_S)) : max(0, int(end_s / _STEP_S))] = scenario.burst
        at_s = end_s + float(dice.exponential(off))
    return factor * (on + off) / (scenario.burst * on + off)

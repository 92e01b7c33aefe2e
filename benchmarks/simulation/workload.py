"""`Workload`: arrivals from distributions, or from a file of times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.simulation.scenario import SEQUENCES, Scenario, mix
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START

_CHUNK = 65_536


@dataclass(slots=True)
class Workload:
    """Requests in the order they come: for each its time, the number of its model, and fields of its `RequestEnvelope`."""

    times_us: list[int]
    models: list[int]
    rows: list[int]
    priorities: list[int]
    timeouts_us: list[int]
    deadlines_us: list[int]
    correlation_ids: list[Any]
    flags: list[int]

    def __len__(self) -> int:
        return len(self.times_us)


def workload_of(scenario: Scenario) -> Workload:
    """What comes in this scenario. Raises OSError or ValueError for a trace that can't be read."""
    dice = np.random.default_rng(scenario.seed)
    if scenario.trace:
        times = np.sort(np.loadtxt(scenario.trace, dtype=np.float64, ndmin=1)).astype(np.int64)
    elif scenario.policy in SEQUENCES:
        return _sequences(scenario, dice)
    else:
        times = _arrivals(scenario, scenario.requests, scenario.requests_per_s(), dice)
    nothing = [0] * len(times)
    return _described(scenario, times, _models(scenario, len(times), dice), dice, nothing, nothing)


def service_factors(scenario: Scenario) -> Iterator[float]:
    """Random factors with mean 1, by which execution times differ from their means."""
    dice = np.random.default_rng([scenario.seed, 1])
    sigma = scenario.service_sigma
    while True:
        if scenario.service == "constant":
            chunk = np.ones(_CHUNK)
        elif scenario.service == "exponential":
            chunk = dice.exponential(1.0, _CHUNK)
        else:
            chunk = dice.lognormal(-sigma * sigma / 2, sigma, _CHUNK)
        yield from chunk.tolist()


def _arrivals(scenario: Scenario, count: int, rate: float, dice: np.random.Generator) -> np.ndarray:
    mean_us = 1e6 / rate
    if scenario.arrivals == "constant":
        return (np.arange(1, count + 1) * mean_us).astype(np.int64)
    if scenario.arrivals == "poisson":
        return np.cumsum(dice.exponential(mean_us, count)).astype(np.int64)
    on_us, off_us = scenario.burst_on_s * 1e6, scenario.burst_off_s * 1e6
    # Time runs only during bursts, and as much faster; then the silences are put in between.
    busy = np.cumsum(dice.exponential(mean_us * on_us / (on_us + off_us), count))
    bursts = int(busy[-1] / on_us * 1.5) + 100
    ends = np.cumsum(dice.exponential(on_us, bursts))
    silences = np.concatenate(([0.0], np.cumsum(dice.exponential(off_us, bursts))))
    return (busy + silences[np.searchsorted(ends, busy)]).astype(np.int64)


def _models(scenario: Scenario, count: int, dice: np.random.Generator) -> np.ndarray:
    if scenario.models == 1:
        return np.zeros(count, np.int64)
    return dice.choice(scenario.models, count, p=scenario.shares())


def _sequences(scenario: Scenario, dice: np.random.Generator) -> Workload:
    length = scenario.sequence_length
    sequences = max(1, scenario.requests // length)
    starts = _arrivals(scenario, sequences, scenario.requests_per_s() / length, dice)
    times = (starts[:, None] + np.arange(length) * scenario.sequence_interval).ravel()
    flags = np.zeros((sequences, length), np.int64)
    flags[:, 0] |= SEQUENCE_START
    flags[:, -1] |= SEQUENCE_END
    order = np.argsort(times, kind="stable")
    ids = np.repeat(np.arange(1, sequences + 1), length)[order]
    models = np.repeat(_models(scenario, sequences, dice), length)[order]
    return _described(scenario, times[order], models, dice, ids.tolist(), flags.ravel()[order].tolist())


def _described(
    scenario: Scenario, times: np.ndarray, models: np.ndarray, dice: np.random.Generator, ids: list, flags: list
) -> Workload:
    mixed = [
        _mixed(text, len(times), dice)
        for text in (scenario.rows, scenario.priorities, scenario.timeouts, scenario.deadlines)
    ]
    return Workload(times.tolist(), models.tolist(), *mixed, ids, flags)


def _mixed(text: str, count: int, dice: np.random.Generator) -> list[int]:
    values, shares = zip(*mix(text), strict=True)
    numbers = [int(float(value)) for value in values]
    return [numbers[0]] * count if len(numbers) == 1 else dice.choice(numbers, count, p=shares).tolist()

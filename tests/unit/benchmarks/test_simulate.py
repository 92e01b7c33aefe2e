"""Simulations keep the invariants of queues, agree with the formulas of queueing theory, and are repeatable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.simulate import main
from benchmarks.simulation.cluster import simulate
from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.plot import Curve, Point, latency_over_throughput
from benchmarks.simulation.scenario import DEFAULT, DIRECT, DYNAMIC, OLDEST, Scenario, mix
from benchmarks.simulation.workload import workload_of

MEAN_US = 20_000.0  # slow enough for requests to come one by one, not in series
ONE_SERVER = {"policy": DEFAULT, "requests": 40_000, "service_us": MEAN_US, "service_row_us": 0.0, "max_queue_size": 0}

CASES: dict[str, dict[str, Any]] = {
    "losses": {
        "policy": DYNAMIC,
        "workers": 3,
        "instances": 2,
        "lose_worker_every_s": 0.05,
        "worker_back_after_s": 0.02,
    },
    "all lost": {"policy": DEFAULT, "workers": 1, "lose_worker_every_s": 0.5, "worker_back_after_s": 0.1, "load": 0.5},
    "overload": {"policy": DYNAMIC, "load": 3.0, "max_queue_size": 50, "max_queue_delay_microseconds": 500},
    "many models": {
        "policy": DYNAMIC,
        "models": 12,
        "preferred_batch_size": "4+8",
        "max_queue_delay_microseconds": 900,
    },
    "priorities": {"policy": DYNAMIC, "priority_levels": 2, "priorities": "1=0.2,2=0.8", "load": 0.9},
    "shared device": {"policy": DYNAMIC, "models": 5, "shared_devices": 1, "load": 0.5, "hop_us": 150},
    "bursts": {"policy": DYNAMIC, "arrivals": "bursty", "rows": "1=0.9,4=0.1", "service": "lognormal"},
    "direct": {"policy": DIRECT, "load": 0.2, "instances": 2},
    "oldest": {"policy": OLDEST, "load": 0.2, "max_candidate_sequences": 40, "lose_worker_every_s": 0.3, "workers": 2},
}


def scenario(**values: Any) -> Scenario:
    return Scenario(**{"requests": 4_000, "seed": 11, **values})


def check(outcome: Outcome) -> None:
    """Everything has ended once (`Outcome` refuses a second end), nothing before it came, and Little's law holds."""
    workload, requests = outcome.workload, len(outcome.workload)
    assert all(end >= came for end, came in zip(outcome.ended_us, workload.times_us, strict=True))
    assert outcome.answers + sum(outcome.failures.values()) == requests
    assert 0 < outcome.utilisation <= 1
    there = sum(end - came for end, came in zip(outcome.ended_us, workload.times_us, strict=True))
    assert outcome.in_system_us == there


@pytest.mark.parametrize("name", CASES)
def test_every_request_ends_once(name: str):
    outcome = simulate(scenario(**CASES[name]))
    check(outcome)
    assert list(outcome.report())
    if "lose_worker_every_s" in CASES[name]:
        assert outcome.lost_batches > 0
    if name == "overload":
        assert set(outcome.failures) == {"Exceeds maximum queue size"}
    elif name != "oldest":
        assert not outcome.failures


def test_equal_seeds_give_equal_outcomes():
    first, second, other = (simulate(scenario(**{**CASES["losses"], "seed": seed})) for seed in (1, 1, 2))
    assert first.ended_us == second.ended_us
    assert first.ended_us != other.ended_us


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_one_exponential_server(load: float):
    """M/M/1: a request is there for S / (1 - load) on average, and longer than t with probability exp(-t / that)."""
    outcome = simulate(scenario(**ONE_SERVER, load=load))
    mean_us = MEAN_US / (1 - load)
    assert outcome.latencies_us.mean() == pytest.approx(mean_us, rel=0.05)
    assert outcome.percentiles_us(outcome.latencies_us)[1] == pytest.approx(2.3026 * mean_us, rel=0.05)
    assert outcome.utilisation == pytest.approx(load, rel=0.03)


def test_one_constant_server():
    """M/D/1: half of the wait of M/M/1."""
    outcome = simulate(scenario(**ONE_SERVER, load=0.7, service="constant"))
    assert outcome.waits_us[0].mean() == pytest.approx(MEAN_US * 0.7 / (2 * 0.3), rel=0.05)


def test_constant_arrivals_never_wait_for_a_constant_server():
    outcome = simulate(scenario(**{**ONE_SERVER, "requests": 500}, load=0.9, arrivals="constant", service="constant"))
    assert set(outcome.latencies_us) == {MEAN_US}


def test_bursts_keep_the_rate():
    times = workload_of(scenario(requests=50_000, arrivals="bursty", rate=10_000.0)).times_us
    assert times == sorted(times)
    assert times[-1] / 1e6 == pytest.approx(5.0, rel=0.1)


def test_a_mix():
    assert mix("4") == [("4", 1.0)]
    assert mix("1=3,8=1") == [("1", 0.75), ("8", 0.25)]


def test_a_sweep_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "picture.svg"
    options = ["--requests", "500", "--loads", "0.3,0.8", "--plot", str(picture), "--seed", "3"]
    assert main([*options, "--sweep", "max_queue_delay_microseconds=0,2000", "--sweep", "instances=1,2"]) == 0
    drawn = [element.tag.rpartition("}")[2] for element in ElementTree.parse(picture).iter()]
    assert drawn.count("polyline") == 4 * 2
    assert drawn.count("circle") == 4 * 2 * 2
    assert "max_queue_delay_microseconds 2000, instances 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--sweep", "instances"], "not a sweep: instances"),
        (["--sweep", "colour=1"], "nothing is called colour"),
        (["--sweep", "policy=x"], "policy is one of"),
        (["--trace", "nowhere"], "nowhere"),
    ],
)
def test_what_can_t_be_is_told(options: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--requests", "10", *options]) == 2
    assert told in capsys.readouterr().err


def test_a_curve_of_equal_points_is_drawn():
    assert ElementTree.fromstring(latency_over_throughput("a < b", "", [Curve("c", [Point(10.0, 1.0, 1.0)] * 2)])).tag


def test_arrivals_are_taken_from_a_file(tmp_path: Path):
    times = tmp_path / "times"
    times.write_text("300\n100\n200.5\n")
    assert workload_of(scenario(trace=str(times))).times_us == [100, 200, 300]
    outcome = simulate(scenario(trace=str(times), service="constant", max_batch_size=4))
    check(outcome)
    assert max(outcome.batch_rows) <= 4


def test_a_job_beside_live_traffic_takes_what_is_left():
    live = scenario(requests=3_000, load=0.1, service_us=1_000, service_row_us=0, service="constant", max_batch_size=8)
    alone, beside = simulate(live), simulate(replace(live, job_window=32))
    assert alone.job_items == 0
    assert beside.job_riders > beside.answers, "rows are free, so they ride"
    p99_us = [outcome.percentiles_us(outcome.latencies_us)[2] for outcome in (alone, beside)]
    assert p99_us[1] < 1.1 * p99_us[0]
    assert "items a second" in "\n".join(beside.report())

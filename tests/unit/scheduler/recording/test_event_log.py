"""A replay of a recording, from any of its files, reproduces every decision; failures stop only the recording."""

from __future__ import annotations

import contextlib
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.scheduling.recording import (
    STRATEGIES,
    differences,
    files,
    live_with_sequences,
    numbers,
)
from tests.support.scheduling.requests import LATEST
from tests.support.scheduling.simulation import UNAVAILABLE_TIMEOUT_US, Simulation
from tests.unit.scheduler.test_model_simulation import LIVES, lives
from weir.bus.naming.live_queues import LiveQueue
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.recording.event_log import EventLog


@settings(max_examples=LIVES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.one_of(
        lives([1, 2], [LATEST, LATEST, 1, 2, 7]), lives([1, 2], [LATEST, LATEST, 1, 2, 7], lanes=[0, 0, 1, 2])
    )
)
def test_any_life_is_replayed(tmp_path_factory: pytest.TempPathFactory, events: list[tuple[Any, ...]]):
    folder = tmp_path_factory.mktemp("log")
    log = EventLog(folder, "scheduler", max_file_bytes=3_000, kept_files=1_000)
    simulation = Simulation()
    simulation.model = log.model(LiveQueue("model"), count(1).__next__, unavailable_timeout_us=UNAVAILABLE_TIMEOUT_US)
    with contextlib.suppress(AssertionError):  # test_model_simulation checks what must hold in a run
        simulation.replay(events)
    log.close()
    for path in files(folder):
        assert differences(path) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_run_with_sequences_can_be_replayed_from_each_file(tmp_path: Path, strategy: str, seed: int):
    log = EventLog(tmp_path, "scheduler", max_file_bytes=5_000, kept_files=1_000)
    live_with_sequences(log.model(LiveQueue("model"), count(1).__next__), strategy, seed)
    log.close()
    written = files(tmp_path)
    assert len(written) > 1
    assert [differences(path) for path in written] == [[] for _ in written]
    assert [number for path in written for number in numbers(path)] == list(range(1, numbers(written[-1])[-1] + 1))


def test_recording_changes_nothing(tmp_path: Path):
    plain, log = ModelScheduler("model"), EventLog(tmp_path, "scheduler", max_file_bytes=5_000)
    recorded = log.model(LiveQueue("model"), count(1).__next__)
    for scheduler in (plain, recorded):
        live_with_sequences(scheduler, "oldest", seed=7)
    assert (len(plain), plain.waiting, plain.failures()) == (len(recorded), recorded.waiting, recorded.failures())


def test_the_oldest_files_go(tmp_path: Path):
    log = EventLog(tmp_path, "scheduler", max_file_bytes=2_000, kept_files=3)
    live_with_sequences(log.model(LiveQueue("a.model"), count(1).__next__), "oldest", seed=2)
    live_with_sequences(log.model(LiveQueue("b"), count(1).__next__), "oldest", seed=2)
    log.close()
    assert sorted(path.name.split(".")[0] for path in files(tmp_path)) == ["a=2Emodel"] * 3 + ["b"] * 3
    assert all(path.stat().st_size < 20_000 for path in files(tmp_path))
    assert [differences(path) for path in files(tmp_path)] == [[]] * 6


def test_a_full_disk_stops_only_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    log = EventLog(tmp_path / "log", "scheduler")
    scheduler = log.model(LiveQueue("model"), count(1).__next__)
    (tmp_path / "log").rmdir()
    live_with_sequences(scheduler, "direct", seed=3)
    log.close()
    assert [record.message for record in caplog.records if "recording of its events stopped" in record.message]
    assert len(caplog.records) == 1


def test_an_unsupported_state_stops_only_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    log = EventLog(tmp_path, "scheduler", max_file_bytes=2_000)
    scheduler = log.model(LiveQueue("model"), count(1).__next__)
    scheduler.hook = lambda: None
    live_with_sequences(scheduler, "direct", seed=3)
    assert [record.message for record in caplog.records] == [
        "queue model: recording of its events stopped: a builtins.function can not be stored"
    ]

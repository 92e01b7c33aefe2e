"""What is recorded comes out again when it is replayed, from the first file and from any later one; nothing else does."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_simulation import UNAVAILABLE_TIMEOUT_US, Simulation
from queued import LATEST, CountingFrame, request
from test_model_simulation import LIVES, lives

from bus.live_queues import LiveQueue
from scheduler.event_log import SUFFIX, EventLog, RecordedModelScheduler
from scheduler.event_rows import EVENTS, QUESTIONS, pack_event, unpack_event
from scheduler.model_scheduler import ModelScheduler
from scheduler.queued_request import requests_of
from scheduler.replay import NotAnEventLog, Replay, lines_of, main, read_log
from scheduler.state_snapshot import pack_state, unpack_state
from schemas.messages import BatchOutcome, Part
from schemas.model_config import ModelConfig
from schemas.requests import SEQUENCE_END, SEQUENCE_START

STRATEGIES: dict[str, dict[str, Any]] = {
    "direct": {"direct": {"max_queue_delay_microseconds": 50, "minimum_slot_utilization": 0.5}},
    "oldest": {"oldest": {"max_candidate_sequences": 6, "preferred_batch_size": [2, 3]}},
}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.name)


def differences(path: Path) -> list[tuple[int, str]]:
    """Of a replay of the file: the numbers of events that came out otherwise, and how."""
    header, events = read_log(path)
    replay = Replay(header)
    found = []
    for event in events:
        actions, difference = replay.feed(event)
        assert list(lines_of(event, actions))
        if difference:
            found.append((event.number, difference))
    return found


def numbers(path: Path) -> list[int]:
    return [event.number for event in read_log(path)[1]]


def config(strategy: str) -> ModelConfig:
    batching = {**STRATEGIES[strategy], "max_sequence_idle_microseconds": 3_000}
    return ModelConfig.model_validate({"name": "model", "max_batch_size": 4, "sequence_batching": batching})


def live_with_sequences(scheduler: ModelScheduler, strategy: str, seed: int, events: int = 250) -> None:
    """A random life of a model with sequences: what comes, ends, is cancelled and is lost."""
    dice = random.Random(seed)
    now_us, keys, running, known = 1_000_000, count(1), list[int](), [0]
    scheduler.configure(1, config(strategy))
    scheduler.look_ahead(frozenset(), frozenset(), False)
    for _ in range(events):
        now_us += dice.choice((0, 1, 20, 400))
        what = dice.random()
        if what < 0.55:
            flags = dice.choice((0, 0, SEQUENCE_START, SEQUENCE_START, SEQUENCE_END, SEQUENCE_START | SEQUENCE_END))
            known.append(next(keys))
            timeout_us, deadline_ms = dice.choice((0, 0, 300)), dice.choice((0, 0, 0, now_us // 1000 + 2))
            part = Part(
                known[-1],
                LATEST,
                1,
                dice.choice("aab"),
                0,
                timeout_us,
                deadline_ms,
                dice.choice((1, 2, 3, "x")),
                flags,
                "",
                b"body",
            )
            scheduler.enqueue(requests_of(dice.choice("gh"), [part], now_us, CountingFrame()))
        elif what < 0.8 and running:
            outcome = dice.choice([BatchOutcome.ANSWERED] * 5 + [*BatchOutcome][1:])
            scheduler.complete(now_us, running.pop(dice.randrange(len(running))), outcome, dice.randrange(3000))
        elif what < 0.85:
            scheduler.cancel(dice.choice("gh"), (key for key in dice.sample(known, 1)))
        elif what < 0.9:
            first, held = dice.randrange(2), dice.randrange(3)
            scheduler.set_instances(dice.choice("vw"), {1: held}, {1: range(first, first + held)})
        elif what < 0.93:
            scheduler.worker_lost(now_us, dice.choice("vw"))
        else:
            scheduler.expire(now_us)
        scheduler.overdue(now_us)
        running += [batch.id for batch in scheduler.dispatch(now_us)[0]]


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
    with contextlib.suppress(AssertionError):  # what must hold in a life is the matter of test_model_simulation
        simulation.replay(events)
    log.close()
    for path in files(folder):
        assert differences(path) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_life_with_sequences_is_replayed_from_any_of_its_files(tmp_path: Path, strategy: str, seed: int):
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


def rows(path: Path) -> list[Any]:
    return list(msgpack.Unpacker(path.open("rb")))


def recorded(folder: Path) -> Path:
    log = EventLog(folder, "scheduler")
    live_with_sequences(log.model(LiveQueue("model"), count(1).__next__), "oldest", seed=1)
    log.close()
    return files(folder)[0]


def rewritten(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join(map(msgpack.packb, rows)))
    return path


def test_a_missing_event_is_noticed(tmp_path: Path):
    path = recorded(tmp_path)
    head, *events = rows(path)
    rewritten(path, [head, *events[:40], *events[41:]])
    assert (42, "event 41 is missing") in differences(path)


def test_a_changed_event_is_noticed(tmp_path: Path):
    path = recorded(tmp_path)
    head, *events = rows(path)
    number, _, _, by_name = msgpack.unpackb(events[40][0])
    events[40][0] = msgpack.packb((number, "expire", [1], by_name))
    rewritten(path, [head, *events])
    assert differences(path)[0][0] == 41


def test_a_policy_that_decides_otherwise_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = recorded(tmp_path)
    choose = "scheduler.sequence_strategy.SequenceStrategy.choose"
    monkeypatch.setattr(choose, lambda self, instance, now_us: (list(instance.ready)[:1], 0))
    assert differences(path)


def test_a_file_that_ends_amidst_a_row_is_replayed_so_far(tmp_path: Path):
    path = recorded(tmp_path)
    whole = numbers(path)
    path.write_bytes(path.read_bytes()[:-3])
    assert differences(path) == []
    assert numbers(path) == whole[:-1]


@pytest.mark.parametrize("content", [b"", b"\xc1", b"text", msgpack.packb({"format": "other"}), msgpack.packb([1])])
def test_other_files_are_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(NotAnEventLog):
        read_log(path)


def test_the_oldest_files_go(tmp_path: Path):
    log = EventLog(tmp_path, "scheduler", max_file_bytes=2_000, kept_files=3)
    live_with_sequences(log.model(LiveQueue("a.model"), count(1).__next__), "oldest", seed=2)
    live_with_sequences(log.model(LiveQueue("b"), count(1).__next__), "oldest", seed=2)
    log.close()
    assert sorted(path.name.split(".")[0] for path in files(tmp_path)) == ["a=2Emodel"] * 3 + ["b"] * 3
    assert all(path.stat().st_size < 20_000 for path in files(tmp_path))
    assert [differences(path) for path in files(tmp_path)] == [[]] * 6


def test_a_full_disk_ends_the_record_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    log = EventLog(tmp_path / "log", "scheduler")
    scheduler = log.model(LiveQueue("model"), count(1).__next__)
    (tmp_path / "log").rmdir()
    live_with_sequences(scheduler, "direct", seed=3)
    log.close()
    assert [record.message for record in caplog.records if "not recorded any more" in record.message]
    assert len(caplog.records) == 1


def test_a_state_that_can_t_be_kept_ends_the_record_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    log = EventLog(tmp_path, "scheduler", max_file_bytes=2_000)
    scheduler = log.model(LiveQueue("model"), count(1).__next__)
    scheduler.hook = lambda: None
    live_with_sequences(scheduler, "direct", seed=3)
    assert [record.message for record in caplog.records] == [
        "model model: its events are not recorded any more: a builtins.function can't be kept"
    ]


def test_every_method_is_an_event_or_a_question():
    assert set(QUESTIONS) < set(vars(ModelScheduler))
    assert {"configure", "enqueue", "dispatch", "complete", "worker_lost", "expire"} < set(EVENTS)
    assert all(name in vars(RecordedModelScheduler) for name in EVENTS)


def test_the_command_prints_events_and_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def command(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["replay", *map(str, arguments)])
        return main()

    path = recorded(tmp_path)
    assert command(path) == 0
    same = capsys.readouterr().out
    assert "enqueue g/1" in same
    assert "batch 2 of version 1 to " in same  # the first number is that of the sequence
    assert same.splitlines()[-1].endswith(" 0 differences")
    head, *events = rows(path)
    events[-1][2] = b"otherwise"
    rewritten(path, [head, *events])
    assert command(path, "--quiet") == 1
    assert "DIFFERENT" in capsys.readouterr().out
    assert command(__file__) == 2


def test_the_command_is_there():
    asked = [sys.executable, "-m", "scheduler.replay", "--help"]
    assert "event log" in subprocess.run(asked, capture_output=True, text=True, check=True).stdout


class Place(NamedTuple):
    rank: int = 0


NOWHERE = Place()


def test_named_tuples_stay_what_they_are_and_constants_the_very_same(monkeypatch: pytest.MonkeyPatch):
    """A policy may tell "none given" by a comparison of identities."""
    monkeypatch.setattr("scheduler.event_rows.OURS", (__name__, "scheduler", "schemas"))
    for place in (NOWHERE, Place(3)):
        asked = request()
        asked.shape_key = place
        _, _, ((read,),), _ = unpack_event(pack_event(1, "enqueue", ([asked],), {}))
        assert type(read.shape_key) is Place
        assert (read.shape_key, read.shape_key is NOWHERE) == (place, place is NOWHERE)


def test_counters_go_on_in_a_state_that_was_kept():
    scheduler = ModelScheduler("model")
    scheduler.numbers = count(3)
    scheduler.draw = count(7).__next__
    next(scheduler.numbers)
    scheduler.draw()
    read = unpack_state(pack_state(scheduler, lambda: 0), lambda: 0)
    assert [next(read.numbers), next(read.numbers), read.draw(), read.draw()] == [4, 5, 8, 9]
    assert next(scheduler.numbers) == 4

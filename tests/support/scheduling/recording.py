"""Recordings of a model with sequences, and their replay."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path
from typing import Any

import msgpack

from tests.support.scheduling.requests import LATEST, CountingFrame
from weir.bus.naming.live_queues import LiveQueue
from weir.scheduler.batching.request import requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.recording.event_log import SUFFIX, EventLog
from weir.scheduler.replay import Replay, lines_of, read_log
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START
from weir.schemas.wire.messages import BatchOutcome, RequestEnvelope

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
    """A random run of a model with sequences: arrivals, ends, cancellations and losses."""
    dice = random.Random(seed)
    now_us, keys, running, known = 1_000_000, count(1), list[int](), [0]
    scheduler.configure(1, config(strategy))
    scheduler.set_lifecycle(frozenset(), frozenset(), False)
    for _ in range(events):
        now_us += dice.choice((0, 1, 20, 400))
        what = dice.random()
        if what < 0.55:
            flags = dice.choice((0, 0, SEQUENCE_START, SEQUENCE_START, SEQUENCE_END, SEQUENCE_START | SEQUENCE_END))
            known.append(next(keys))
            timeout_us, deadline_ms = dice.choice((0, 0, 300)), dice.choice((0, 0, 0, now_us // 1000 + 2))
            part = RequestEnvelope(
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

"""Durable requests while processes are killed: `python -m tests.faults.durable_kills` prints the result in one line.

Producers write each request into a ledger, flushed, before they send it, and resend it until it is acknowledged.
Meanwhile random processes of the server are killed with kill -9: worker, scheduler, gateway and nats-server; the server
restarts them. At the end the checker compares ledger and records.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import Process
from multiprocessing.connection import Connection
from pathlib import Path

import nats
import uvloop
from nats.aio.client import Client
from nats.errors import Error as NatsError

from tests.faults.policy import new_key, write_policy
from tests.support.durable.checker import Verdict, check
from tests.support.durable.models import write_digest
from tests.support.durable.producer import Share, Told, start
from tests.support.durable.restarting_server import ROLES, Served, tireless
from weir import API_KEY_VARIABLE
from weir.bus.naming.durable_subjects import QUEUE_STREAM, RESULT_STREAM

_LOOK_S = 0.25
_PROGRESS_S = 10.0
_REPLIES_S = 1.0
"""Time to wait at the end for responses on reply subjects."""


@dataclass
class Run:
    """The options and the results of a run."""

    requests: int
    seed: int
    every_s: float = 2.0
    most_kills: int = sys.maxsize
    producers: int = 2
    in_flight: int = 512
    rate: float = 0.0
    patience_s: float = 180.0
    """Time without progress after which the kills stop, and after twice which the run ends."""
    roles: tuple[str, ...] = ROLES
    with_policy: bool = False
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    told: list[Told] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    worst_rss_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether no request was lost, duplicated or wrong, in the records and on the reply subjects."""
        return self.verdict.is_clean and not any(told.wrong_replies + told.contradicting_replies for told in self.told)

    def line(self) -> str:
        """The figures as one line."""
        verdict, waits = self.verdict, sorted(self.verdict.waits_ms) or [0]
        kills = ", ".join(f"{role} {count}" for role, count in self.kills.most_common())
        outcomes = ", ".join(f"{outcome} {count}" for outcome, count in verdict.outcomes.most_common())
        rss = ", ".join(f"{role} {size / 2**20:.0f} MiB" for role, size in sorted(self.worst_rss_bytes.items()))
        twice = verdict.answered_twice + sum(told.contradicting_replies for told in self.told)
        wrong = verdict.wrong + sum(told.wrong_replies for told in self.told)
        return (
            f"{verdict.promised} requests, {self.kills.total()} faults ({kills}), lost {verdict.lost}, "
            f"answered twice {twice}, wrong {wrong}, left in the queue {verdict.left_in_queue}, "
            f"unknown {verdict.unknown}; {outcomes}; begun again {verdict.begun_again}; "
            f"{verdict.promised / self.seconds:.0f} requests/s, p99 {waits[len(waits) * 99 // 100] / 1000:.2f} s; "
            f"replies {sum(told.replies for told in self.told)}, of them again "
            f"{sum(told.repeated_replies for told in self.told)}; acknowledged as duplicates "
            f"{sum(told.duplicates for told in self.told)}; max RSS {rss}; seed {self.seed}"
        )


async def carry_out(run: Run, folder: Path) -> None:
    """Run everything, with all files in `folder`."""
    write_digest(folder / "models")
    options: list[str] = []
    if run.with_policy:
        keys = folder / "keys.json"
        os.environ[API_KEY_VARIABLE] = await new_key(f"--file={keys}")
        options = [f"--access-policy={write_policy(folder)}", f"--access-keys={keys}"]
    with tireless(folder, folder / "models", *options) as server:
        shares = _shares(run, folder, server.nats_url)
        producers = [start(share) for share in shares]
        client = await _connect(server.nats_url)
        began_s = time.monotonic()
        try:
            await _kill_until_done(run, server, client, producers)
            run.seconds = time.monotonic() - began_s
            await asyncio.sleep(_REPLIES_S)
            await _wait_until_acknowledged(run, client)
            for process, pipe in producers:
                if process.is_alive() and pipe.poll():  # else it never got everything stored: then requests are lost
                    pipe.recv()
                    pipe.send(True)
                    run.told.append(await asyncio.to_thread(pipe.recv))
            run.verdict = await check(server.nats_url, [share.ledger for share in shares])
        finally:
            for process, _ in producers:
                process.kill()
                process.join()
            await client.close()
            run.worst_rss_bytes = server.worst_rss_bytes


def _shares(run: Run, folder: Path, url: str) -> list[Share]:
    counts = [
        run.requests // run.producers + (number < run.requests % run.producers) for number in range(run.producers)
    ]
    return [
        Share(
            url=url,
            seed=run.seed,
            name=f"producer-{number}",
            first=sum(counts[:number]),
            count=count,
            in_flight=max(1, run.in_flight // run.producers),
            rate=run.rate / run.producers,
            ledger=folder / f"ledger-{number}",
        )
        for number, count in enumerate(counts)
    ]


async def _kill_until_done(
    run: Run, server: Served, client: Client, producers: list[tuple[Process, Connection]]
) -> None:
    draw = random.Random(run.seed)
    began_s = kill_at_s = looked_s = progressed_s = time.monotonic()
    told_s = began_s
    recorded = 0
    kill_at_s += run.every_s
    role = draw.choice(run.roles)
    while recorded < run.requests:
        await asyncio.sleep(_LOOK_S / 5)
        now_s = time.monotonic()
        stuck_s = now_s - progressed_s
        if stuck_s > 2 * run.patience_s or not all(process.is_alive() for process, _ in producers):
            print("gave up: no progress, or a producer has died", file=sys.stderr, flush=True)
            return
        is_due = now_s > kill_at_s and run.kills.total() < run.most_kills and stuck_s < run.patience_s
        if is_due and server.kill(role):  # who is still being started is waited for
            run.kills[role] += 1
            role = draw.choice(run.roles)
            kill_at_s = max(kill_at_s + run.every_s, now_s)
        if now_s - looked_s > _LOOK_S:
            looked_s = now_s
            server.sample_memory()
            count = await _messages(client, RESULT_STREAM)
            if count is not None and count > recorded:
                recorded, progressed_s = count, now_s
            if now_s - told_s > _PROGRESS_S:
                told_s = now_s
                rate = recorded / (now_s - began_s)
                print(f"{recorded} records, {run.kills.total()} kills, {rate:.0f}/s", file=sys.stderr, flush=True)


async def _wait_until_acknowledged(run: Run, client: Client) -> None:
    """Wait until the queue is empty, shortly after the last record."""
    deadline_s = time.monotonic() + min(run.patience_s, 30.0)
    while await _messages(client, QUEUE_STREAM) != 0 and time.monotonic() < deadline_s:
        await asyncio.sleep(_LOOK_S)


async def _messages(client: Client, stream: str) -> int | None:
    """Number of messages in a stream; None if unknown."""
    try:
        return (await client.jetstream(timeout=1).stream_info(stream)).state.messages
    except (NatsError, TimeoutError, OSError):
        return None


async def _connect(url: str) -> Client:
    async def ignore(error: Exception) -> None:
        pass

    return await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=ignore)  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one kill to the next")
    parser.add_argument("--kills", type=int, default=sys.maxsize, help="at most so many")
    parser.add_argument("--roles", default=",".join(ROLES), help="which are killed, separated by commas")
    parser.add_argument("--producers", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=512, help="unacknowledged publishes, all producers together")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: as many as go")
    parser.add_argument("--seed", type=int, default=0, help="of payloads and kills; 0: another each time")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds without progress until it gives up")
    parser.add_argument("--policy", action="store_true", help="with an access policy; producers show a key")
    parser.add_argument("--keep", type=Path, help="keep ledgers, data and log in this new folder")
    options = parser.parse_args()
    run = Run(
        requests=options.requests,
        seed=options.seed or random.SystemRandom().randrange(1, 1 << 31),
        every_s=options.every,
        most_kills=options.kills,
        producers=options.producers,
        in_flight=options.in_flight,
        rate=options.rate,
        patience_s=options.patience,
        roles=tuple(options.roles.split(",")),
        with_policy=options.policy,
    )
    with tempfile.TemporaryDirectory(prefix="durable-faults-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=options.keep is None)
        uvloop.run(carry_out(run, folder))
    print(run.line())
    for error, count in run.verdict.errors.most_common(10):
        print(f"{count} times: {error}")
    return 0 if run.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())

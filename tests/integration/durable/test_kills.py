"""Kills of every role under durable load: a client's ledger, written before each send, against the terminal records."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.clients.producers import Producer, int64_body, producer, value_of
from tests.support.models.zoo import write_small_zoo
from tests.support.servers.weir_server import Server


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_kills_of_all_roles_lose_nothing_and_record_nothing_twice(tmp_path: Path) -> None:
    write_small_zoo(tmp_path / "models")
    server = Server(tmp_path, tmp_path / "models")
    total, draw = 6000, random.Random(7)
    try:
        async with producer(server.nats_url) as to:
            sending = asyncio.create_task(_send_many(to, total))
            for role in ("worker", "durable", "scheduler", "nats", "gateway", "durable", "nats"):
                await asyncio.sleep(draw.uniform(1.0, 2.0))
                await asyncio.to_thread(server.kill, role)
            await sending
            await to.settled(total)
            records = await to.records("fast")
        wrong = [id for id, (_, body) in records if f"n{value_of(body)}" != id]
        ids = {id for id, _ in records}
        attempts = [int(headers["Weir-Attempts"]) for _, (headers, _) in records]
        print(f"{total} requests, 7 kills: lost {total - len(ids)}, recorded twice {len(records) - len(ids)}, ", end="")
        print(f"wrong {len(wrong)}, most attempts {max(attempts)}")
        assert (len(ids), len(records), wrong) == (total, total, [])
        server.wait_ready()
        assert server.stop() == 0
    except BaseException:
        print(server.log()[-6000:])
        raise
    finally:
        server.close()


async def _send_many(to: Producer, total: int) -> None:
    gate = asyncio.Semaphore(64)

    async def one(number: int) -> None:
        async with gate:
            await to.send("event.fast", int64_body(number), Nats_Msg_Id=f"n{number}")

    await asyncio.gather(*(one(number) for number in range(total)))

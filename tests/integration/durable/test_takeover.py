"""Two durable consumers: when the owner of a model's queue dies, the other continues."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.support.clients.producers import Producer, int64_body, producer, value_of
from tests.support.models.zoo import write_small_zoo
from tests.support.servers.roles import Start
from tests.support.waiting import wait_until


@pytest.mark.timeout(90)
async def test_the_other_gateway_takes_over(start: Start, tmp_path: Path) -> None:
    write_small_zoo(tmp_path / "models")
    start("scheduler")
    start.worker()
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    first = start("gateway", "--gateway-id=first", *ports)
    served = start.gateway()
    wait_until(served.is_ready)
    async with producer(start.nats.url) as to:
        headers, _ = await to.ask("event.fast", int64_body(0), Nats_Msg_Id="n0")
        assert headers["Weir-Outcome"] == "succeeded"
        sending = asyncio.create_task(_send(to, 400))
        while await to.count("RESULT") < 100:
            await asyncio.sleep(0.01)
        first.end(signal.SIGKILL)
        await sending
        await to.settled(400)
        records = await to.records("fast")
        assert {id: value_of(body) for id, (_, body) in records} == {f"n{number}": number for number in range(400)}
        assert len(records) == 400


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_owner_that_was_paused_takes_nothing_from_the_next(start: Start, tmp_path: Path) -> None:
    write_small_zoo(tmp_path / "models")
    start("scheduler")
    start.worker()
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    gateways = [start("gateway", *ports) for _ in range(2)]
    async with producer(start.nats.url) as to:
        sending = asyncio.create_task(_send(to, 4000))
        for gateway in [*gateways, *gateways]:  # one of them is the owner
            await asyncio.sleep(0.5)
            gateway.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(2.8)  # longer than a lease lasts
            gateway.process.send_signal(signal.SIGCONT)
        await sending
        await to.settled(3999)
        records = await to.records("fast")
        assert {id: value_of(body) for id, (_, body) in records} == {f"n{number}": number for number in range(1, 4000)}
        assert len(records) == 3999


async def _send(to: Producer, total: int) -> None:
    for number in range(1, total):
        await to.send("event.fast", int64_body(number), Nats_Msg_Id=f"n{number}")

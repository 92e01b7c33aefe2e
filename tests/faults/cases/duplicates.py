"""Duplicates: F-10 and F-11."""

from __future__ import annotations

import asyncio
import hashlib

import nats
from nats.aio.msg import Msg

from tests.faults.loads.http_caller import HttpCaller
from tests.faults.models import DIGEST, bytes_request
from tests.faults.report import FaultReport
from tests.faults.scene import Scene, Task, scene
from weir.bus.naming import subjects
from weir.bus.naming.durable_subjects import QUEUE_STREAM, event
from weir.bus.naming.subjects import LIVE_STREAM

_MOST_SEEN = 10_000
_WAIT_S = 60.0
_REFUSED = 0.3


async def duplicate_delivery(task: Task) -> FaultReport:
    """F-10: each frame of live requests is published once more by somebody, and what is delivered is refused by a spy.

    So the broker delivers again what is being run, or has just been recorded.
    """
    line = FaultReport("F-10", "every live frame twice, deliveries refused by somebody else", seed=task.seed)
    async with scene(task, line, rate=80.0) as on:
        client = await nats.connect(on.cluster.nats_url)
        copied: set[bytes] = set()

        async def spy(message: Msg) -> None:  # at once, for requests end within some milliseconds
            if message.subject == subjects.live(DIGEST) and message.data not in copied and len(copied) < _MOST_SEEN:
                copied.add(message.data)
                await client.publish(message.subject, message.data)
                line.faults["frame again"] += 1
            for stream in (QUEUE_STREAM, LIVE_STREAM):
                if message.reply.startswith(f"$JS.ACK.{stream}.") and on.draw.random() < _REFUSED:
                    await client.publish(message.reply, b"-NAK")
                    line.faults[f"delivery of {stream} refused"] += 1

        spying = await client.subscribe(">", cb=spy)
        await asyncio.sleep(task.times(20))
        await spying.unsubscribe()
        dropped = on.counter("weir_gateway_duplicate_responses")
        again = on.counter("weir_durable_redelivered")
        await client.close()
        line.notes.append(f"second live answers dropped {dropped}, durable requests delivered again {again}")
        line.expect(dropped > 0, "no live request was answered twice")
        line.expect(again > 0, "no durable request was delivered again")
    return line


async def duplicate_publish(task: Task) -> FaultReport:
    """F-11: a client sends the same id again. The same body gets the same response; another body is rejected."""
    line = FaultReport("F-11", "the same id again, with the same and with another body", seed=task.seed)
    refused = same = 0
    async with scene(task, line, clients=2, rate=20.0) as on:
        caller = HttpCaller(on.cluster.http())
        for number in range(task.times(30)):
            first, other = b"first %d" % number, b"other %d" % number
            answers = [await _ask_later(caller, first, f"key-{number}") for _ in range(2)]
            line.requests += 2
            line.faults["HTTP, same"] += 1
            line.duplicated += answers[0] != answers[1]
            line.wrong += hashlib.sha256(first).hexdigest() not in answers[0][1]
            same += answers[0] == answers[1]
            body, headers = bytes_request(other)
            status = (await caller.ask(_INFER, body, {**headers, **_later(f"key-{number}")})).status
            line.faults["HTTP, other"] += 1
            line.expect(status == 422, f"another body under the same key was answered {status}")
            refused += status == 422
            await _over_nats(on, number, line)
        caller.close()
        on.others += task.times(30)
    line.notes.append(f"HTTP: same answer {same}, refused {refused}")
    return line


_INFER = f"/v2/models/{DIGEST}/infer"


def _later(key: str) -> dict[str, str]:
    return {"Prefer": "respond-async", "Idempotency-Key": f'"{key}"'}


async def _ask_later(caller: HttpCaller, data: bytes, key: str) -> tuple[str, str]:
    """The id and the response of an asynchronous request."""
    body, headers = bytes_request(data)
    accepted = await caller.ask(_INFER, body, {**headers, **_later(key)})
    place = accepted.headers.get("location", "")
    if accepted.status != 202 or not place:
        return "", f"{accepted.status}"
    async with asyncio.timeout(_WAIT_S):
        while True:
            answer = await caller.ask(f"{place}/result", method="GET")
            if answer.status == 200:
                return place, answer.body.decode(errors="replace")
            await asyncio.sleep(0.05)


async def _over_nats(on: Scene, number: int, line: FaultReport) -> None:
    """The same over NATS, with the id in the body, so that the broker can't detect the duplicate."""
    url, id = on.cluster.nats_url, f"twice-{number}"
    first, second = [await _replied(url, b"one", id) for _ in range(2)]
    line.requests += 3
    line.faults["NATS, same"] += 1
    line.duplicated += (first["weir-ended-ms"], first["body"]) != (second["weir-ended-ms"], second["body"])
    told = await _replied(url, b"two", id)
    line.faults["NATS, other"] += 1
    line.expect(told.get("weir-status") == "409", f"another body under the same id ended as {told}")
    on.others += 1


async def _replied(url: str, data: bytes, id: str) -> dict[str, str]:
    client = await nats.connect(url)
    try:
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        await client.flush()
        body, headers = bytes_request(data, id)
        await client.jetstream().publish(event(DIGEST), body, headers={**headers, "Weir-Reply-To": inbox})
        message = await replies.next_msg(_WAIT_S)
        told = {name.lower(): value for name, value in (message.headers or {}).items()}
        return {**told, "body": message.data.decode(errors="replace")}
    finally:
        await client.close()

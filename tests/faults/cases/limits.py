"""Exceeded limits: F-18 to F-20."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from uuid import uuid4

import nats
from nats.errors import Error as NatsError

from tests.faults.loads.http_caller import Answer, HttpCaller
from tests.faults.models import DIGEST, FRAIL, bytes_request, write_models
from tests.faults.report import FaultReport
from tests.faults.scene import Scene, Task, scene
from weir.bus.naming import subjects
from weir.bus.naming.durable_subjects import QUEUE_STREAM, RESULT_STREAM, event
from weir.options.api_key import authorization

_JUNK_BYTES = 4 << 20
_MOST_JUNK = 400
_LEAST_JUNK_BYTES = 64
_CROWD = 12_000
_PAYLOAD_BYTES = 8 << 20
_LARGE_BYTES = 1 << 20
_UNREAD = 400
_INFER = f"/v2/models/{DIGEST}/infer"


async def full_queues(task: Task) -> FaultReport:
    """F-18: stream LIVE, the durable queue or a model's queue is full: requests are rejected, later accepted again."""
    line = FaultReport("F-18", "LIVE full, QUEUE full, 12 000 requests at once", seed=task.seed)
    options = {"gateway": ("--queue-max-messages=200",)}
    async with scene(task, line, task.shape(options=options), clients=4, rate=0, allowed="^503 ") as on:
        for _ in range(task.times(1)):
            await _fill_live(on)
            await _fill_queue(on)
            await _crowd(on)
    return line


async def _fill_live(on: Scene) -> None:
    """Fill the stream while the scheduler is stopped."""
    line = on.line
    client = await nats.connect(on.cluster.nats_url)
    on.cluster.kill("scheduler-0", signal.SIGSTOP)
    refused, size = "", _JUNK_BYTES
    for _ in range(_MOST_JUNK):
        try:
            await client.jetstream().publish(subjects.live(DIGEST), b"\xc1" * size, timeout=10)
        except (NatsError, nats.js.errors.APIError) as error:
            refused = str(error)
            if size <= _LEAST_JUNK_BYTES:
                break
            size //= 4
    line.faults["LIVE full"] += 1
    line.expect(bool(refused), "LIVE took all of it")
    began_s = time.monotonic()
    answer = await _ask(on, b"while it is full")
    line.requests += 1
    line.notes.append(f"LIVE full: answered {answer.status} after {(time.monotonic() - began_s) * 1000:.0f} ms")
    line.expect(answer.status == 503, f"while LIVE was full a request was answered {answer.status}")
    on.cluster.kill("scheduler-0", signal.SIGCONT)
    await on.recovered(time.monotonic())
    await client.close()


async def _fill_queue(on: Scene) -> None:
    """Publish more than the durable queue of the model accepts, while the worker is stopped."""
    line = on.line
    client = await nats.connect(on.cluster.nats_url)
    before = (await client.jetstream().stream_info(RESULT_STREAM)).state.messages
    on.cluster.kill("worker-0", signal.SIGSTOP)
    taken, refused = 0, ""
    for number in range(300):
        body, headers = bytes_request(b"%d" % number)
        try:
            await client.jetstream().publish(event(DIGEST), body, headers={**headers, "Nats-Msg-Id": f"full-{uuid4()}"})
            taken += 1
        except (NatsError, nats.js.errors.APIError) as error:
            refused = str(error)
            break
    line.faults["QUEUE full"] += 1
    line.requests += taken
    line.expect(taken == 200 and bool(refused), f"the queue of 200 took {taken}")
    on.cluster.kill("worker-0", signal.SIGCONT)
    async with asyncio.timeout(60):
        while (await client.jetstream().stream_info(QUEUE_STREAM)).state.messages:
            await asyncio.sleep(0.1)
    found = (await client.jetstream().stream_info(RESULT_STREAM)).state.messages
    line.lost += taken - (found - before)
    await client.close()


async def _crowd(on: Scene) -> None:
    """Send more requests at once than may wait for a version, or than a scheduler pulls."""
    line = on.line
    client = await nats.connect(on.cluster.nats_url, pending_size=256 << 20)
    inbox = client.new_inbox()
    replies = await client.subscribe(inbox + ".*")
    body, headers = bytes_request(b"one of many")
    began_s = time.monotonic()
    for number in range(_CROWD):
        await client.publish(f"infer.{DIGEST}", body, reply=f"{inbox}.{number}", headers=headers)
    statuses: dict[str, int] = {}
    seen: set[str] = set()
    with contextlib.suppress(TimeoutError, NatsError):
        while len(seen) < _CROWD:
            message = await replies.next_msg(60)
            line.duplicated += message.subject in seen
            seen.add(message.subject)
            status = (message.headers or {}).get("Weir-Status") or (message.headers or {}).get(
                "Nats-Service-Error-Code", "200"
            )
            statuses[status] = statuses.get(status, 0) + 1
    line.faults["crowd"] += 1
    line.requests += _CROWD
    line.lost += _CROWD - len(seen)
    line.expect(set(statuses) <= {"200", "429", "503"}, f"answers were {statuses}")
    line.notes.append(f"crowd: {statuses} within {time.monotonic() - began_s:.1f} s")
    await on.recovered(time.monotonic())
    await client.close()


async def oversize(task: Task) -> FaultReport:
    """F-19: bodies at the broker's limit, above it, ten times as large, and a deleted object: errors name the cause."""
    line = FaultReport(
        "F-19", "bodies around the broker's limit, and far above; an object that is gone", seed=task.seed
    )
    async with scene(task, line, clients=2, rate=10.0) as on:
        caller = HttpCaller(on.cluster.http())
        for _ in range(task.times(1)):
            for size in (
                _PAYLOAD_BYTES - 100_000,
                _PAYLOAD_BYTES - 1,
                _PAYLOAD_BYTES,
                _PAYLOAD_BYTES + 1,
                10 * _PAYLOAD_BYTES,
            ):
                for later in (False, True):
                    began_s = time.monotonic()
                    body, headers = bytes_request(b"x" * size)
                    headers |= {"Prefer": "respond-async"} if later else {}
                    answer = await asyncio.wait_for(caller.ask(_INFER, body, headers), 60)
                    took_s = time.monotonic() - began_s
                    line.requests += 1
                    line.faults["stored" if later else "live"] += 1
                    on.others += answer.status == 202
                    is_named = answer.status in (200, 202) or bool(json.loads(answer.body).get("error"))
                    line.expect(is_named and answer.status < 500, f"{size} bytes: {answer.status} {answer.body[:80]!r}")
                    line.expect(took_s < 10, f"{size} bytes were answered after {took_s:.1f} s")
                    line.notes.append(f"{'stored' if later else 'live'} {size} B: {answer.status}")
            await _lost_object(on)
        caller.close()
    return line


async def _lost_object(on: Scene) -> None:
    client = await nats.connect(on.cluster.nats_url)
    inbox = client.new_inbox()
    replies = await client.subscribe(inbox)
    headers = {"Nats-Msg-Id": f"claims-{uuid4()}", "Weir-Object": "not-there", "Weir-Reply-To": inbox}
    headers |= authorization("")
    await client.jetstream().publish(event(DIGEST), b"", headers=headers)
    message = await replies.next_msg(30)
    told = {name.lower(): value for name, value in (message.headers or {}).items()}
    on.line.faults["object gone"] += 1
    on.line.requests += 1
    on.others += 1
    on.line.expect(told.get("weir-outcome") == "dead-lettered", f"an object that is gone: {told}")
    on.line.notes.append(f"object gone: {message.data.decode(errors='replace')[:80]}")
    await client.close()


async def slow_consumer(task: Task) -> FaultReport:
    """F-20: clients that request large responses and don't read them: their memory is bounded, other clients are served."""
    line = FaultReport("F-20", "clients that read no answers", seed=task.seed)

    def write(repository) -> None:  # type: ignore[no-untyped-def]
        write_models(repository, (DIGEST, FRAIL))

    async with scene(task, line, clients=4, rate=10.0, models=write) as on:
        body, headers = bytes_request(b"y" * _LARGE_BYTES)
        lines = [f"POST /v2/models/{FRAIL}/infer HTTP/1.1", "Host: here", f"Content-Length: {len(body)}"]
        head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items())]).encode() + b"\r\n\r\n"
        writers: list[asyncio.StreamWriter] = []
        sent = 0
        for _ in range(task.times(4)):
            reader, writer = await asyncio.open_connection(*on.cluster.http(), limit=1024)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writers.append(writer)
            line.faults["reads nothing"] += 1
            with contextlib.suppress(TimeoutError, OSError):
                for _ in range(_UNREAD):
                    writer.write(head + body)
                    await asyncio.wait_for(writer.drain(), 2)
                    sent += 1
        await asyncio.sleep(2)
        await on.recovered(time.monotonic())
        for writer in writers:
            writer.transport.abort()
        await on.recovered(time.monotonic())
        line.requests += sent
        worst = on.cluster.worst_rss_bytes()
        line.notes.append(
            f"{sent} requests of {_LARGE_BYTES >> 20} MiB sent, gateway at most {worst['gateway'] >> 20} MiB"
        )
        line.expect(worst["gateway"] < 1 << 30, f"the gateway grew to {worst['gateway'] >> 20} MiB")
    return line


async def _ask(on: Scene, data: bytes) -> Answer:
    caller = HttpCaller(on.cluster.http())
    body, headers = bytes_request(data)
    try:
        return await asyncio.wait_for(caller.ask(_INFER, body, headers), 60)
    finally:
        caller.close()

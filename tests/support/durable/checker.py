"""Compares the records in RESULT and DEAD with the ledgers, independently of producers and server."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, StreamState
from nats.js.errors import NotFoundError

from tests.support.durable.ledger import number_of, read_ledgers
from weir.bus.naming.durable_subjects import DEAD_STREAM, QUEUE_STREAM, RESULT_STREAM
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.headers import parse_headers

_BATCH = 1000
_EXPIRES_S = 5.0
_TRIES = 100
_MOST_TOLD = 200


@dataclass
class Verdict:
    """Of all requests that the ledgers promised."""

    promised: int = 0
    lost: int = 0
    """Without a record."""
    answered_twice: int = 0
    """A record that replaced another, or a record under another subject for the same id."""
    wrong: int = 0
    """Succeeded, with another's answer or none."""
    unknown: int = 0
    """Records of requests that nobody made."""
    begun_again: int = 0
    """Attempted more than once."""
    dead_without_record: int = 0
    left_in_queue: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """What was said of those that did not succeed, with numbers left out."""
    waits_ms: list[int] = field(default_factory=list, repr=False)
    """From acceptance to record."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost, answered twice or wrong."""
        faults = self.lost, self.answered_twice, self.wrong, self.unknown, self.dead_without_record, self.left_in_queue
        return not any(faults)


async def check(url: str, ledgers: list[Path]) -> Verdict:
    """Reads everything. Raises TimeoutError when the streams can't be read."""
    expected = read_ledgers(ledgers)
    verdict = Verdict(promised=len(expected))
    seen: set[int] = set()
    dead: set[int] = set()

    def on_record(message: Message) -> None:
        headers = parse_headers(message.header_block)
        number = number_of(headers.get("weir-id", ""))
        if number not in expected:
            verdict.unknown += 1
            return
        verdict.answered_twice += number in seen
        seen.add(number)
        outcome = headers.get("weir-outcome", "none")
        verdict.outcomes[outcome] += 1
        verdict.begun_again += int(headers.get("weir-attempts", "0")) > 1
        verdict.waits_ms.append(int(headers.get("weir-ended-ms", "0")) - int(headers.get("weir-accepted-ms", "0")))
        if outcome == "succeeded":
            verdict.wrong += not _is_right(message.data, headers, expected[number])
        else:
            verdict.errors[re.sub(r"\d+", "…", message.data[:_MOST_TOLD].decode(errors="replace"))] += 1

    def on_dead(message: Message) -> None:
        dead.add(number_of(parse_headers(message.header_block).get("weir-dead-id", "")))

    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "checker", background)
        records = await _read(bus, RESULT_STREAM, on_record)
        await _read(bus, DEAD_STREAM, on_dead)
        queue = await _state(bus, QUEUE_STREAM)
        await bus.close()
    verdict.answered_twice += (
        records.last_seq - records.messages
    )  # each that is gone was replaced: none has expired yet
    verdict.lost = len(expected.keys() - seen)
    verdict.dead_without_record = len(dead - seen)
    verdict.left_in_queue = queue.messages
    return verdict


def _is_right(body: bytes, headers: dict[str, str], answer: bytes) -> bool:
    length = headers.get("inference-header-content-length")
    try:
        reply = json.loads(body[: int(length)] if length else body)
        (output,) = (output for output in reply["outputs"] if output["name"] == "SHA256")
        text = output["data"][0] if "data" in output else body[int(length or 0) + 4 :].decode()
        return bool(text == answer.hex())
    except (ValueError, KeyError, TypeError, IndexError):
        return False


async def _state(bus: Bus, stream: str) -> StreamState:
    for _ in range(_TRIES):
        try:
            return (await bus.jetstream.stream_info(stream)).state
        except NotFoundError:
            raise
        except (NatsError, TimeoutError, OSError):
            await asyncio.sleep(0.1)
    raise TimeoutError(f"stream {stream} can't be looked at")


async def _read(bus: Bus, stream: str, take: Callable[[Message], None]) -> StreamState:
    """Gives every message of a stream to `take`."""
    state = await _state(bus, stream)
    if not state.messages:
        return state
    config = ConsumerConfig(
        name=f"checker-{stream}", ack_policy=AckPolicy.NONE, mem_storage=True, inactive_threshold=60
    )
    await bus.jetstream.add_consumer(stream, config)
    inbox, read, turn = f"checker.{stream}", 0, 0
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asked = json.dumps({"batch": _BATCH, "expires": int(_EXPIRES_S * 1e9)}).encode()

    def on_message(message: Message) -> None:
        nonlocal read, turn
        if not message.status:
            read += 1
            turn += 1
            take(message)
        if read == state.messages:
            if not done.done():
                done.set_result(None)
        elif turn == _BATCH or message.status:
            turn = 0
            bus.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.checker-{stream}", asked, inbox)

    end = await bus.subscribe(inbox, on_message)
    bus.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.checker-{stream}", asked, inbox)
    await asyncio.wait_for(done, 60 + state.messages / 2000)
    end()
    return state

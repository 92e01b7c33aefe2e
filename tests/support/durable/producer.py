"""A producer process that records each request in a ledger and publishes it until it is stored.

A request without an acknowledgement is published again with the same `Nats-Msg-Id`. Responses on its reply subject are
compared with the expected output and with earlier responses. It shows the key in WEIR_API_KEY, if there is one.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from tests.support.durable.ledger import Ledger, answer_to, id_of, payload_of
from tests.support.durable.models import DIGEST, digest_request
from weir.bus.naming.durable_subjects import event
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.headers import pack_headers, parse_headers
from weir.bus.streams.acked_publisher import AckedPublisher, StoreAck
from weir.options.api_key import authorization

BLOCK = 256
"""Requests that are written down at a time, at most; at a given rate, those of a second."""

_FEWEST = 16

_AGAIN_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one producer sends: requests `first` to `first + count - 1`, with so many unacknowledged; no more than `rate` a
    second, 0 for as many as go.
    """

    url: str
    seed: int
    name: str
    first: int
    count: int
    in_flight: int
    rate: float
    ledger: Path


@dataclass
class Told:
    """What it saw."""

    stored: int = 0
    duplicates: int = 0
    """Acknowledged as stored before: its first acknowledgement was lost."""
    refused: int = 0
    replies: int = 0
    repeated_replies: int = 0
    contradicting_replies: int = 0
    """Second answers that said something else than the first."""
    wrong_replies: int = 0
    seen: dict[int, int] = field(default_factory=dict, repr=False)


def start(share: Share) -> tuple[multiprocessing.Process, Connection]:
    """The process, and a connection that gives True once all is stored, and `Told` after it was sent anything.

    What is sent earlier has it begin no more.
    """
    processes = multiprocessing.get_context("spawn")
    here, there = processes.Pipe()
    process = processes.Process(target=_main, args=(share, there), daemon=True)
    process.start()
    there.close()
    return process, here  # type: ignore[return-value]


def _main(share: Share, pipe: Connection) -> None:
    logging.disable(logging.WARNING)  # that the broker goes away is what this is about
    uvloop.run(_produce(share, pipe))


async def _produce(share: Share, pipe: Connection) -> None:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(share.url, share.name, background)
        publisher = AckedPublisher(bus, share.name)
        await publisher.start(background)
        producer = _Producer(share, bus, publisher)
        await bus.subscribe(f"replies.{share.name}.*", producer.on_reply)
        await bus.flush()
        await producer.send_all(lambda: pipe.poll() and bool(pipe.recv()))
        pipe.send(True)
        await asyncio.to_thread(pipe.recv)
        producer.told.seen.clear()
        pipe.send(producer.told)
        publisher.stop()
        await bus.close()


class _Producer:
    def __init__(self, share: Share, bus: Bus, publisher: AckedPublisher) -> None:
        self.told = Told()
        self._share = share
        self._bus = bus
        self._publisher = publisher
        self._under_way = 0
        self._room = asyncio.Event()
        self._subject = event(DIGEST)

    async def send_all(self, is_enough: Callable[[], bool]) -> None:
        """Returns once everything is stored that it has begun with."""
        share = self._share
        block = min(BLOCK, max(_FEWEST, int(share.rate))) if share.rate else BLOCK
        began_s = time.monotonic()
        with Ledger(share.ledger) as ledger:
            for start in range(share.first, share.first + share.count, block):
                if is_enough():
                    break
                numbers = range(start, min(start + block, share.first + share.count))
                payloads = [payload_of(share.seed, number) for number in numbers]
                ledger.promise(
                    [(number, answer_to(payload)) for number, payload in zip(numbers, payloads, strict=True)]
                )
                for number, payload in zip(numbers, payloads, strict=True):
                    if share.rate:
                        due_s = began_s + (number - share.first) / share.rate
                        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                    await self._until_below(share.in_flight)
                    self._under_way += 1
                    self._send(number, payload)
        await self._until_below(1)

    async def _until_below(self, count: int) -> None:
        while self._under_way >= count:
            self._room.clear()
            await self._room.wait()

    def _send(self, number: int, payload: bytes) -> None:
        header, tensor = digest_request(payload)
        headers = {
            "Nats-Msg-Id": id_of(number),
            "Inference-Header-Content-Length": str(len(header)),
            "Weir-Reply-To": f"replies.{self._share.name}.{number}",
            **authorization(""),
        }
        self._publisher.publish(
            self._subject, header + tensor, pack_headers(headers), partial(self._on_stored, number, payload)
        )

    def _on_stored(self, number: int, payload: bytes, ack: StoreAck) -> None:
        if not ack.is_stored:  # there is no room, or the stream is being restored
            self.told.refused += 1
            asyncio.get_running_loop().call_later(_AGAIN_S, self._send, number, payload)
            return
        self.told.stored += 1
        self.told.duplicates += ack.is_duplicate
        self._under_way -= 1
        self._room.set()

    def on_reply(self, message: Message) -> None:
        """An answer; it may come twice, and not at all when a gateway died just then."""
        told, number = self.told, int(message.subject.rpartition(".")[2])
        content = hash(message.data)
        if number in told.seen:
            told.repeated_replies += 1
            told.contradicting_replies += told.seen[number] != content
            return
        told.seen[number] = content
        told.replies += 1
        if parse_headers(message.header_block).get("weir-outcome") == "succeeded":
            told.wrong_replies += answer_to(payload_of(self._share.seed, number)).encode() not in message.data

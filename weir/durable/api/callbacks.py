"""`Callbacks`: posts terminal records to the callback URLs of their requests, until each was accepted or has failed for
good.

A request with a callback URL has a reply subject that encodes the URL (`weir.bus.naming.durable_subjects`). Stream
CALLBACKS stores what is published there, so a response to be posted survives the death of any process, and any consumer
process posts it. It may be posted twice; the receiver recognises it by `Weir-Id`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from typing import Any

from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus, Message
from weir.bus.nats.headers import parse_headers
from weir.bus.nats.jetstream import JetStream, parse_ack_subject
from weir.bus.streams.declarations import ensure_stream
from weir.bus.streams.stored_objects import CorruptObject, StoredObject
from weir.durable.api.callback_rules import CallbackRules, CallbackUrl
from weir.durable.api.receivers import ReceiverName, Receivers, Turn
from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError

logger = logging.getLogger("weir.gateway")

MAX_POSTS = 32
"""Responses that a process posts at the same time; `Receivers` says how many of them to one receiver."""

MAX_PENDING = 10_000
"""Failed posts of all processes that wait for a retry; beyond it no other responses are posted."""

MAX_TRIES = 20
"""Tries to post one response before it is dropped, over about two hours. It stays in stream RESULT. One that only waits for
other posts to its receiver, which get responses, has not been tried.
"""

POST_TIMEOUT_S = 15.0
"""Timeout of one post."""

MAX_AGE_S = 86400.0
"""How long a response may wait to be posted."""

MAX_STORED_BYTES = 1 << 30
"""Bytes of all responses that wait to be posted."""

_ACK_WAIT_S = 60.0
FIRST_DELAY_S = 1.0
"""Delay before the first retry; it doubles with each one, up to ten minutes."""

_MAX_DELAY_S = 600.0
_MAX_TURN_DELAY_S = 60.0
_PULL_S = 30.0
_RETRY_S = 1.0
_TEMPORARY = frozenset([408, 425, 429])
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})[ \r]")
_NAME = re.compile(r"(?:weir-|nats-msg-id$|inference-header-content-length$|content-type$)[a-z0-9-]*")


class Callbacks:
    """Posts responses. Does nothing if `rules` allow no URL."""

    def __init__(self, bus: Bus, messages: JetStream, rules: CallbackRules) -> None:
        self._bus = bus
        self._messages = messages
        self._rules = rules
        self._tasks: set[asyncio.Task[None]] = set()
        self._background: asyncio.TaskGroup | None = None
        self._is_stopping = False
        self._slots = asyncio.Semaphore(MAX_POSTS)
        self._receivers = Receivers()
        self._waits: dict[int, int] = {}  # how often a stored response only waited, by its sequence
        self.posted = 0
        self.dropped = 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Posts from now on. Raises NatsError, OSError or TimeoutError if the broker goes away meanwhile."""
        if not self._rules.allow_any:
            return
        await self._ensure()
        self._bus.on_reconnect(self._ensure)
        self._background = background
        self._keep(self._run())

    def stop(self) -> None:
        """Stops; a post that is under way is repeated by another process."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()

    def _keep(self, work: Any) -> None:
        assert self._background is not None  # noqa: S101 - set by `start`
        task = self._background.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ensure(self) -> None:
        await ensure_stream(
            self._bus,
            StreamConfig(
                name=subjects.CALLBACK_STREAM,
                subjects=[subjects.CALLBACK_SUBJECTS],
                storage=StorageType.FILE,
                retention=RetentionPolicy.WORK_QUEUE,
                discard=DiscardPolicy.NEW,
                max_age=MAX_AGE_S,
                max_bytes=MAX_STORED_BYTES,
                allow_msg_ttl=True,
                num_replicas=self._bus.replicas,
            ),
        )
        await self._bus.jetstream.add_consumer(
            subjects.CALLBACK_STREAM,
            ConsumerConfig(
                durable_name=subjects.CALLBACK_CONSUMER,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=_ACK_WAIT_S,
                max_ack_pending=MAX_PENDING,
                max_deliver=-1,  # it counts responses that only wait, too
            ),
        )

    async def _run(self) -> None:
        while not self._is_stopping:
            await self._pull_until_lost()
            await asyncio.sleep(_RETRY_S)

    @contained()
    async def _pull_until_lost(self) -> None:
        try:
            while not self._is_stopping:
                await self._pull()
        except BROKER_ERRORS as error:
            logger.debug("callbacks: %s", error)

    async def _pull(self) -> None:
        await self._slots.acquire()
        message = None
        try:
            message = await self._bus.jetstream.pull_one(subjects.CALLBACK_STREAM, subjects.CALLBACK_CONSUMER, _PULL_S)
            if message is not None:
                self._keep(self._deliver(message))
        finally:
            if message is None:
                self._slots.release()

    @contained()  # it is delivered again
    async def _deliver(self, message: Message) -> None:
        try:
            delivery = parse_ack_subject(message.reply)
            sequence, tries = (0, MAX_TRIES) if delivery is None else (delivery.sequence, delivery.deliveries)
            waits = self._waits.get(sequence, 0)
            tries -= waits
            is_done = await self._post(message)
            if is_done is Turn.LATER:
                self._waits[sequence] = waits + 1
                while len(self._waits) > MAX_PENDING:  # others have posted them
                    del self._waits[next(iter(self._waits))]
                self._repeat(message, min(FIRST_DELAY_S * (waits + 1), _MAX_TURN_DELAY_S))
                return
            if is_done is None and tries < MAX_TRIES:
                self._repeat(message, min(FIRST_DELAY_S * 2 ** max(tries - 1, 0), _MAX_DELAY_S))
                return
            self._waits.pop(sequence, None)
            if is_done:
                self.posted += 1
            else:
                self.dropped += 1
                logger.warning(
                    "the response to request %s could not be posted to its callback URL; it stays available over HTTP",
                    _id_of(message),
                )
            self._bus.publish(message.reply, b"+ACK")
        except BROKER_ERRORS as error:
            logger.debug("callbacks: %s", error)  # it is delivered again
        finally:
            self._slots.release()

    def _repeat(self, message: Message, delay_s: float) -> None:
        self._bus.publish(message.reply, b'-NAK {"delay": %d}' % int(delay_s * 1e9))

    async def _post(self, message: Message) -> bool | Turn | None:
        """Whether the receiver accepted it; None if it may accept it later, `Turn.LATER` if it was not tried."""
        try:
            url = self._rules.check_url(subjects.callback_url(message.subject))
        except (ValueError, WeirError):
            return False  # the rules have changed, or the message is not a gateway's
        receiver = ReceiverName.of(f"{url.scheme}://{url.authority}", url.path)
        turn = self._receivers.begin(receiver, time.monotonic())
        if turn is not Turn.NOW:
            return turn if turn is Turn.LATER else None
        has_responded = True
        try:
            headers = parse_headers(message.header_block)
            body = await self._body(message, headers)
            async with asyncio.timeout(POST_TIMEOUT_S):
                status = await post(url, headers, body)
        except CorruptObject:
            return False
        except (OSError, TimeoutError, EOFError, ValueError) as error:
            has_responded = False
            logger.debug("callback to %s: %s", url.authority, error)
            return None
        finally:
            self._receivers.end(receiver, has_responded, time.monotonic())
        if 200 <= status < 300:
            return True
        return None if status >= 500 or status in _TEMPORARY else False

    async def _body(self, message: Message, headers: dict[str, str]) -> bytes:
        """The body to post; takes the name of its object out of `headers`. Raises CorruptObject if it is lost."""
        name = headers.pop("weir-object", None)
        if name is None:
            return message.data
        found = await StoredObject.find(self._messages, subjects.RESULT_OBJECTS, name)
        if found is None:
            raise CorruptObject(f"object {name} does not exist")
        return await found.read()


async def post(url: CallbackUrl, headers: dict[str, str], body: bytes) -> int:
    """Posts to `url` and returns the status of the response; redirects are not followed.

    Raises OSError where there is no connection, or none that may be made; ValueError and EOFError for what is no
    response.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(url.host, url.port, type=1)  # SOCK_STREAM
    addresses = [str(place[4][0]) for place in found]
    if not addresses or not all(CallbackRules.admits_address(url, address) for address in addresses):
        raise OSError(f"{url.host} resolves to an address that callbacks must not use")
    tls = ssl.create_default_context() if url.scheme == "https" else None
    # To the address that was checked: the name may resolve to another one by now.
    reader, writer = await asyncio.open_connection(
        addresses[0], url.port, ssl=tls, server_hostname=url.host if tls else None
    )
    try:
        lines = [
            f"POST {url.target} HTTP/1.1",
            f"Host: {url.authority}",
            "User-Agent: weir",
            "Connection: close",
            f"Content-Length: {len(body)}",
            *(f"{name}: {_header_value(value)}" for name, value in headers.items() if _NAME.fullmatch(name)),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1", "replace"))
        writer.write(body)
        await writer.drain()
        while True:
            match = _STATUS.match(await reader.readline())
            if match is None:
                raise ValueError("not an HTTP response")
            if not match[1].startswith(b"1"):
                return int(match[1])
            while (await reader.readline()).strip():  # an interim response ends with an empty line
                pass
    finally:
        writer.close()


def _header_value(value: str) -> str:
    return "".join(character if character.isprintable() else " " for character in value)


def _id_of(message: Message) -> str:
    return message.subject.split(".")[1]

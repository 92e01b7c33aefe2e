"""`Callbacks`: posts terminal records to the URLs that their requests named, until each is taken or given up.

A request with a callback URL has a reply subject that names it (`bus.callback_subjects`), under which stream CALLBACKS
keeps what is published: so an answer to be posted is on disk, whichever gateway dies, and any gateway posts it. It may be
posted twice: `Weir-Id` tells.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from typing import Any

from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from bus import callback_subjects, durable_subjects
from bus.connection import Bus
from bus.stored_messages import StoredMessages
from bus.stored_objects import DamagedObject, StoredObject
from bus.streams import ensure_stream
from gateway.async_requests.callback_rules import CallbackRules, CallbackUrl
from gateway.async_requests.queue_depths import UNREACHABLE
from runtime.containment import contained
from schemas.errors import WeirError

logger = logging.getLogger("weir.gateway")

MAX_POSTS = 16
"""Answers that a gateway posts at the same time."""

MAX_UNDONE = 10_000
"""Answers that were posted in vain and wait to be posted again, of all gateways; then no others are posted."""

MAX_TRIES = 20
"""How often an answer is posted before it is given up: for about two hours. It stays in RESULT."""

POST_PATIENCE_S = 15.0
"""How long one post may take."""

KEPT_S = 86400.0
"""How long an answer waits to be posted."""

MAX_KEPT_BYTES = 1 << 30
"""Answers that wait to be posted, of all gateways."""

_ACK_WAIT_S = 60.0
FIRST_DELAY_S = 1.0
"""Before an answer is posted again; it doubles with each try, up to ten minutes."""

_MAX_DELAY_S = 600.0
_PULL_S = 30.0
_RETRY_S = 1.0
_TEMPORARY = frozenset([408, 425, 429])
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})[ \r]")
_NAME = re.compile(r"(?:weir-|nats-msg-id$|inference-header-content-length$|content-type$)[a-z0-9-]*")


class Callbacks:
    """See the module. Where `rules` allow no URL nothing is done."""

    def __init__(self, bus: Bus, messages: StoredMessages, rules: CallbackRules) -> None:
        self._bus = bus
        self._messages = messages
        self._rules = rules
        self._tasks: set[asyncio.Task[None]] = set()
        self._background: asyncio.TaskGroup | None = None
        self._is_stopping = False
        self._slots = asyncio.Semaphore(MAX_POSTS)
        self.posted = 0
        self.given_up = 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Posts from now on. Raises NatsError, OSError or TimeoutError where the broker goes away meanwhile."""
        if not self._rules.allow_any:
            return
        await self._ensure()
        self._bus.on_reconnect(self._ensure)
        self._background = background
        self._keep(self._run())

    def stop(self) -> None:
        """Posts nothing more; what is being posted is posted again by another."""
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
                name=callback_subjects.STREAM,
                subjects=[callback_subjects.SUBJECTS],
                storage=StorageType.FILE,
                retention=RetentionPolicy.WORK_QUEUE,
                discard=DiscardPolicy.NEW,
                max_age=KEPT_S,
                max_bytes=MAX_KEPT_BYTES,
                allow_msg_ttl=True,
                num_replicas=self._bus.replicas,
            ),
        )
        await self._bus.jetstream.add_consumer(
            callback_subjects.STREAM,
            ConsumerConfig(
                durable_name=callback_subjects.CONSUMER,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=_ACK_WAIT_S,
                max_ack_pending=MAX_UNDONE,
                max_deliver=MAX_TRIES + 1,
            ),
        )

    async def _run(self) -> None:
        while not self._is_stopping:  # nats-py may take a cancellation for a time-out
            await self._pull_until_lost()
            await asyncio.sleep(_RETRY_S)

    @contained()
    async def _pull_until_lost(self) -> None:
        try:
            pulling = await self._bus.jetstream.pull_subscribe_bind(
                callback_subjects.CONSUMER, callback_subjects.STREAM
            )
            try:
                while not self._is_stopping:
                    await self._pull(pulling)
            finally:
                await pulling.unsubscribe()
        except UNREACHABLE as error:
            logger.debug("callbacks: %s", error)

    async def _pull(self, pulling: Any) -> None:
        await self._slots.acquire()
        taken = False
        try:
            [message] = await pulling.fetch(1, _PULL_S)
            self._keep(self._deliver(message))
            taken = True
        except NatsTimeoutError:
            pass  # there is none
        finally:
            if not taken:
                self._slots.release()

    @contained()  # it is delivered again, MAX_TRIES times
    async def _deliver(self, message: Any) -> None:
        try:
            tries = int(message.metadata.num_delivered)
            is_done = await self._post(message)
            if is_done is None and tries < MAX_TRIES:
                await message.nak(min(FIRST_DELAY_S * 2 ** (tries - 1), _MAX_DELAY_S))
                return
            if is_done:
                self.posted += 1
            else:
                self.given_up += 1
                logger.warning("the answer to %s could not be posted; it is given up", _id_of(message))
            await message.ack()
        except UNREACHABLE as error:
            logger.debug("callbacks: %s", error)  # it is delivered again
        finally:
            self._slots.release()

    async def _post(self, message: Any) -> bool | None:
        """Whether the other side took it; None where it may take it later."""
        try:
            url = self._rules.check_url(callback_subjects.callback_url(message.subject))
        except (ValueError, WeirError):
            return False  # it was allowed once, or somebody else has published it
        headers = {name.lower(): value for name, value in (message.headers or {}).items()}
        body = message.data
        try:
            if "weir-object" in headers:
                name = headers.pop("weir-object")
                found = await StoredObject.find(self._messages, durable_subjects.RESULT_OBJECTS, name)
                if found is None:
                    return False
                body = await found.read()
            async with asyncio.timeout(POST_PATIENCE_S):
                status = await post(url, headers, body)
        except DamagedObject:
            return False
        except (OSError, TimeoutError, EOFError, ValueError) as error:
            logger.debug("callback to %s: %s", url.authority, error)
            return None
        if 200 <= status < 300:
            return True
        return None if status >= 500 or status in _TEMPORARY else False


async def post(url: CallbackUrl, headers: dict[str, str], body: bytes) -> int:
    """Posts to `url` and returns the status of the response; redirects are not followed.

    Raises OSError where there is no connection, or none that may be made; ValueError and EOFError for what is no response.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(url.host, url.port, type=1)  # SOCK_STREAM
    addresses = [str(place[4][0]) for place in found]
    if not addresses or not all(CallbackRules.admits_address(url, address) for address in addresses):
        raise OSError(f"{url.host} has an address that callbacks may not go to")
    tls = ssl.create_default_context() if url.scheme == "https" else None
    # To the very address that was looked at: asked again, its name may have another.
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
            *(f"{name}: {_line(value)}" for name, value in headers.items() if _NAME.fullmatch(name)),
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


def _line(value: str) -> str:
    return "".join(character if character.isprintable() else " " for character in value)


def _id_of(message: Any) -> str:
    return str(message.subject.split(".")[1])

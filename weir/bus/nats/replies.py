"""`ReplyInbox`: requests to other processes on the bus, and the replies to them, from one responder or from many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING

from weir.bus.message import Callback, Message

if TYPE_CHECKING:
    from weir.bus.nats.connection import Bus


class ReplyInbox:
    """The subjects `<prefix>.<number>`, one for each request of this role. Everything runs in one event loop."""

    def __init__(self, bus: Bus, prefix: str) -> None:
        self._bus = bus
        self._prefix = prefix
        self._numbers = count(1)
        self._handlers: dict[str, Callback] = {}
        self._waiting: set[asyncio.Future[Message]] = set()

    async def start(self) -> None:
        """Subscribes to the subjects."""
        await self._bus.subscribe(f"{self._prefix}.*", self._on_reply)

    def expect(self, on_reply: Callback) -> str:
        """Returns a new reply subject. `on_reply` is called with each message on it until `forget`."""
        reply = f"{self._prefix}.{next(self._numbers)}"
        self._handlers[reply] = on_reply
        return reply

    def forget(self, reply: str) -> None:
        """Ignores further messages on a reply subject."""
        self._handlers.pop(reply, None)

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        *,
        timeout_s: float,
        header_block: bytes = b"",
        resend_s: float | None = None,
    ) -> Message:
        """Publishes a request and returns the first reply, whose `status` is "503" without a subscriber of `subject`.

        With `resend_s` it is published again after each `resend_s` seconds without a reply. Raises TimeoutError without a
        reply in time, ConnectionError after `fail_all`.
        """
        loop = asyncio.get_running_loop()
        replied: asyncio.Future[Message] = loop.create_future()
        reply = self.expect(lambda message: None if replied.done() else replied.set_result(message))
        timer: asyncio.TimerHandle | None = None

        def send() -> None:
            nonlocal timer
            if header_block:
                self._bus.publish(subject, data, reply, header_block)
            else:
                self._bus.publish(subject, data, reply)
            timer = None if resend_s is None else loop.call_later(resend_s, send)

        try:
            send()
            return await self.wait(replied, timeout_s)
        finally:
            if timer is not None:
                timer.cancel()
            self.forget(reply)

    async def gather(
        self,
        subjects: Iterable[str],
        data: bytes,
        on_reply: Callable[[Message], bool],
        *,
        timeout_s: float,
        header_block: bytes = b"",
    ) -> bool:
        """Publishes one request on each of `subjects` and passes the replies to `on_reply` until it returns True.

        Returns whether it did within `timeout_s`. Raises ConnectionError after `fail_all`.
        """
        completed: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def take(message: Message) -> None:
            if not completed.done() and on_reply(message):
                completed.set_result(message)

        reply = self.expect(take)
        try:
            for subject in subjects:
                if header_block:
                    self._bus.publish(subject, data, reply, header_block)
                else:
                    self._bus.publish(subject, data, reply)
            await self.wait(completed, timeout_s)
        except TimeoutError:
            return False
        finally:
            self.forget(reply)
        return True

    def fail_all(self) -> None:
        """Ends every `request` and `gather` with ConnectionError."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(ConnectionError("the connection to nats-server was lost"))

    async def wait(self, future: asyncio.Future[Message], timeout_s: float) -> Message:
        """The result of `future`. Raises TimeoutError, or ConnectionError after `fail_all`."""
        self._waiting.add(future)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            self._waiting.discard(future)

    def _on_reply(self, message: Message) -> None:
        handler = self._handlers.get(message.subject)
        if handler is not None:
            handler(message)

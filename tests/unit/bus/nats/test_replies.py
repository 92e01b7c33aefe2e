"""Replies reach the request that they belong to, from one responder or from many."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from tests.support.collecting_bus import CollectingBus
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.replies import ReplyInbox


class Responders(CollectingBus):
    """Collects requests; `reply` responds to the one published last."""

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        super().publish(subject, data, reply)

    def reply(self, data: bytes, status: str = "", to: int = -1) -> None:
        self.deliver(self.published[to][2], data, status=status)


@pytest.fixture
def responders() -> Responders:
    return Responders()


async def inbox_of(responders: Responders) -> ReplyInbox:
    inbox = ReplyInbox(cast(Bus, responders), "replies.me")
    await inbox.start()
    return inbox


async def test_a_request_gets_its_own_reply(responders: Responders) -> None:
    inbox = await inbox_of(responders)
    first = asyncio.create_task(inbox.request("a", b"1", timeout_s=20))
    second = asyncio.create_task(inbox.request("b", b"2", timeout_s=20))
    await asyncio.sleep(0)
    responders.reply(b"of b", to=1)
    responders.reply(b"of a", to=0)
    responders.reply(b"once more", to=0)
    assert [(await first).data, (await second).data] == [b"of a", b"of b"]
    responders.reply(b"late", to=0)  # is ignored


async def test_a_request_without_a_reply_ends_in_time(responders: Responders) -> None:
    inbox = await inbox_of(responders)
    with pytest.raises(TimeoutError):
        await inbox.request("a", timeout_s=0.01)


async def test_requests_end_with_the_connection(responders: Responders) -> None:
    inbox = await inbox_of(responders)
    request = asyncio.create_task(inbox.request("a", timeout_s=10))
    gathering = asyncio.create_task(inbox.gather(["a"], b"", lambda message: True, timeout_s=10))
    await asyncio.sleep(0)
    inbox.fail_all()
    for task in (request, gathering):
        with pytest.raises(ConnectionError):
            await task


async def test_gather_ends_with_the_reply_that_completes_it(responders: Responders) -> None:
    inbox = await inbox_of(responders)
    found: list[Message] = []

    def is_complete(message: Message) -> bool:
        found.append(message)
        return len(found) == 2

    gathering = asyncio.create_task(inbox.gather(["a", "b"], b"x", is_complete, timeout_s=20))
    await asyncio.sleep(0)
    assert [(subject, data) for subject, data, _ in responders.published] == [("a", b"x"), ("b", b"x")]
    for number in range(4):
        responders.reply(b"%d" % number)
    assert await gathering
    assert [message.data for message in found] == [b"0", b"1"]


async def test_gather_ends_at_its_deadline_without_all_replies(responders: Responders) -> None:
    inbox = await inbox_of(responders)
    gathering = asyncio.create_task(inbox.gather(["a"], b"", lambda message: message.data == b"last", timeout_s=0.02))
    await asyncio.sleep(0)
    responders.reply(b"first")
    assert not await gathering

"""When the broker is told what is done with, and when it must not be: sequences may be other messages' after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.waiting import eventually
from weir.bus.nats.connection import Bus
from weir.bus.nats.jetstream import JetStream
from weir.durable.consumer.acknowledger import Acknowledger


class Api:
    def __init__(self) -> None:
        self.purged: list[int] = []
        self.failures = 0
        self.error: Exception = TimeoutError()

    async def purge(self, _stream: str, _filter: str, below: int) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error
        self.purged.append(below)


class Setting:
    def __init__(self, background: asyncio.TaskGroup) -> None:
        self.published: list[str] = []
        self.bus = SimpleNamespace(losses=0, publish=lambda subject, data: self.published.append(subject))
        self.api = Api()
        self.acks = Acknowledger(cast(Bus, self.bus), cast(JetStream, self.api), "event.m", background)
        self.acks.begin()

    def end(self, *sequences: int) -> None:
        for sequence in sequences:
            self.acks.opened("event.m", sequence)
        for sequence in sequences:
            self.acks.ended("event.m", sequence, f"ack.{sequence}")


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    async with asyncio.TaskGroup() as background:
        found = Setting(background)
        yield found
        found.acks.stop()


async def test_nothing_is_told_between_a_loss_and_the_next_beginning(setting: Setting) -> None:
    setting.end(1, 2, 3, 4)
    setting.bus.losses += 1
    setting.acks.flush()
    await asyncio.sleep(0.15)
    assert (setting.api.purged, setting.published) == ([], [])
    assert len(setting.acks) == 0  # nothing that a gateway that stops could wait for
    setting.acks.begin()
    await eventually(lambda: setting.api.purged == [5])


async def test_what_was_dropped_is_never_told(setting: Setting) -> None:
    setting.end(1, 2, 3, 4)
    setting.bus.losses += 1
    setting.acks.clear()
    setting.acks.begin()
    setting.end(1)  # another message of that sequence, in a stream that was made anew
    await eventually(lambda: setting.published)
    assert (setting.api.purged, setting.published) == ([], ["ack.1"])


async def test_a_purge_that_nobody_answers_is_asked_for_again(setting: Setting) -> None:
    setting.api.failures = 1
    setting.end(1, 2, 3, 4)
    await eventually(lambda: setting.api.purged == [5])
    assert setting.published == []
    await eventually(lambda: len(setting.acks) == 0)


async def test_a_purge_that_fails_as_nobody_foresaw_is_asked_for_again(setting: Setting) -> None:
    setting.api.failures, setting.api.error = 1, RuntimeError("not foreseen")
    setting.end(1, 2, 3, 4)
    await eventually(lambda: setting.api.purged == [5])
    await eventually(lambda: len(setting.acks) == 0)

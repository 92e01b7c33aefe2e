"""Durable requests on subjects that no consumer has are moved to the model's own subject."""

from __future__ import annotations

from typing import cast

import pytest

from weir.bus.nats.jetstream import JetStream, StoredMessage
from weir.bus.streams.acked_publisher import AckedPublisher, StoreAck
from weir.durable.consumer import consumer as stray_messages
from weir.durable.consumer.consumer import MisaddressedMessages


class Queue:
    """Stands for stream QUEUE, its API and a publisher to it. Subjects are bytes, as nats-server keeps them."""

    def __init__(self, *subjects: bytes) -> None:
        self.messages = dict(enumerate(subjects, 1))
        self.looks = 0

    async def next(self, stream: str, filter: str, sequence: int = 1) -> StoredMessage | None:
        self.looks += 1
        tokens = filter.encode().split(b".")
        for number, subject in sorted(self.messages.items()):
            context = subject.split(b".")
            is_found = len(context) == len(tokens) and all(map(lambda a, b: a in (b"*", b), tokens, context))
            if number >= sequence and is_found:
                return StoredMessage(subject.decode(errors="replace"), number, 0, {}, b"NATS/1.0\r\n\r\n", b"body")
        return None

    async def delete(self, stream: str, sequence: int) -> None:
        del self.messages[sequence]

    async def store(self, subject: str, data: bytes, header_block: bytes = b"") -> StoreAck:
        self.messages[max(self.messages) + 1] = subject.encode()
        return StoreAck(len(self.messages))

    @property
    def subjects(self) -> list[bytes]:
        return sorted(self.messages.values())


def stray_messages_of(queue: Queue) -> MisaddressedMessages:
    return MisaddressedMessages(cast(JetStream, queue), cast(AckedPublisher, queue))


async def test_a_model_in_other_letters_is_moved() -> None:
    queue = Queue(b"event.f=61st", b"event.fast")
    assert await stray_messages_of(queue).move("event.f=61st")
    assert queue.subjects == [b"event.fast", b"event.fast"]


async def test_a_subject_that_is_not_utf8_is_searched_for_and_moved() -> None:
    queue = Queue(b"event.fast", b"event.\xff", b"event.fast", b"event.a.v1", b"event.\xfe")
    assert await stray_messages_of(queue).move("event.\ufffd")
    assert queue.subjects == [b"event.=EF=BF=BD", b"event.=EF=BF=BD", b"event.a.v1", b"event.fast", b"event.fast"]


async def test_a_long_search_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stray_messages, "_MAX_LOOKS", 4)
    queue = Queue(*[b"event.fast"] * 10, b"event.\xff")
    found_subjects = stray_messages_of(queue)
    assert [await found_subjects.move("event.\ufffd") for _ in range(3)] == [False, False, True]
    assert b"event.\xff" not in queue.subjects
    assert queue.looks < 30

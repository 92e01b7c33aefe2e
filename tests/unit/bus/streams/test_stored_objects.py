"""Objects are read as far as their descriptions announce, whatever a producer has written into them."""

from __future__ import annotations

import base64
import hashlib
from typing import Any, cast

import orjson
import pytest

from weir.bus.nats.jetstream import JetStream, StoredMessage
from weir.bus.streams.stored_objects import MIN_MEAN_CHUNK_BYTES, CorruptObject, StoredObject, description_subject

NAME = "body"
ID = "Nuid1"


class Stream:
    """Answers as `JetStream` what a stream holds."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.read_bytes = 0

    def put(self, *chunks: bytes, **changes: Any) -> None:
        content = b"".join(chunks)
        digest = "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
        described = {"name": NAME, "nuid": ID, "size": len(content), "chunks": len(chunks), "digest": digest, **changes}
        self.messages += [(f"$O.requests.C.{ID}", chunk) for chunk in chunks]
        self.describe(orjson.dumps({name: value for name, value in described.items() if value is not None}))

    def describe(self, data: bytes) -> None:
        self.messages.append((description_subject("requests", NAME), data))

    async def last(self, _stream: str, subject: str) -> StoredMessage | None:
        found = [number for number, (name, _) in enumerate(self.messages) if name == subject]
        return self._message(found[-1]) if found else None

    async def next(self, _stream: str, subject: str, sequence: int) -> StoredMessage | None:
        for number, (name, data) in enumerate(self.messages):
            if name == subject and number + 1 >= sequence:
                self.read_bytes += len(data)
                return self._message(number)
        return None

    def _message(self, number: int) -> StoredMessage:
        subject, data = self.messages[number]
        return StoredMessage(subject, number + 1, 0, {}, b"", data)

    async def read(self) -> bytes | None:
        found = await StoredObject.find(cast(JetStream, self), "requests", NAME)
        return None if found is None else await found.read()


async def test_an_object_is_read_completely() -> None:
    stream = Stream()
    assert await stream.read() is None
    stream.put(b"a" * 5000, b"b" * 3000)
    assert await stream.read() == b"a" * 5000 + b"b" * 3000
    stream.put(b"", size=0, deleted=True)
    assert await stream.read() is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"digest": None}, "digest"),
        ({"digest": "zz"}, "digest"),
        ({"digest": "SHA-256=zz"}, "digest"),
        ({"digest": "SHA-256=" + base64.urlsafe_b64encode(b"x" * 32).decode()}, "digest"),
        ({"size": "x"}, "size"),
        ({"size": None}, "size"),
        ({"size": -1}, "size"),
        ({"size": True}, "size"),
        ({"size": 1 << 40}, "missing"),
        ({"nuid": ">"}, "nuid"),
        ({"nuid": 7}, "nuid"),
        ({"options": {"link": {"bucket": "models", "name": "x"}}}, "link"),
    ],
)
async def test_a_wrong_description_is_an_error(changes: dict[str, Any], told: str) -> None:
    stream = Stream()
    stream.put(b"content", **changes)
    with pytest.raises((CorruptObject, EOFError), match=told):
        await stream.read()


@pytest.mark.parametrize("data", [b"", b"[1]", b"{", b"\xff\xfe", b"7"])
async def test_a_malformed_description_is_an_error(data: bytes) -> None:
    stream = Stream()
    stream.describe(data)
    with pytest.raises(CorruptObject):
        await stream.read()


async def test_options_of_another_form_do_no_harm() -> None:
    stream = Stream()
    stream.put(b"content", options="x", chunks="x", headers=[1])
    assert await stream.read() == b"content"


async def test_no_more_is_read_than_the_description_announces() -> None:
    stream = Stream()
    stream.put(*[bytes(128 << 10)] * 64, size=10)
    with pytest.raises(CorruptObject, match="longer"):
        await stream.read()
    assert stream.read_bytes == 128 << 10


async def test_chunks_that_make_no_progress_end_the_read() -> None:
    stream = Stream()
    stream.put(*[b""] * 100, b"x" * MIN_MEAN_CHUNK_BYTES)
    with pytest.raises(CorruptObject, match="chunks"):
        await stream.read()

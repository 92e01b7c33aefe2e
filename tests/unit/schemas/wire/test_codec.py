"""The codec: what generated decoders accept, and how they report what they do not."""

from __future__ import annotations

import subprocess
import sys
from http import HTTPStatus
from typing import Annotated

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from weir.schemas.core.tensors import CudaRegionRef, PayloadRef, RegionRef
from weir.schemas.wire.codec import (
    MAX_ERROR_LENGTH,
    WIRE_VERSION,
    MalformedMessage,
    Message,
    Record,
    _decoder,
    bin_header,
    build_decoders,
    encode,
    reference,
)


class Point(Message, frozen=True):
    x: Annotated[int, Meta(ge=0)]
    name: str = ""


class Settings(Record, frozen=True):
    size: int
    tags: dict[str, list[int]] = msgspec.field(default_factory=dict)


def test_a_message_is_an_array_behind_the_wire_version() -> None:
    assert msgpack.unpackb(Point(3, "a").pack()) == [WIRE_VERSION, 3, "a"]
    assert Point.unpack(Point(3, "a").pack()) == Point(3, "a")


def test_a_record_is_a_map_beside_the_wire_version() -> None:
    assert msgpack.unpackb(Settings(1, {"a": [2]}).pack()) == [WIRE_VERSION, {"size": 1, "tags": {"a": [2]}}]
    assert Settings.unpack(Settings(1, {"a": [2]}).pack()) == Settings(1, {"a": [2]})


@pytest.mark.parametrize("kind", [Point, Settings])
@pytest.mark.parametrize("rest", [[{"size": 1}], [{"size": 1}, *range(20)], [{"size": 1}, *range(70_000)]])
def test_a_message_of_another_wire_version_says_so(kind: type[Message] | type[Record], rest: list[object]) -> None:
    wanted = (
        f"a {kind.__name__} of wire version 7, where this process has {WIRE_VERSION}: all roles must be of one release"
    )
    with pytest.raises(MalformedMessage, match=f"^{wanted}$"):
        kind.unpack(msgpack.packb([7, *rest]))


@pytest.mark.parametrize(
    "data", [b"", b"\x90", b"\xdc", b"\xdc\x00", b"\xdd\x00\x00\x00\x01", b"\xc0", b"\x92\xc0\x01"]
)
def test_what_has_no_version_says_what_it_is_not(data: bytes) -> None:
    with pytest.raises(MalformedMessage, match=r"^not a Point: "):
        Point.unpack(data)


def test_fields_of_later_releases_are_ignored_and_those_of_earlier_ones_have_their_default() -> None:
    assert Point.unpack(msgpack.packb([WIRE_VERSION, 3, "a", "new"])) == Point(3, "a")
    assert Point.unpack(msgpack.packb([WIRE_VERSION, 3])) == Point(3)
    assert Settings.unpack(msgpack.packb([WIRE_VERSION, {"size": 1, "new": 2}])) == Settings(1)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        [WIRE_VERSION],
        [True, 3],
        [float(WIRE_VERSION), 3],
        [WIRE_VERSION, True],
        [WIRE_VERSION, 3.0],
        [WIRE_VERSION, "3"],
        [WIRE_VERSION, -1],
        [WIRE_VERSION, 3, b"a"],
    ],
)
def test_malformed_messages(value: object) -> None:
    with pytest.raises(MalformedMessage, match="not a Point: "):
        Point.unpack(msgpack.packb(value))


@pytest.mark.parametrize(
    "value",
    [{"size": 1}, [WIRE_VERSION, 1], [WIRE_VERSION, {}], [WIRE_VERSION, {1: 2}]],
)
def test_malformed_records(value: object) -> None:
    with pytest.raises(MalformedMessage, match="not a Settings: "):
        Settings.unpack(msgpack.packb(value))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,  # deep nesting
        b"\xdd\xff\xff\xff\xff\x01",  # an array of four billion elements
        b"\x92\x02\xdf\xff\xff\xff\xff",  # a map of four billion members
        b"\x93\x02\x03\xdb\xff\xff\xff\xff",  # a text of 4 GiB
        b"\x93\x02\x03\xa1\xff",  # not UTF-8
    ],
)
def test_hostile_bytes_are_malformed(data: bytes) -> None:
    for kind in (Point, Settings):
        with pytest.raises(MalformedMessage) as caught:
            kind.unpack(data)
        assert len(str(caught.value)) < MAX_ERROR_LENGTH + 30


@given(st.binary(max_size=80))
def test_any_bytes_are_decoded_or_malformed(data: bytes) -> None:
    for kind in (Point, Settings):
        try:
            kind.unpack(data)
        except MalformedMessage:
            continue


class Code(int):
    """A number of a type of its own."""


class Label(str):
    """A text of a type of its own, whose `str` is another text than its content."""

    def __str__(self) -> str:
        return "shown"


def test_values_of_types_that_extend_built_in_ones_are_encoded_as_these() -> None:
    values = {np.str_("score"): np.float64(0.5), "label": Label("a"), "content": np.bytes_(b"b"), "code": Code(3)}
    assert msgpack.unpackb(encode(values)) == {"score": 0.5, "label": "a", "content": b"b", "code": 3}
    with pytest.raises(TypeError, match="object"):
        encode({"a": object()})


def test_references_by_their_form() -> None:
    assert reference(["segment", 0, 1, 2, 3]) == PayloadRef("segment", 0, 1, 2, 3)
    assert reference(["name", 1, 2, 3]) == RegionRef("name", 1, 2, 3)
    assert reference([b"handle", 1, 2, 3]) == CudaRegionRef(b"handle", 1, 2, 3)


@pytest.mark.parametrize(
    "row",
    [[], ["name"], ["name", -1, 0, 0], ["name", 1, True, 0], [1, 2, 3, 4], ["s", 0, 0, 0, "1"], [b"s", 0, 0, 0, 0]],
)
def test_malformed_references(row: list[object]) -> None:
    with pytest.raises(ValueError):
        reference(row)


def test_scalars_of_subclasses_are_packed_as_what_they_are() -> None:
    """Models put numbers of numpy into the parameters of their responses."""
    scalars = {"float": np.float64(1.5), "text": np.str_("a"), "bytes": np.bytes_(b"x"), "code": HTTPStatus.OK}
    assert msgpack.unpackb(encode(scalars)) == {"float": 1.5, "text": "a", "bytes": b"x", "code": 200}
    with pytest.raises(TypeError, match="int64"):
        encode(np.int64(1))


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536])
def test_the_header_of_content(size: int) -> None:
    assert bin_header(size) + bytes(size) == msgpack.packb(bytes(size))


_DECODE_IN_THREADS = """
import sys, threading
import msgspec
from weir.schemas.wire.codec import Message, encode
sys.setswitchinterval(1e-6)
for number in range(300):
    inner = msgspec.defstruct("Inner", [(f"field_{n}", int) for n in range(20)], array_like=True)
    outer = msgspec.defstruct("Outer", [("rows", list[inner]), ("last", int)], bases=(Message,), frozen=True)
    content, start = encode([1, [list(range(20))], 7]), threading.Barrier(4)
    def decode():
        start.wait()
        assert outer.unpack(content).last == 7
    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_may_decode_the_first_messages_of_a_type_at_once() -> None:
    """msgspec crashes the process where two threads build decoders of one type, so a process of its own tries it."""
    ended = subprocess.run([sys.executable, "-c", _DECODE_IN_THREADS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_decoders_that_are_built_ahead_are_those_that_messages_use() -> None:
    build_decoders()
    misses = _decoder.cache_info().misses
    assert Point.unpack(Point(1, "a").pack()) == Point(1, "a")
    assert Settings.unpack(Settings(2).pack()) == Settings(2)
    assert _decoder.cache_info().misses == misses

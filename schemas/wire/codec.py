"""The encoding of messages between roles: MessagePack, with the wire version as the first element of each message.

Two shapes cover nearly all messages. A `Message` is an array: the wire version, then the fields in order. A `Record` is the
wire version and a map of the fields by name. `msgspec` generates encoders and decoders from the annotations, so the
annotations are the checks: a message that does not match them raises `MalformedMessage`. A field may be added at the end of
a message, or to a record, if it has a default: older releases ignore it.

Every message is untrusted input. A length that a message claims never allocates more memory than the message has bytes.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from weir.schemas.core.tensors import CudaRegionRef, DatatypeName, PayloadRef, Reference, RegionRef, Tensor

WIRE_VERSION = 2
"""Roles of different wire versions exchange no messages: what one sends is malformed for the other, which says why."""

MAX_ERROR_LENGTH = 200


_PLAIN: dict[type, Callable[[Any], object]] = {
    float: float.__float__,
    str: str.__str__,
    int: int.__int__,
    bytes: bytes.__bytes__,
}


def _plain(value: object) -> object:
    """`value` as the built-in type that it extends, as numpy's float64 extends float. Raises TypeError for any other."""
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind):
            return plain(value)
    raise TypeError(f"objects of type {type(value).__name__} can't be encoded")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
"""The MessagePack form of a value. The content of tensors is copied once.

Models and callers may set a value of a type that extends a built-in one. Raises TypeError for values of other types.
"""

NonNegative = Annotated[int, Meta(ge=0)]

SubjectToken = Annotated[str, Meta(pattern=r"^[!-)+-=?-~]+\Z")]
"""Text that may be part of a subject: printable ASCII without `*` and `>`."""


class MalformedMessage(ValueError):
    """Bytes on a subject that are not the message the subject carries."""


OnMalformed = Callable[[int | None, MalformedMessage], None]
"""Receives each row of a message that cannot be decoded: the key of its request where that can be read, and the error."""


class Message(msgspec.Struct, array_like=True, frozen=True, tag=WIRE_VERSION):
    """Base of messages that travel as an array: the wire version, then the fields in order."""

    def pack(self) -> bytes:
        """The message as bytes."""
        return encode(self)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Self:
        """The message in `data`. Raises MalformedMessage."""
        try:
            message: Self = _decoder(cls).decode(data)
        except (ValueError, RecursionError) as error:
            raise _malformed(data, cls.__name__, error) from error
        return message


class Record(msgspec.Struct, frozen=True):
    """Base of messages that travel as the wire version and a map of their fields."""

    def pack(self) -> bytes:
        """The message as bytes."""
        return encode((WIRE_VERSION, self))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Self:
        """The message in `data`. Raises MalformedMessage."""
        try:
            record: Self = _decoder(_versioned(cls)).decode(data)[1]
        except (ValueError, RecursionError) as error:
            raise _malformed(data, cls.__name__, error) from error
        return record


def decode(data: bytes | memoryview, kind: Any, name: str) -> Any:
    """The value of type `kind` in `data`. Raises MalformedMessage, whose text has the `name`."""
    try:
        return _decoder(kind).decode(data)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"not a {name}: {str(error)[:MAX_ERROR_LENGTH]}") from error


class _Keyed(msgspec.Struct, array_like=True):
    key: int


def decode_rows(
    rows: Iterable[msgspec.Raw],
    kind: Any,
    name: str,
    on_malformed: OnMalformed,
    make: Callable[[Any], Any] = lambda row: row,
) -> list[Any]:
    """What `make` makes of each row, decoded as a `kind`; rows that cannot be decoded are passed to `on_malformed`."""
    found = []
    for row in rows:
        try:
            found.append(make(decode(row, kind, name)))
        except MalformedMessage as error:
            on_malformed(_key_of(row), error)
    return found


def _key_of(row: msgspec.Raw) -> int | None:
    try:
        keyed: _Keyed = decode(row, _Keyed, "row")
    except MalformedMessage:
        return None
    return keyed.key


def _malformed(data: bytes | memoryview, name: str, error: Exception) -> MalformedMessage:
    version = _version_of(data)
    if version in (None, WIRE_VERSION):
        return MalformedMessage(f"not a {name}: {str(error)[:MAX_ERROR_LENGTH]}")
    other = f"a {name} of wire version {version}, where this process has {WIRE_VERSION}"
    return MalformedMessage(f"{other}: all roles must be of one release")


def _version_of(data: bytes | memoryview) -> int | None:
    """The first element of a MessagePack array, if it is a small number; None for anything else."""
    first = {0xDC: 3, 0xDD: 5}.get(data[0], 1 if data[0] & 0xF0 == 0x90 else 0) if data else 0
    return data[first] if 0 < first < len(data) and data[first] < 0x80 else None


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """The function that decodes values of type `kind`, for many of them. It raises ValueError or RecursionError."""
    return _decoder(kind).decode


def convert(value: Any, kind: Any) -> Any:
    """The value of type `kind` that the decoded `value` stands for. Raises msgspec.ValidationError."""
    _decoder(kind)  # `msgspec.convert` derives from the type what a decoder derives
    return msgspec.convert(value, kind)


_building = threading.Lock()


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    # msgspec keeps what it derives from a type's annotations in the type, and puts it there before it is complete: a
    # second thread that uses the type meanwhile reads null pointers. Threads of instances decode, so one builds at a time.
    with _building:
        return msgspec.msgpack.Decoder(kind)


def build_decoders() -> None:
    """Build the decoders of all messages and records that are defined, so that the first requests do not wait for them."""
    for kind in _subclasses(Message):
        _decoder(kind)
    for kind in _subclasses(Record):
        _decoder(_versioned(kind))


def _subclasses(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


@cache
def _versioned(record: type) -> Any:
    return tuple[Literal[2], record]  # type: ignore[valid-type]  # WIRE_VERSION: a Literal takes no name


def bin_header(size_bytes: int) -> bytes:
    """The bytes that precede `size_bytes` bytes of content in MessagePack's "bin" formats."""
    if size_bytes < 1 << 8:
        return struct.pack(">BB", 0xC4, size_bytes)
    if size_bytes < 1 << 16:
        return struct.pack(">BH", 0xC5, size_bytes)
    return struct.pack(">BI", 0xC6, size_bytes)


class WireTensor(Tensor, eq=False):
    """A decoded tensor. Its content is in the message, or a row names the shared memory that holds it."""

    datatype: DatatypeName
    shape: list[NonNegative]
    data: bytes | list[Any]  # type: ignore[assignment]  # `reference` makes a `Reference` of the row


def reference(row: list[Any]) -> Reference:
    """The reference that a row of a message is: to a payload slot, or to memory of a client. Raises ValueError."""
    kind: type[Reference]
    if len(row) == 5:
        kind = PayloadRef
    else:
        kind = CudaRegionRef if row and type(row[0]) is bytes else RegionRef
    referred: Reference = convert(row, kind)
    return referred

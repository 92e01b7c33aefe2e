"""Header blocks (RFC 7541): decoded with the `hpack` library, remembered while that is sound; encoded without state.

Clients send the same block again and again: what a block meant is kept for as long as the dynamic table, which the
meaning of its indices depends on, stays as it is (decoding a block costs 30 us, finding it again 0.2). Blocks we send
refer to nothing, so each can be made once for all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple, OversizedHeaderListError
from hpack.table import HeaderTable

from gateway.http2.faults import ConnectionFault, FaultCode, StreamFault

MAX_HEADER_LIST_BYTES = 64 * 1024
"""Decoded header lists above this end the connection (sizes as in RFC 9113, section 10.5.1)."""

_MAX_KEPT_BLOCKS = 64
_MAX_KEPT_BLOCK_BYTES = 1024

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"[^\0\r\n]*")
_PSEUDO = frozenset([b":method", b":scheme", b":authority", b":path"])
_HOP_BY_HOP = frozenset([b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"])

Header = tuple[bytes, bytes]
_Meaning = TypeVar("_Meaning")


class RequestHead:
    """The head of a well-formed request: its pseudo-header fields, and its other `fields` in order.

    Raises StreamFault for a malformed request (RFC 9113, section 8.1.1): one that breaks the rules of 8.2 and 8.3.1.
    """

    __slots__ = ("fields", "method", "path")

    def __init__(self, headers: Iterable[Header]) -> None:
        pseudo: dict[bytes, bytes] = {}
        self.fields: list[Header] = []
        for name, value in headers:
            if name in _PSEUDO and name not in pseudo and not self.fields:
                pseudo[name] = value
            else:
                _check_field(name, value)
                self.fields.append((name, value))
        if not (pseudo.get(b":method") and pseudo.get(b":scheme") and pseudo.get(b":path")):
            raise StreamFault(FaultCode.PROTOCOL_ERROR)
        self.method = pseudo[b":method"]
        self.path = pseudo[b":path"]

    @property
    def size_bytes(self) -> int:
        """The size of the fields as RFC 9113, section 10.5.1, counts it."""
        return sum(len(name) + len(value) + 32 for name, value in self.fields)


def _check_field(name: bytes, value: bytes) -> None:
    if (
        not _NAME.fullmatch(name)
        or not _VALUE.fullmatch(value)
        or name in _HOP_BY_HOP
        or (name == b"te" and value != b"trailers")
    ):
        raise StreamFault(FaultCode.PROTOCOL_ERROR)


class HeaderDecoder(Generic[_Meaning]):
    """Decodes the header blocks of one connection, in the order they came; `interpret` tells what a request's head means.

    What `interpret` returns is shared by all requests with the same block.
    """

    __slots__ = ("_decoder", "_interpret", "_kept", "_table")

    def __init__(self, interpret: Callable[[RequestHead], _Meaning]) -> None:
        self._interpret = interpret
        self._table = _CountingTable()
        self._decoder = Decoder(MAX_HEADER_LIST_BYTES)
        self._decoder.header_table = self._table
        self._kept: dict[bytes, _Meaning] = {}

    def request(self, block: bytes) -> _Meaning:
        """What the head of a request means. Raises StreamFault when it is malformed, and as `fields` does."""
        known = self._kept.get(block)
        if known is not None:
            return known
        changes = self._table.changes
        meaning = self._interpret(RequestHead(self.fields(block)))
        if self._table.changes == changes and len(block) <= _MAX_KEPT_BLOCK_BYTES:
            if len(self._kept) >= _MAX_KEPT_BLOCKS:
                self._kept.clear()
            self._kept[block] = meaning
        return meaning

    def fields(self, block: bytes) -> list[Header]:
        """The header list of a block. Raises ConnectionFault: the state of the decoder is lost (RFC 9113, section 4.3)."""
        changes = self._table.changes
        try:
            headers: list[Header] = list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, "the header list is too large") from error
        except HPACKError as error:
            raise ConnectionFault(FaultCode.COMPRESSION_ERROR, "the header block is malformed") from error
        if block[:1] and block[0] & 0xE0 == 0x20:
            self._table.changes += 1  # a new table size, which comes first in a block (RFC 7541, section 6.3)
        if self._table.changes != changes:
            self._kept.clear()
        return headers


class _CountingTable(HeaderTable):
    """A dynamic table that tells whether it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)


_ENCODER = Encoder()


def encode_headers(headers: Iterable[Header]) -> bytes:
    """The block of `headers`, made of the static table and of literals that are never indexed: it needs no context."""
    return _ENCODER.encode((NeverIndexedHeaderTuple(name, value) for name, value in headers), huffman=False)

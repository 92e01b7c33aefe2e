"""Header blocks (RFC 7541): decoded with the `hpack` library and cached while that is sound; encoded without state.

Clients send the same block again and again. The meaning of a block is cached until the dynamic table, which its indices
refer to, changes (decoding a block costs 30 us, a cache hit 0.2). Sent blocks use no dynamic table, so each can be
encoded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple, OversizedHeaderListError
from hpack.table import HeaderTable

from weir.gateway.http2.frames import Http2ConnectionError, Http2ErrorCode, Http2StreamError

MAX_HEADER_LIST_BYTES = 64 * 1024
"""Decoded header lists above this end the connection (sizes as in RFC 9113, section 10.5.1)."""

MAX_FIELDS = 128
"""The most fields of a header block: a byte of a block can stand for one, and each takes time."""

WORK_BYTES = 16
"""The bytes of a block whose decoding is counted like one field."""

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

    Raises Http2StreamError for a malformed request (RFC 9113, section 8.1.1): one that breaks the rules of 8.2 and 8.3.1.
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
            raise Http2StreamError(Http2ErrorCode.PROTOCOL_ERROR)
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
        raise Http2StreamError(Http2ErrorCode.PROTOCOL_ERROR)


class HeaderDecoder(Generic[_Meaning]):
    """Decodes the header blocks of one connection, in order. `interpret` turns the head of a request into its meaning.

    Requests with the same block share the object that `interpret` returns.
    """

    __slots__ = ("_decoder", "_interpret", "_kept", "_table", "work")

    def __init__(self, interpret: Callable[[RequestHead], _Meaning]) -> None:
        self._interpret = interpret
        self._table = _CountingTable()
        self._decoder = Decoder(MAX_HEADER_LIST_BYTES)
        self._decoder.header_table = self._table
        self._kept: dict[bytes, _Meaning] = {}
        self.work = 0
        """The work of all blocks decoded so far, in fields: each field counts 1, and so do each `WORK_BYTES` of a block,
        which may be Huffman-coded. A block whose meaning was kept is not decoded again, and counts nothing."""

    def request(self, block: bytes) -> _Meaning:
        """The meaning of the head of a request. Raises Http2StreamError if it is malformed, and as `fields` does."""
        cached = self._kept.get(block)
        if cached is not None:
            return cached
        changes = self._table.changes
        meaning = self._interpret(RequestHead(self.fields(block)))
        if self._table.changes == changes and len(block) <= _MAX_KEPT_BLOCK_BYTES:
            if len(self._kept) >= _MAX_KEPT_BLOCKS:
                self._kept.clear()
            self._kept[block] = meaning
        return meaning

    def fields(self, block: bytes) -> list[Header]:
        """The header list of a block. Raises Http2ConnectionError: the decoder's state is lost (RFC 9113, section 4.3)."""
        changes = self._table.changes
        self.work += len(block) // WORK_BYTES
        try:
            headers: list[Header] = list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            reason = f"a header list has more than {MAX_HEADER_LIST_BYTES} bytes"
            raise Http2ConnectionError(Http2ErrorCode.ENHANCE_YOUR_CALM, reason) from error
        except HPACKError as error:
            raise Http2ConnectionError(Http2ErrorCode.COMPRESSION_ERROR, "the header block is malformed") from error
        self.work += len(headers)
        if len(headers) > MAX_FIELDS:
            reason = f"a header block has {len(headers)} fields, more than {MAX_FIELDS}"
            raise Http2ConnectionError(Http2ErrorCode.ENHANCE_YOUR_CALM, reason)
        if block[:1] and block[0] & 0xE0 == 0x20:
            self._table.changes += 1  # a change of the table size, at the start of a block (RFC 7541, section 6.3)
        if self._table.changes != changes:
            self._kept.clear()
        return headers


class _CountingTable(HeaderTable):
    """A dynamic table that counts its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)


_ENCODER = Encoder()


def encode_headers(headers: Iterable[Header]) -> bytes:
    """The header block of `headers`. It uses the static table and never-indexed literals only: it needs no context."""
    return _ENCODER.encode((NeverIndexedHeaderTuple(name, value) for name, value in headers), huffman=False)

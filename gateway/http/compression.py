"""Compressed bodies over HTTP: `Inflation` of requests, bounded, and `deflate` for responses.

Source: Triton's HTTP front end. It tells gzip and zlib streams apart by their first bytes, whichever of the two
`Content-Encoding` names, reads the first stream only, and compresses the responses of inference that went well. Unlike
it, we refuse what is no such stream, or ends before its end: Triton takes what it could read for the whole body.
"""

from __future__ import annotations

import functools
import zlib

from schemas.errors import ErrorCode, WeirError, invalid

IN_PLACE_BYTES = 256 * 1024
"""What is compressed or decompressed in the event loop; more than that takes too long, and goes to a thread."""

INFLATION_STEP_BYTES = 4 << 20
"""What is decompressed in a thread before the memory ledger is asked for the next step."""

_STEP_BYTES = 1 << 20
_PIECE_BYTES = 64 * 1024
_GZIP_OR_ZLIB = 15 + 32
_WINDOW_BITS = {"gzip": 15 + 16, "deflate": 15}
_UNCOMPRESSED = (b"", b"identity")
# Triton takes zlib's default: of a small body little is gained by haste, of a large one a tenth is lost and time won.
_LEVEL, _LEVEL_OF_LARGE = 6, 1


def is_compressed(content_encoding: bytes) -> bool:
    """Whether a body with this `Content-Encoding`, in lower case, is to be decompressed. Raises WeirError (UNSUPPORTED)."""
    if content_encoding in _UNCOMPRESSED:
        return False
    if content_encoding in (b"gzip", b"deflate"):
        return True
    raise WeirError(ErrorCode.UNSUPPORTED, "Unsupported compression type")


class Inflation:
    """One body on its way from `compressed` to `content`, of at most `limit_bytes`.

    What comes out is bounded at each step, so a body that would grow beyond the limit costs no more than the limit.
    """

    __slots__ = ("_compressed", "_limit_bytes", "_position", "_stream", "content")

    def __init__(self, compressed: bytes | bytearray | memoryview, limit_bytes: int) -> None:
        if not compressed:
            raise invalid("nothing to be decompressed")
        self._compressed = memoryview(compressed)
        self._limit_bytes = limit_bytes
        self._position = 0
        self._stream = zlib.decompressobj(_GZIP_OR_ZLIB)
        self.content = bytearray()

    def advance(self, size_bytes: int) -> bool:
        """Goes on until there are about `size_bytes` of content; whether that is all of it.

        Raises WeirError (INVALID_ARG) for what is no such stream, and for content beyond the limit.
        """
        while len(self.content) < size_bytes:
            room = min(_STEP_BYTES, size_bytes - len(self.content), self._limit_bytes + 1 - len(self.content))
            before = len(self.content)
            try:
                self.content += self._stream.decompress(self._next_piece(), room)
            except zlib.error:
                raise _inconsistent() from None
            if len(self.content) > self._limit_bytes:
                raise invalid(
                    "decompressed request size exceeds the maximum allowed input size of "
                    f"{self._limit_bytes} bytes. Use --http-max-input-size to increase the limit."
                )
            if self._stream.eof:
                return True
            if len(self.content) == before and self._position == len(self._compressed):
                raise _inconsistent()  # it ends before its end
        return False

    def _next_piece(self) -> bytes | memoryview:
        # What a step leaves over is copied by zlib, so it is not given everything at once.
        if self._stream.unconsumed_tail:
            return self._stream.unconsumed_tail
        piece = self._compressed[self._position : self._position + _PIECE_BYTES]
        self._position += len(piece)
        return piece


def deflate(chunks: list[bytes | memoryview], encoding: str) -> bytes:
    """The body made of `chunks`, compressed as "gzip" or "deflate" (a zlib stream)."""
    level = _LEVEL if sum(map(len, chunks)) <= IN_PLACE_BYTES else _LEVEL_OF_LARGE
    stream = zlib.compressobj(level, zlib.DEFLATED, _WINDOW_BITS[encoding])
    compressed = [stream.compress(chunk) for chunk in chunks]
    compressed.append(stream.flush())
    return b"".join(compressed)


@functools.lru_cache(maxsize=256)
def response_encoding(accept_encoding: bytes) -> str:
    """How to encode the response to a request with this `Accept-Encoding`: "gzip", "deflate", or "" for as it is.

    Of these, the one with the highest weight; of those with equal weights, the first.
    """
    best, best_weight = "", 0.0
    for item in accept_encoding.decode("latin-1").lower().split(","):
        name, _, parameters = item.partition(";")
        name = name.strip()
        weight = _weight(parameters)
        if name in ("gzip", "deflate", "identity") and weight > best_weight:
            best, best_weight = name, weight
    return "" if best == "identity" else best


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def _inconsistent() -> WeirError:
    return invalid("encountered inconsistent stream state during decompression")

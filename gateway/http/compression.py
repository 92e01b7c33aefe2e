"""Compressed HTTP bodies: `BodyInflation` decompresses requests, within bounds; `deflate` compresses responses.

Source: Triton's HTTP frontend. It distinguishes gzip and zlib streams by their first bytes, whichever of the two
`Content-Encoding` names, reads the first stream only, and compresses the responses of successful inference requests.
Unlike Triton, which takes what it could read for the whole body, Weir rejects malformed and truncated streams.
"""

from __future__ import annotations

import functools
import zlib

from weir.gateway.inflation import Inflation
from weir.schemas.core.errors import ErrorCode, WeirError, invalid

IN_PLACE_BYTES = 256 * 1024
"""The most bytes that are compressed or decompressed in the event loop; a thread processes larger bodies."""

_GZIP_OR_ZLIB = 15 + 32
_WINDOW_BITS = {"gzip": 15 + 16, "deflate": 15}
_UNCOMPRESSED = (b"", b"identity")
# Triton takes zlib's default: of a small body little is gained by haste, of a large one a tenth is lost and time won.
_LEVEL, _LEVEL_OF_LARGE = 6, 1


def is_compressed(content_encoding: bytes) -> bool:
    """Whether a body with this `Content-Encoding` (lower case) is compressed. Raises WeirError for an unsupported one."""
    if content_encoding in _UNCOMPRESSED:
        return False
    if content_encoding in (b"gzip", b"deflate"):
        return True
    raise WeirError(ErrorCode.UNSUPPORTED, "Unsupported compression type")


class BodyInflation(Inflation):
    """The decompression of a request body: the first stream in it, gzip or zlib. Raises WeirError (INVALID_ARG)."""

    __slots__ = ()

    def __init__(self, compressed: bytes | bytearray | memoryview, limit_bytes: int) -> None:
        if not compressed:
            raise invalid("nothing to be decompressed")
        super().__init__(compressed, _GZIP_OR_ZLIB, limit_bytes)

    def malformed(self) -> WeirError:
        """The error for a malformed or truncated stream."""
        return invalid("encountered inconsistent stream state during decompression")

    def too_large(self) -> WeirError:
        """The error for content beyond the limit."""
        return invalid(
            "decompressed request size exceeds the maximum allowed input size of "
            f"{self.limit_bytes} bytes. Use --http-max-input-size to increase the limit."
        )


def deflate(chunks: list[bytes | memoryview], encoding: str) -> bytes:
    """`chunks` compressed as one "gzip" or "deflate" (zlib) stream."""
    level = _LEVEL if sum(map(len, chunks)) <= IN_PLACE_BYTES else _LEVEL_OF_LARGE
    stream = zlib.compressobj(level, zlib.DEFLATED, _WINDOW_BITS[encoding])
    compressed = [stream.compress(chunk) for chunk in chunks]
    compressed.append(stream.flush())
    return b"".join(compressed)


@functools.lru_cache(maxsize=256)
def response_encoding(accept_encoding: bytes) -> str:
    """The encoding of the response to a request with this `Accept-Encoding`: "gzip", "deflate", or "" for none.

    The encoding with the highest weight wins; of those with equal weights, the first.
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

"""How a gRPC call ends: its status, as the header blocks that carry it (gRPC over HTTP/2, "Responses")."""

from __future__ import annotations

import string
import urllib.parse
from enum import IntEnum

from gateway.http2.headers import encode_headers
from schemas.errors import WeirError, overloaded

_MAX_DETAILS_BYTES = 2400
"""A status message travels percent-encoded, three bytes for one at worst, in the 8 KiB clients grant to metadata."""

_UNENCODED = "".join(sorted({*string.printable} - {*string.whitespace, "%"})) + " "
_OK_HEADERS = ((b":status", b"200"), (b"content-type", b"application/grpc"))

RESPONSE_HEADERS = {
    "": encode_headers(_OK_HEADERS),
    "gzip": encode_headers((*_OK_HEADERS, (b"grpc-encoding", b"gzip"))),
    "deflate": encode_headers((*_OK_HEADERS, (b"grpc-encoding", b"deflate"))),
}
"""The header block before the messages of a response, by the way they are compressed."""

OK_TRAILERS = encode_headers([(b"grpc-status", b"0")])
"""The header block after the messages of a call that went well."""


class Status(IntEnum):
    """The gRPC statuses that calls end with for reasons of the protocol; others come with a `WeirError`."""

    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class CallError(Exception):
    """A call that ends with `status`, and `details` for the caller, who should come again after `retry_after_s` if not 0.

    That is told twice: as HTTP does, for people and proxies, and as gRPC's clients understand it where they were told to
    retry (`grpc-retry-pushback-ms`, gRFC A6).
    """

    def __init__(self, status: int, details: str, retry_after_s: int = 0) -> None:
        super().__init__(details)
        self.status = status
        self.details = details
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, error: WeirError) -> CallError:
        """`error` as gRPC tells it."""
        return cls(error.grpc_status, error.message, error.retry_after_s)

    def trailers(self) -> bytes:
        """The header block that ends a response which has begun."""
        return encode_headers(self._fields())

    def response(self) -> bytes:
        """The header block that is all of the response."""
        # Clients that compressed in a way that is not known here learn which ways are.
        return encode_headers((*_OK_HEADERS, (b"grpc-accept-encoding", b"identity,deflate,gzip"), *self._fields()))

    def _fields(self) -> tuple[tuple[bytes, bytes], ...]:
        details = urllib.parse.quote(_shortened(self.details), safe=_UNENCODED, errors="replace")
        fields = (b"grpc-status", b"%d" % self.status), (b"grpc-message", details.encode())
        if not self.retry_after_s:
            return fields
        pushback = b"grpc-retry-pushback-ms", b"%d" % (1000 * self.retry_after_s)
        return *fields, (b"retry-after", b"%d" % self.retry_after_s), pushback


def shutting_down() -> WeirError:
    """What is told to those who come while the server stops."""
    return overloaded("GRPC server is shutting down and has stopped accepting new requests.")


def http_error(status: int) -> bytes:
    """The header block of a plain HTTP response, to what is no gRPC request."""
    return encode_headers([(b":status", b"%d" % status)])


def _shortened(message: str) -> str:
    """`message` as a gRPC status may carry it: the middle of a long one is left out."""
    encoded = message.encode(errors="replace")
    if len(encoded) <= _MAX_DETAILS_BYTES:
        return message
    half = _MAX_DETAILS_BYTES // 2
    return f"{encoded[:half].decode(errors='ignore')} … {encoded[-half:].decode(errors='ignore')}"

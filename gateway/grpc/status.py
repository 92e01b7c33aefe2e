"""The status of gRPC calls, and the header blocks that carry it (gRPC over HTTP/2, "Responses")."""

from __future__ import annotations

import string
import urllib.parse
from enum import IntEnum

from weir.gateway.http2.headers import encode_headers
from weir.runtime.containment import report
from weir.schemas.core.errors import WeirError, overloaded

_MAX_DETAILS_BYTES = 2400
"""A status message is percent-encoded, up to three bytes for one, in the 8 KiB that clients allow for metadata."""

_UNENCODED = "".join(sorted({*string.printable} - {*string.whitespace, "%"})) + " "
_OK_HEADERS = ((b":status", b"200"), (b"content-type", b"application/grpc"))

RESPONSE_HEADERS = {
    "": encode_headers(_OK_HEADERS),
    "gzip": encode_headers((*_OK_HEADERS, (b"grpc-encoding", b"gzip"))),
    "deflate": encode_headers((*_OK_HEADERS, (b"grpc-encoding", b"deflate"))),
}
"""The header block before the messages of a response, by their compression."""

OK_TRAILERS = encode_headers([(b"grpc-status", b"0")])
"""The header block after the messages of a successful call."""


class Status(IntEnum):
    """The gRPC statuses of protocol errors, and of calls without an error; other errors are a `WeirError`."""

    OK = 0
    UNKNOWN = 2
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class CallError(Exception):
    """Ends a call with `status` and `details`. The client should retry after `retry_after_s` unless it is 0.

    The delay is sent twice: as `retry-after` for people and proxies, and as `grpc-retry-pushback-ms` (gRFC A6) for gRPC
    clients with a retry policy.
    """

    def __init__(self, status: int, details: str, retry_after_s: int = 0) -> None:
        super().__init__(details)
        self.status = status
        self.details = details
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, error: WeirError) -> CallError:
        """`error` as a gRPC status."""
        return cls(error.grpc_status, error.message, error.retry_after_s)

    def trailers(self) -> bytes:
        """The header block that ends a response which has begun."""
        return encode_headers(self._fields())

    def response(self) -> bytes:
        """The header block that is all of the response."""
        # Tells a client with an unsupported compression which ones are supported.
        return encode_headers((*_OK_HEADERS, (b"grpc-accept-encoding", b"identity,deflate,gzip"), *self._fields()))

    def _fields(self) -> tuple[tuple[bytes, bytes], ...]:
        details = urllib.parse.quote(_shortened(self.details), safe=_UNENCODED, errors="replace")
        fields = (b"grpc-status", b"%d" % self.status), (b"grpc-message", details.encode())
        if not self.retry_after_s:
            return fields
        pushback = b"grpc-retry-pushback-ms", b"%d" % (1000 * self.retry_after_s)
        return *fields, (b"retry-after", b"%d" % self.retry_after_s), pushback


def call_error(error: Exception, place: str) -> CallError:
    """How a call ends that raised `error`. Reports an unexpected one at `place`; the client gets no internals of it."""
    if isinstance(error, CallError):
        return error
    if isinstance(error, WeirError):
        return CallError.of(error)
    report(place, error)
    return CallError(Status.INTERNAL, "internal server error")


def shutting_down() -> WeirError:
    """The error for requests that arrive while the server stops."""
    return overloaded("GRPC server is shutting down and has stopped accepting new requests.")


def http_error(status: int) -> bytes:
    """The header block of a plain HTTP response to a request that is not gRPC."""
    return encode_headers([(b":status", b"%d" % status)])


def _shortened(message: str) -> str:
    """`message` percent-encoded for a gRPC status, without the middle of a long one."""
    encoded = message.encode(errors="replace")
    if len(encoded) <= _MAX_DETAILS_BYTES:
        return message
    half = _MAX_DETAILS_BYTES // 2
    return f"{encoded[:half].decode(errors='ignore')} … {encoded[-half:].decode(errors='ignore')}"

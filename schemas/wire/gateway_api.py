"""Requests to the HTTP API of a gateway that travel on the bus, and the responses to them."""

# ruff: noqa: RUF012 - msgspec copies empty defaults for every record.

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from weir.schemas.wire.codec import Record

MAX_TARGET_LENGTH = 8192
"""Characters of the path with its query."""

MAX_HEADERS = 64
MAX_HEADER_LENGTH = 8192
"""Characters of one header's value."""

MAX_TIMEOUT_MS = 3_600_000

_Headers = Annotated[
    list[
        tuple[
            Annotated[str, Meta(max_length=256, pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")],
            Annotated[str, Meta(max_length=MAX_HEADER_LENGTH, pattern=r"^[\t\x20-\x7e\x80-\xff]*\Z")],
        ]
    ],
    Meta(max_length=MAX_HEADERS),
]


class ApiRequest(Record, frozen=True):
    """One request: `target` is the percent-encoded path with its query, as in the first line of HTTP.

    The gateway drops its response after `timeout_ms`, when the requester no longer waits for it.
    """

    method: Annotated[str, Meta(pattern=r"^[A-Z]{1,16}\Z")]
    target: Annotated[str, Meta(max_length=MAX_TARGET_LENGTH, pattern=r"^/[\x21-\x7e]*\Z")]
    headers: _Headers = []
    body: bytes = b""
    timeout_ms: Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)] = 10_000


class ApiResponse(Record, frozen=True):
    """The response of the API: the status and the headers of HTTP, and the whole body."""

    status: Annotated[int, Meta(ge=100, le=599)]
    headers: _Headers = []
    body: bytes = b""

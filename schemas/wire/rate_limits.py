"""Messages about rate limits: what a gateway asks the owner of the token buckets for, and what it gets.

Each list has one value for each kind of limit, in the order of `KINDS`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from weir.schemas.wire.codec import Message

KINDS = ("requests", "bytes")
"""The kinds of limits that are rates."""

MAX_ROWS = 1000
"""Owners of one message."""

_Amount = Annotated[float, Meta(ge=0, le=1e18)]
Amounts = tuple[_Amount, _Amount]
"""A number for each of `KINDS`."""


class TokenRow(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway asks for one owner of requests.

    `rates` are its limits a second, 0 for none. `wanted` are tokens of which fewer than `least` help nobody; `returned`
    those that were given before and not used. `used` were used without having been given, within the last `alone_s` seconds
    in which no owner of the buckets answered (0: a moment ago).
    """

    owner: Annotated[str, Meta(max_length=1024)]
    rates: Amounts
    wanted: Amounts
    least: Amounts
    returned: Amounts = (0.0, 0.0)
    used: Amounts = (0.0, 0.0)
    alone_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class TokenGrant(msgspec.Struct, array_like=True, frozen=True):
    """The tokens that a gateway gets, and where it gets fewer than it wanted, in how many seconds to ask again."""

    tokens: Amounts
    wait_s: Amounts


class TokenRequest(Message, frozen=True):
    """A request of a gateway to the owner of the buckets."""

    rows: Annotated[list[TokenRow], Meta(max_length=MAX_ROWS)]


class TokenResponse(Message, frozen=True):
    """The response: a grant for each row of the request, in their order."""

    grants: Annotated[list[TokenGrant], Meta(max_length=MAX_ROWS)]

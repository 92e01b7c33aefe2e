"""JSON documents as Triton reads them: the parser, and typed access to members, with Triton's error texts.

orjson parses what it can; the rest goes to rapidjson, the parser that Triton uses, whose texts clients know. Triton
accepts the literals NaN, Infinity and Inf, with or without a minus, which standard JSON lacks. Integers beyond 64 bits
become floats in both parsers, so no document can hold a number of unbounded size.

A member of a wrong type is an INTERNAL error, as in Triton, whose clients see status 500.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson
import rapidjson

from weir.schemas.core.errors import WeirError, internal

MAX_JSON_DEPTH = 100
"""How deep the arrays of `data` may nest; Triton's limit."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"\d{19}")
_RAPIDJSON_ERROR = re.compile(r"Parse error at offset (\d+): (.*)", re.DOTALL)


def load_json(text: bytes | memoryview) -> Any:
    """The value `text` holds. Raises WeirError (INTERNAL, as in Triton) for what is not JSON in UTF-8."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _load_leniently(bytes(text))


def too_deep() -> WeirError:
    """The refusal of JSON that nests too deep."""
    return internal(f"JSON nesting depth exceeds maximum allowed limit ({MAX_JSON_DEPTH})")


def _load_leniently(text: bytes) -> Any:
    text = text.removeprefix(_BYTE_ORDER_MARK)
    # Native numbers keep integers within 64 bits, at the price of a float's last bit: only where there are such ones.
    numbers = rapidjson.NM_NATIVE if _LONG_NUMBER.search(text) else 0
    try:
        return rapidjson.loads(text, number_mode=rapidjson.NM_NAN | numbers)
    except RecursionError:
        raise too_deep() from None
    except UnicodeDecodeError as error:
        raise _malformed("Invalid encoding in string.", error.start) from None
    except rapidjson.JSONDecodeError as error:
        found = _RAPIDJSON_ERROR.fullmatch(str(error))
        raise (_malformed(found[2], int(found[1])) if found else _malformed(str(error), 0)) from None


def _malformed(reason: str, offset: int) -> WeirError:
    return internal(f"failed to parse the request JSON buffer: {reason} at {offset}")


NO_MEMBERS: Mapping[str, Any] = {}
"""What a value that is not an object has."""


def members_of(value: Any) -> Mapping[str, Any]:
    """The members of a JSON object; none for any other value."""
    return value if type(value) is dict else NO_MEMBERS


def string(value: Any, field: str) -> str:
    """`value` as text."""
    if type(value) is str:
        return value
    raise wrong_type(field, "string")


def boolean(value: Any, field: str) -> bool:
    """`value` as true or false."""
    if type(value) is bool:
        return value
    raise wrong_type(field, "boolean")


def unsigned(value: Any, field: str) -> int:
    """`value` as an integer from 0 to 2^64 - 1 (JSON integers beyond that are floats by the time they get here)."""
    if type(value) is int and value >= 0:
        return value
    raise wrong_type(field, "unsigned-integer")


def parameter_value(value: str | float) -> str | float:
    """`value` as a caller's own parameter: an integer beyond int64 is a double, as in Triton."""
    return float(value) if type(value) is int and value >= 2**63 else value


def string_member(members: Mapping[str, Any], field: str) -> str:
    """The text of a member that must be there."""
    value = members.get(field)
    if type(value) is str:
        return value
    raise wrong_type(field, "string") if field in members else missing(field)


def array_member(members: Mapping[str, Any], field: str) -> list[Any]:
    """The elements of a member that must be there."""
    value = members.get(field)
    if type(value) is list:
        return value
    raise wrong_type(field, "array") if field in members else missing(field)


def missing(field: str) -> WeirError:
    """The error for an object that lacks `field`."""
    return internal(f"Unable to parse '{field}': attempt to access non-existing object member '{field}'")


def wrong_type(field: str, kind: str) -> WeirError:
    """The error for a `field` that is not a `kind` ("string", "boolean", "array", "unsigned-integer" …)."""
    return internal(f"Unable to parse '{field}': attempt to access JSON non-{kind} as {kind}")

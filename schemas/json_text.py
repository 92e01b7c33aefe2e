"""Reading JSON as Triton reads it: orjson where it can, else the parser Triton itself uses, whose texts clients know.

Triton takes the literals NaN, Infinity and Inf, with or without a minus, which standard JSON lacks. Integers beyond 64
bits become floats in both parsers, so no document can hold a number of unbounded size.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
import rapidjson

from schemas.errors import WeirError, internal

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

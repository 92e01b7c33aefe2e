"""Responses of the console's API, and the reading of parameters."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

_LARGEST_INTEGER = 1 << 53


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON. It may contain numpy arrays and numbers."""
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(body, status, media_type="application/json")


def error_response(status: int, text: str) -> Response:
    """An error in the form of the inference API: `{"error": text}`."""
    return json_response({"error": text}, status)


def read_integer(text: str) -> int | None:
    """The integer in a parameter, of at most 53 bits; None for anything else."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 16:
        return None
    value = int(text)
    return value if abs(value) <= _LARGEST_INTEGER else None

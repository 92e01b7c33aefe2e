"""Model versions as gRPC clients spell them: text that Triton reads with C's `strtol`."""

from __future__ import annotations

import re

from schemas.errors import invalid

_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_MAX_VERSION = 2**63 - 1


def read_version(text: str) -> str:
    """The version in the form in which models name theirs, "" for the latest. Raises WeirError (INVALID_ARG)."""
    if not text:
        return text
    found = _NUMBER.match(text)
    # Twenty characters hold any number of 64 bits; int() is not given more to work on.
    digits = found[1].lstrip("+-").lstrip("0") if found else ""
    if found is None or len(digits) > 19 or int(digits or 0) > _MAX_VERSION + found[1].startswith("-"):
        raise invalid(
            f"failed to get model version from specified version string '{text}' (details: stol), version should be an "
            "integral value > 0"
        )
    if digits and found[1].startswith("-"):
        raise invalid(f"invalid model version specified '{text}' , version should be an integral value > 0")
    return digits or "0"

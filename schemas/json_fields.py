"""Typed access to the members of a parsed JSON document, with the texts Triton answers for a wrong type.

All of them are INTERNAL errors, as in Triton, whose clients see status 500 for a field of the wrong type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.errors import WeirError, internal

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

"""Whether BYTES content is what it should be: so many strings, each after its length, and nothing else.

Texts and the order of checks are Triton's core's, compared with a running Triton 2.51.
"""

from __future__ import annotations

from schemas.errors import invalid
from schemas.request_errors import refused

_LENGTH_BYTES = 4


def check_strings(data: bytes | memoryview, expected: int, request_id: str, name: str, model: str) -> None:
    """Walk the length prefixes of `data`, the content of input `name`. Raises WeirError (INVALID_ARG).

    It must hold `expected` whole elements and nothing else.
    """
    where = f"inference input '{name}'"
    count = position = 0
    end = len(data)
    while position < end:
        start = position + _LENGTH_BYTES
        if start > end:
            raise refused(
                request_id,
                f"incomplete string length indicator for {where} for model '{model}', expecting {_LENGTH_BYTES} bytes "
                f"but only {end - position} bytes available. Please make sure the string length indicator is in one "
                "buffer.",
            )
        count += 1
        if count > expected:
            raise refused(
                request_id,
                f"unexpected number of string elements {count} for {where} for model '{model}', expecting {expected}",
            )
        length = int.from_bytes(data[position:start], "little")
        position = start + length
    if count != expected:
        raise refused(request_id, f"expected {expected} string elements for {where} for model '{model}', got {count}")
    if position > end:
        raise invalid(
            f"incomplete string data for {where}, expecting string of length {length} "
            f"but only {end - start} bytes available"
        )

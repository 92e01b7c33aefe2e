"""Whether BYTES content is what it should be: so many strings, each after its length, and nothing else.

To walk 200 MiB of empty strings takes many seconds, so an event loop walks at most `MAX_WALKED_BYTES`. Of larger content it
checks only whether it can hold that many strings (`check_string_count`); the worker that reads it walks it, in the thread
of the model's instance, before the request joins a batch.

Texts and the order of checks are Triton's core's, compared with a running Triton 2.51.
"""

from __future__ import annotations

import struct

from schemas.errors import WeirError, invalid
from schemas.request_errors import refused

MAX_WALKED_BYTES = 256 * 1024
"""Content that an event loop may walk: about 65 000 strings, or 6 ms, at most."""

_LENGTH_BYTES = 4
_length_at = struct.Struct("<I").unpack_from


def check_strings(data: bytes | memoryview, expected: int, request_id: str, name: str, model: str) -> None:
    """Walk the length prefixes of `data`, the content of input `name`. Raises WeirError (INVALID_ARG).

    It must hold `expected` whole elements and nothing else.
    """
    where = f"inference input '{name}'"
    count = position = 0
    end = len(data)
    last = end - _LENGTH_BYTES
    length = 0
    while position <= last:
        count += 1
        if count > expected:
            raise _too_many(request_id, count, expected, where, model)
        (length,) = _length_at(data, position)
        position += _LENGTH_BYTES + length
    if position < end:
        raise refused(
            request_id,
            f"incomplete string length indicator for {where} for model '{model}', expecting {_LENGTH_BYTES} bytes "
            f"but only {end - position} bytes available. Please make sure the string length indicator is in one "
            "buffer.",
        )
    if count != expected:
        raise refused(request_id, f"expected {expected} string elements for {where} for model '{model}', got {count}")
    if position > end:
        raise invalid(
            f"incomplete string data for {where}, expecting string of length {length} "
            f"but only {end - position + length} bytes available"
        )


def check_string_count(size: int, expected: int, request_id: str, name: str, model: str) -> None:
    """Raises WeirError (INVALID_ARG) where `size` bytes of content can't hold `expected` strings, whatever they are."""
    where = f"inference input '{name}'"
    most = size // _LENGTH_BYTES
    if expected > most:
        text = f"expected {expected} string elements for {where} for model '{model}', got at most {most}"
        raise refused(request_id, text)
    if size and not expected:
        raise _too_many(request_id, 1, 0, where, model)


def _too_many(request_id: str, count: int, expected: int, where: str, model: str) -> WeirError:
    return refused(
        request_id,
        f"unexpected number of string elements {count} for {where} for model '{model}', expecting {expected}",
    )

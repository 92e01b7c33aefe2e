"""Why a request that is answered later can't name memory of its client."""

from __future__ import annotations

from schemas.errors import invalid
from schemas.tensors import ClientRef


def no_region(_name: str, _offset: int, _size: int) -> ClientRef:
    """A `FindRegion` that refuses: until the request is run, the client may have put something else there, or be gone."""
    raise invalid("shared memory regions can't be used in a request that is answered later")

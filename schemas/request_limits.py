"""`RequestLimits`: how much one request may ask of the parser, whichever door it comes through."""

from __future__ import annotations

from typing import NamedTuple


class RequestLimits(NamedTuple):
    """What a request may hold at most.

    `input_size` is in bytes and bounds the JSON, each tensor given as JSON, and a raw body; `json_values` bounds the
    elements and members of the whole document; `id_length` and `correlation_id_length` (Triton's) are in characters.
    """

    input_size: int = 64 << 20
    json_values: int = 32_000_000
    tensors: int = 256
    dims: int = 16
    parameters: int = 64
    id_length: int = 4096
    correlation_id_length: int = 128


DEFAULT_LIMITS = RequestLimits()

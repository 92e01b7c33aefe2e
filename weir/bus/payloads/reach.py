"""`process_reach`: what of this process's payloads other hosts get: any payload, or only what a message carries."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache

from weir.bus.naming.identity import shares_memory
from weir.bus.nats.connection import Bus
from weir.bus.payloads.arena import INLINE_LIMIT_BYTES, REMOTE_INLINE_LIMIT_BYTES
from weir.schemas.config.model_config import ModelOutput
from weir.schemas.core.tensors import BY_CONFIG_NAME

MAX_INLINE_RESPONSE_BYTES = 4 << 20
"""Outputs of one response that may travel inside a message if they lie in no shared memory, or the reader can't fetch them.
Less where the broker takes less: it closes the connection of who sends it more than its `max_payload`."""

_SPARE = 16
"""A sixteenth of the largest message is left for what is not outputs."""

_STRING_BYTES = 4
"""The least that an element of strings takes."""


class PayloadReach:
    """`is_served`: whether processes of other hosts can fetch payloads of this one, by `--payload-listen`.

    Without it large content travels inside messages. `message_bytes` is the most that a response then has.
    """

    def __init__(self) -> None:
        self.is_served = True
        self.message_bytes = MAX_INLINE_RESPONSE_BYTES

    def inline_limit_bytes(self, is_shared: bool) -> int:
        """How large a tensor travels inside a message, to a process that shares memory with this one or not."""
        if is_shared:
            return INLINE_LIMIT_BYTES
        return REMOTE_INLINE_LIMIT_BYTES if self.is_served else sys.maxsize

    def includes(self, reader: str) -> bool:
        """Whether the process named `reader` can read or fetch payloads of this one."""
        return self.is_served or shares_memory(reader)

    def problem_of(self, outputs: Sequence[ModelOutput]) -> str:
        """Why no response of a model with these outputs can be sent to another host; "" if one can be."""
        least_bytes = min(map(_least_bytes, outputs), default=0)
        if self.is_served or least_bytes <= self.message_bytes:
            return ""
        return (
            f"its outputs have at least {least_bytes} bytes, a message to another host at most {self.message_bytes}: "
            "its worker needs --payload-listen"
        )

    def set(self, bus: Bus, is_served: bool) -> None:
        """Sets what counts in this process, once it is connected."""
        self.is_served = is_served
        most_bytes = bus.max_payload_bytes
        self.message_bytes = min(MAX_INLINE_RESPONSE_BYTES, most_bytes - most_bytes // _SPARE)


def _least_bytes(output: ModelOutput) -> int:
    """The size of an output for one row; 0 with variable dimensions."""
    datatype = BY_CONFIG_NAME.get(output.data_type)
    element_bytes = 0 if datatype is None else datatype.size_bytes or _STRING_BYTES
    return math.prod(max(0, size) for size in output.dims) * element_bytes


@cache
def process_reach() -> PayloadReach:
    """The reach of this process."""
    return PayloadReach()

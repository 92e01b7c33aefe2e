"""Partitions: a model hotter than one scheduler has several queues, which different schedulers may own.

A model says how many by parameter `weir_partitions` of its configuration, for Triton's has no field for it. Whoever asks
the model chooses the queue. All requests of a sequence go to one, which a hash of the correlation id tells: the same in
every process of every host. Any other request may go to any of them.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

from schemas.placement import BadDeclaration

if TYPE_CHECKING:
    from schemas.model_config import ModelConfig

PARTITIONS = "weir_partitions"
"""The name of the parameter."""

MAX_PARTITIONS = 64
"""Queues that one model may have."""


def partitions_of(config: ModelConfig) -> int:
    """How many queues the model has. One that declares nonsense has one: where it is loaded it is refused."""
    if PARTITIONS not in config.parameters:
        return 1
    return _number(config.parameter(PARTITIONS)) or 1


def check_partitions(config: ModelConfig) -> None:
    """Raises BadDeclaration where the parameter can't be made sense of."""
    if PARTITIONS in config.parameters and not _number(config.parameter(PARTITIONS)):
        text = config.parameter(PARTITIONS)
        raise BadDeclaration(PARTITIONS, f"must be a whole number from 1 to {MAX_PARTITIONS}, got '{text}'")


@lru_cache(maxsize=1 << 14)  # a sequence has many requests, and the hash costs more than all else that is chosen
def partition_of(correlation_id: int | str, partitions: int) -> int:
    """The partition of a sequence. A number and a text that spells it are different ids, as they are in Triton."""
    text = correlation_id if isinstance(correlation_id, str) else f"\0{correlation_id}"
    digest = hashlib.blake2s(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % partitions


def _number(text: str) -> int:
    """The number that the text is, 0 for none that a model may declare."""
    is_number = text.isascii() and text.isdigit() and len(text) <= 4
    return int(text) if is_number and int(text) <= MAX_PARTITIONS else 0

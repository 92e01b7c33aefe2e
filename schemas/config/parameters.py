"""Weir's own parameters of a model's configuration: what it needs, its partitions, and the bounds of its queue on disk.

Triton's configuration has no fields for these, so they are entries of `parameters`:

- `weir_memory_bytes`: memory for models that it takes up on a worker (a whole number);
- `weir_requires`: resources that it takes up, by name: `a100=1,licence=2`; a name alone means one;
- `weir_workers`: the number of workers that hold it at most; without it, all that can;
- `weir_partitions`: the number of queues of its live requests, which different schedulers may own;
- `weir_queue_max_messages`: durable requests that may wait for it;
- `weir_queue_max_bytes`: the bytes of those requests together;
- `weir_queue_max_age_secs`: how long one may wait, in seconds; then it expires;
- `weir_traffic`, `weir_traffic_sticky`: how requests that name no version are split (`weir.schemas.config.traffic`).

A model without the first three is placed on every worker whose repositories have it. Without one of the last three, the
options of the gateway apply.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:  # the command line checks names of resources, and imports no configurations
    from weir.schemas.config.model_config import ModelConfig

MEMORY_BYTES, REQUIRES, WORKERS = "weir_memory_bytes", "weir_requires", "weir_workers"
"""The names of the parameters."""

MAX_AMOUNT = (1 << 63) - 1
MAX_RESOURCES = 64
"""Resources that one model may name, or one worker."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


_Amount = Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]


class ResourceAmounts(msgspec.Struct, frozen=True):
    """An amount of memory in bytes, and of each resource by name."""

    memory_bytes: _Amount = 0
    resources: Annotated[dict[str, _Amount], Meta(max_length=MAX_RESOURCES)] = {}


class ModelNeeds(msgspec.Struct, frozen=True):
    """What a model takes up on each worker that holds it, and how many workers hold it at most (0: all)."""

    takes: ResourceAmounts = msgspec.field(default_factory=ResourceAmounts)
    workers: _Amount = 0


def needs_of(config: ModelConfig) -> ModelNeeds | None:
    """The needs that the configuration declares, None where it declares none. Raises ParameterError."""
    texts = {name: config.parameter(name) for name in (MEMORY_BYTES, REQUIRES, WORKERS) if name in config.parameters}
    if not texts:
        return None
    memory_bytes = _amount(MEMORY_BYTES, texts[MEMORY_BYTES]) if MEMORY_BYTES in texts else 0
    workers = _amount(WORKERS, texts[WORKERS]) if WORKERS in texts else 0
    if WORKERS in texts and not workers:
        raise ParameterError(WORKERS, "must be at least 1")
    return ModelNeeds(ResourceAmounts(memory_bytes, _resources(texts.get(REQUIRES, ""))), workers)


class ParameterError(ValueError):
    """A parameter has an invalid value: the name of the parameter, and why."""

    def __init__(self, parameter: str, reason: str) -> None:
        super().__init__(f"parameter '{parameter}' {reason}")
        self.parameter = parameter


def read_resource(text: str) -> tuple[str, int]:
    """The name and the amount in `NAME=COUNT`, or in `NAME`, which is one. Raises ValueError with what is wrong."""
    name, equals, count = text.strip().partition("=")
    if not _NAME.fullmatch(name):
        raise ValueError(f"'{name}' is not a resource name: use 1 to 64 letters, digits, '_', '.' and '-'")
    if not equals:
        return name, 1
    if not (count.isascii() and count.isdigit() and int(count) <= MAX_AMOUNT):
        raise ValueError(f"'{count}' is not an amount of resource '{name}': expected a whole number")
    return name, int(count)


def _resources(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in filter(str.strip, text.split(",")):
        try:
            name, count = read_resource(part)
        except ValueError as error:
            raise ParameterError(REQUIRES, f"is invalid: {error}") from error
        if name in found:
            raise ParameterError(REQUIRES, f"names '{name}' twice")
        found[name] = count
    if len(found) > MAX_RESOURCES:
        raise ParameterError(REQUIRES, f"names more than {MAX_RESOURCES} resources")
    return found


def _amount(parameter: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_AMOUNT):
        raise ParameterError(parameter, f"must be a whole number, got '{text}'")
    return int(text)


PARTITIONS = "weir_partitions"
"""The name of the parameter."""

MAX_PARTITIONS = 64
"""Queues that one model may have."""


def partitions_of(config: ModelConfig) -> int:
    """How many queues the model has. An invalid parameter counts as 1 here; loading the model fails."""
    if PARTITIONS not in config.parameters:
        return 1
    return _partition_count(config.parameter(PARTITIONS)) or 1


def check_partitions(config: ModelConfig) -> None:
    """Raises ParameterError for an invalid number of partitions."""
    if PARTITIONS in config.parameters and not _partition_count(config.parameter(PARTITIONS)):
        text = config.parameter(PARTITIONS)
        raise ParameterError(PARTITIONS, f"must be a whole number from 1 to {MAX_PARTITIONS}, got '{text}'")


@lru_cache(maxsize=1 << 14)  # a sequence has many requests, and the hash costs more than all else that is chosen
def partition_of(correlation_id: int | str, partitions: int) -> int:
    """The partition of a sequence. A number and a text that spells it are different ids, as they are in Triton."""
    text = correlation_id if isinstance(correlation_id, str) else f"\0{correlation_id}"
    digest = hashlib.blake2s(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % partitions


def _partition_count(text: str) -> int:
    """The number in the text, 0 for a number that a model may not declare."""
    is_number = text.isascii() and text.isdigit() and len(text) <= 4
    return int(text) if is_number and int(text) <= MAX_PARTITIONS else 0


QUEUE_MAX_MESSAGES, QUEUE_MAX_BYTES, QUEUE_MAX_AGE = (
    "weir_queue_max_messages",
    "weir_queue_max_bytes",
    "weir_queue_max_age_secs",
)

_MAX_DIGITS = 15


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The bounds of one model's queue on disk."""

    max_messages: int
    max_bytes: int
    max_age_s: float

    @property
    def max_age_ms(self) -> int:
        """`max_age_s` in milliseconds."""
        return int(self.max_age_s * 1000)


def queue_bounds(config: ModelConfig | None, default: QueueBounds) -> QueueBounds:
    """The bounds of a model; `default` for bounds that it does not declare, and for an unknown model (None).

    An invalid parameter counts as not declared here; loading the model fails.
    """
    if config is None or not config.parameters.keys() & {QUEUE_MAX_MESSAGES, QUEUE_MAX_BYTES, QUEUE_MAX_AGE}:
        return default
    return QueueBounds(
        _bound(config, QUEUE_MAX_MESSAGES) or default.max_messages,
        _bound(config, QUEUE_MAX_BYTES) or default.max_bytes,
        _bound(config, QUEUE_MAX_AGE) or default.max_age_s,
    )


def queue_bounds_problem(config: ModelConfig) -> tuple[str, str] | None:
    """(parameter, what is wrong with it) of the first invalid parameter, None where all are valid."""
    for name in (QUEUE_MAX_MESSAGES, QUEUE_MAX_BYTES, QUEUE_MAX_AGE):
        if name in config.parameters and not _bound(config, name):
            return name, f"must be a whole number above 0, got '{config.parameter(name)}'"
    return None


def _bound(config: ModelConfig, name: str) -> int:
    text = config.parameter(name)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else 0

"""What a model needs of the workers that hold it, and what a worker has for models: the facts of placement.

A model declares its needs by `parameters` of its configuration, for Triton's configuration has no room for them:

- `weir_memory_bytes`: how much of a worker's memory for models it takes up (a whole number);
- `weir_requires`: resources that it takes up, by name: `a100=1,licence=2`; a name alone stands for one;
- `weir_workers`: on how many workers it is at most; without it, on all that have it and have room.

A model without any of these is on every worker that has it, and nothing is asked or told about it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line checks names of resources, and need not know what a configuration is
    from schemas.model_config import ModelConfig

MEMORY_BYTES, REQUIRES, WORKERS = "weir_memory_bytes", "weir_requires", "weir_workers"
"""The names of the parameters."""

MAX_AMOUNT = (1 << 63) - 1
MAX_RESOURCES = 64
"""Resources that one model may name, or one worker."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Amounts:
    """So much memory in bytes, and so much of each resource."""

    memory_bytes: int = 0
    resources: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model takes up on each worker that holds it, and on how many it is at most (0: on all)."""

    takes: Amounts = field(default_factory=Amounts)
    workers: int = 0


def needs_of(config: ModelConfig) -> ModelNeeds | None:
    """What the configuration declares, None where it declares nothing. Raises BadDeclaration."""
    texts = {name: config.parameter(name) for name in (MEMORY_BYTES, REQUIRES, WORKERS) if name in config.parameters}
    if not texts:
        return None
    memory_bytes = _amount(MEMORY_BYTES, texts[MEMORY_BYTES]) if MEMORY_BYTES in texts else 0
    workers = _amount(WORKERS, texts[WORKERS]) if WORKERS in texts else 0
    if WORKERS in texts and not workers:
        raise BadDeclaration(WORKERS, "must be at least 1")
    return ModelNeeds(Amounts(memory_bytes, _resources(texts.get(REQUIRES, ""))), workers)


class BadDeclaration(ValueError):
    """A parameter can't be made sense of: its name, and why."""

    def __init__(self, parameter: str, reason: str) -> None:
        super().__init__(f"parameter '{parameter}' {reason}")
        self.parameter = parameter


def read_resource(text: str) -> tuple[str, int]:
    """The name and the amount in `NAME=COUNT`, or in `NAME`, which is one. Raises ValueError with what is wrong."""
    name, equals, count = text.strip().partition("=")
    if not _NAME.fullmatch(name):
        raise ValueError(f"'{name}' is no name of a resource: letters, digits, '_', '.' and '-', 64 at most")
    if not equals:
        return name, 1
    if not (count.isascii() and count.isdigit() and int(count) <= MAX_AMOUNT):
        raise ValueError(f"'{count}' is no amount of resource '{name}': it is a whole number")
    return name, int(count)


def _resources(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in filter(str.strip, text.split(",")):
        try:
            name, count = read_resource(part)
        except ValueError as error:
            raise BadDeclaration(REQUIRES, f"can't be read: {error}") from error
        if name in found:
            raise BadDeclaration(REQUIRES, f"names '{name}' twice")
        found[name] = count
    if len(found) > MAX_RESOURCES:
        raise BadDeclaration(REQUIRES, f"names more than {MAX_RESOURCES} resources")
    return found


def _amount(parameter: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_AMOUNT):
        raise BadDeclaration(parameter, f"must be a whole number, got '{text}'")
    return int(text)

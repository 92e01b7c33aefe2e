"""`ProcessLimits`: for how long, and how large, the process of a Python model may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from schemas.errors import invalid
from schemas.model_config import ModelConfig

EXECUTION_TIMEOUT = "execution-timeout-ms"
MEMORY_LIMIT = "memory-limit-bytes"
STUB_TIMEOUT = "stub-timeout-seconds"
"""Settings of the backend (`--backend-config=python,<name>=<value>`). The first two are also parameters of models."""

START_TIMEOUT_S = 120.0
"""How long a process may take until its model is loaded, where `stub-timeout-seconds` says nothing."""

HARD_FACTOR = 2
"""A process that holds so many times its limit is killed, whatever it does."""


class Verdict(Enum):
    """What is to become of a process."""

    FINE = "goes on"
    HUNG = "is killed: it is silent for too long"
    LARGE = "is replaced, between two batches"
    RUNAWAY = "is killed: it is far too large"


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """See the module. 0 is none.

    `execution_timeout_s` is for one `execute`, of a decoupled model for the time between two signs of life while requests
    are open. `memory_limit_bytes` is of resident memory.
    """

    execution_timeout_s: float = 0.0
    memory_limit_bytes: int = 0
    start_timeout_s: float = START_TIMEOUT_S

    @classmethod
    def of(cls, config: ModelConfig, settings: Mapping[str, str]) -> ProcessLimits:
        """Those of a model: its own parameters come before the backend's settings.

        Raises WeirError (INVALID_ARG) for a value that is not a whole number.
        """
        return cls(
            _number(config, settings, EXECUTION_TIMEOUT) / 1000,
            _number(config, settings, MEMORY_LIMIT),
            _whole(settings.get(STUB_TIMEOUT, ""), STUB_TIMEOUT) or START_TIMEOUT_S,
        )

    @property
    def look_every_s(self) -> float:
        """How often somebody should look; 0 for never."""
        timeout_s = self.execution_timeout_s / 10 if self.execution_timeout_s else 0.25
        if not self.execution_timeout_s and not self.memory_limit_bytes:
            return 0.0
        return min(max(timeout_s, 0.01), 0.1 if self.memory_limit_bytes else 0.25)

    def verdict(self, silent_s: float | None, resident_bytes: int) -> Verdict:
        """What becomes of a process that has been silent for so long while it has something to do (None: nothing)."""
        if self.execution_timeout_s and silent_s is not None and silent_s > self.execution_timeout_s:
            return Verdict.HUNG
        if self.memory_limit_bytes and resident_bytes > HARD_FACTOR * self.memory_limit_bytes:
            return Verdict.RUNAWAY
        if self.memory_limit_bytes and resident_bytes > self.memory_limit_bytes:
            return Verdict.LARGE
        return Verdict.FINE


def _number(config: ModelConfig, settings: Mapping[str, str], name: str) -> int:
    parameter = "weir_" + name.replace("-", "_")
    own = config.parameter(parameter)
    return (
        _whole(own, f"parameter {parameter} of model '{config.name}'") if own else _whole(settings.get(name, ""), name)
    )


def _whole(text: str, name: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise invalid(f"{name} must be a whole number, 0 for none, not '{text}'")
    return int(text)

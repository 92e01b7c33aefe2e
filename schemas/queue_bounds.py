"""How much may wait for a model on disk, as its configuration says.

Triton's configuration has no place for it, so these are `parameters` of the model, each a whole number above 0:

- `weir_queue_max_messages`: durable requests that may wait for it;
- `weir_queue_max_bytes`: their bytes together;
- `weir_queue_max_age_secs`: for how long one may wait, in seconds; then it ends as expired.

What a model doesn't say is as the options of the gateway say.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.model_config import ModelConfig

MAX_MESSAGES, MAX_BYTES, MAX_AGE = "weir_queue_max_messages", "weir_queue_max_bytes", "weir_queue_max_age_secs"

_MAX_DIGITS = 15


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """What may wait for one model."""

    max_messages: int
    max_bytes: int
    max_age_s: float

    @property
    def max_age_ms(self) -> int:
        """The same in milliseconds."""
        return int(self.max_age_s * 1000)


def queue_bounds(config: ModelConfig | None, default: QueueBounds) -> QueueBounds:
    """The bounds of a model; `default` for what it doesn't say, and for a model that nobody knows (None).

    A parameter that makes no sense is taken as not said: where the model is loaded it is refused.
    """
    if config is None or not config.parameters.keys() & {MAX_MESSAGES, MAX_BYTES, MAX_AGE}:
        return default
    return QueueBounds(
        _number(config, MAX_MESSAGES) or default.max_messages,
        _number(config, MAX_BYTES) or default.max_bytes,
        _number(config, MAX_AGE) or default.max_age_s,
    )


def queue_bounds_problem(config: ModelConfig) -> tuple[str, str] | None:
    """(parameter, what is wrong with it) of the first one that makes no sense."""
    for name in (MAX_MESSAGES, MAX_BYTES, MAX_AGE):
        if name in config.parameters and not _number(config, name):
            return name, f"must be a whole number above 0, got '{config.parameter(name)}'"
    return None


def _number(config: ModelConfig, name: str) -> int:
    text = config.parameter(name)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else 0

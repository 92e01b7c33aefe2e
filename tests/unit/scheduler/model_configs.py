"""Configurations of the dynamic batcher for models in simulations."""

from __future__ import annotations

from typing import Any

from schemas.model_config import ModelConfig

MAX_QUEUE_SIZE = 12
MAX_BATCH_SIZE = 4


def config(delay_us: int = 0, preferred: tuple[int, ...] = (), **batching: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "name": "model",
            "max_batch_size": MAX_BATCH_SIZE,
            "dynamic_batching": {
                "max_queue_delay_microseconds": delay_us,
                "preferred_batch_size": list(preferred),
                **batching,
            },
        }
    )


def policy(max_size: int = 0, timeout_us: int = 0, action: str = "REJECT", override: bool = False) -> dict[str, Any]:
    return {
        "max_queue_size": max_size,
        "default_timeout_microseconds": timeout_us,
        "timeout_action": action,
        "allow_timeout_override": override,
    }


CONFIGS = [
    config(),
    config(delay_us=100),
    config(delay_us=100, preferred=(2, 4)),
    ModelConfig.model_validate({"name": "model", "max_batch_size": MAX_BATCH_SIZE}),
    ModelConfig.model_validate(
        {
            "name": "model",
            "max_batch_size": MAX_BATCH_SIZE,
            "dynamic_batching": {},
            "model_transaction_policy": {"decoupled": True},
        }
    ),
    config(default_queue_policy=policy(MAX_QUEUE_SIZE)),
    config(delay_us=100, preserve_ordering=True, default_queue_policy=policy(timeout_us=1_500)),
    config(priority_levels=3, default_priority_level=2),
    config(priority_queue_policy={1: policy(1, 1_000)}),
    config(
        priority_levels=2**64 - 1,
        default_priority_level=2**63,
        default_queue_policy=policy(3, 2_000, "DELAY", override=True),
        priority_queue_policy={1: policy(), 2: policy(2, 1_000, override=True)},
    ),
]

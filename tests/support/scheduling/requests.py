"""Requests as policies receive them, in frames that count their notifications, and configurations of the batcher."""

from __future__ import annotations

import gc
from itertools import count
from typing import Any

from weir.scheduler.batching.former import Former
from weir.scheduler.batching.request import QueuedRequest, requests_of
from weir.scheduler.batching.request_queue import Queue
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.wire.calls import RequestEnvelope

LATEST = -1
BODY = b"body"


class CountingFrame:
    """A frame of `size` requests that remembers how many of them have ended."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.ended = 0

    def requests_ended(self, requests: int) -> None:
        self.ended += requests


def part(
    key: int,
    version: int = LATEST,
    batch_size: int = 1,
    shape_key: str = "",
    body: bytes = BODY,
    priority: int = 0,
    timeout_us: int = 0,
    deadline_ms: int = 0,
    lane: int = 0,
) -> RequestEnvelope:
    return RequestEnvelope(key, version, batch_size, shape_key, priority, timeout_us, deadline_ms, 0, 0, "", body, lane)


_keys = count(1)


def request(
    now_us: int = 0,
    *,
    key: int | None = None,
    gateway: str = "gateway",
    version: int = LATEST,
    batch_size: int = 1,
    shape_key: str = "",
    body: bytes = BODY,
    priority: int = 0,
    timeout_us: int = 0,
    deadline_ms: int = 0,
    lane: int = 0,
) -> QueuedRequest:
    """One request in a frame of its own. The policy clock is unix time."""
    number = next(_keys) if key is None else key
    row = part(number, version, batch_size, shape_key, body, priority, timeout_us, deadline_ms, lane)
    return requests_of(gateway, [row], now_us, CountingFrame())[0]


def keys(requests: list[QueuedRequest] | None) -> list[int] | None:
    return None if requests is None else [request.key for request in requests]


class FormedQueue(Queue):
    """A queue with the rule by which batches are taken from it."""

    def __init__(self, former: Former) -> None:
        super().__init__(former.rules)
        self.former = former

    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        return self.former.next(self, now_us, full_only)

    def ready_at_us(self) -> int:
        return self.former.ready_at_us(self)


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


def requests_in_memory() -> int:
    """How many requests anything still refers to."""
    gc.collect()
    return sum(type(found) is QueuedRequest for found in gc.get_objects())

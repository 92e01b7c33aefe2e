"""`InferRequest` and `InferResponse`: one inference, in the same form for all frontends, and the lanes it may take."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from weir.schemas.core.tensors import ClientRef, Tensor

SEQUENCE_START = 1
SEQUENCE_END = 2

Parameters = dict[str, Any]
"""KServe request or response parameters: str, int, bool or float values."""


class Lane(IntEnum):
    """The lanes of a model's queue, the most urgent first: how a request came decides which one it takes."""

    LIVE = 0
    """The caller waits on a connection: HTTP, gRPC, NATS request-reply, and requests of other models."""
    EVENT = 1
    """Published to `event.<model>`, or sent over HTTP or gRPC to be fetched later: accepted on disk."""
    BATCH = 2
    """Offline work, which takes the capacity that the others leave."""


class RequestedOutput(msgspec.Struct, eq=False):
    """An output the caller named: `binary` asks for raw bytes instead of JSON; `class_count` > 0 for classification.

    `region` is the memory of the caller that receives its content, if any; `parameters` are then those that named it.
    """

    name: str
    binary: bool = False
    class_count: int = 0
    parameters: Parameters | None = None
    region: ClientRef | None = None


class InferRequest(msgspec.Struct, eq=False):
    """A request to run a model.

    `model_version` is "" for the latest. `parameters` holds the caller's own ones only: the reserved ones are the
    attributes below. `timeout_us` and `priority` are 0 when not given, `correlation_id` 0 when there is no sequence.
    `binary_default` is how outputs not listed in `outputs` are encoded. `wants_empty_final` asks a stream for a last
    response even where the model sends no more content (`triton_enable_empty_final_response`).

    `traceparent` and `tracestate` are W3C's, "" where there are none: the caller's as a frontend receives the request, and
    later those of the request's own trace, if it is traced. `arrival` holds two of Triton's timestamps for a trace, each
    (name, unix nanoseconds). After `deadline_ms` (unix time, 0 for none) the response is dropped. `regions` names the
    shared-memory regions that its tensors lie in. `wants_timestamps` asks the worker to report when the request passed each
    stage, as it does for traced requests anyway. `lane` sets its urgency. `owner` is whose its sequence is, "" where nobody
    has to prove who sends it: equal correlation ids of two owners are two sequences (`owned_id`).

    `batch_size` (1 for models without batching) and `shape_key` (equal for requests that may share a batch; "" where
    all requests of the model may) are set by `RequestNormalizer`.
    """

    model_name: str
    model_version: str = ""
    id: str = ""
    inputs: list[Tensor] = []
    outputs: list[RequestedOutput] = []
    parameters: Parameters | None = None
    binary_default: bool = False
    priority: int = 0
    timeout_us: int = 0
    deadline_ms: int = 0
    correlation_id: int | str = 0
    sequence_flags: int = 0
    traceparent: str = ""
    tracestate: str = ""
    arrival: tuple[tuple[str, int], tuple[str, int]] | None = None
    wants_empty_final: bool = False
    wants_timestamps: bool = False
    regions: tuple[str, ...] = ()
    lane: Lane = Lane.LIVE
    owner: str = ""
    batch_size: int = 1
    shape_key: str = ""


class InferResponse(msgspec.Struct, eq=False):
    """One response of a model: the version that ran, the outputs, and response parameters if any."""

    model_name: str
    model_version: str
    id: str = ""
    outputs: list[Tensor] = []
    parameters: Parameters | None = None


_OWNER_END = "\x1f"


def owned_id(owner: str, id: int | str) -> int | str:
    """The correlation id `id` of `owner`, as schedulers tell sequences apart; `id` itself for the owner ""."""
    return f"{owner}{_OWNER_END}{'i' if isinstance(id, int) else 's'}{id}" if owner else id


def shown_id(id: int | str) -> int | str:
    """The correlation id as its caller knows it: without its owner."""
    return id.partition(_OWNER_END)[2][1:] if isinstance(id, str) and _OWNER_END in id else id

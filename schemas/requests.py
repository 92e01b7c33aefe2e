"""`InferRequest` and `InferResponse`: one inference, the same object whichever door it came through."""

from __future__ import annotations

from typing import Any

from schemas.lanes import Lane
from schemas.tensors import ClientRef, Tensor

SEQUENCE_START = 1
SEQUENCE_END = 2

Parameters = dict[str, Any]
"""KServe request or response parameters: str, int, bool or float values."""


class RequestedOutput:
    """An output the caller named: `binary` asks for raw bytes instead of JSON; `class_count` > 0 for classification.

    `region` is where its content is to be put, if the caller wants it in memory of its own; `parameters` are then those
    that named the place.
    """

    __slots__ = ("binary", "class_count", "name", "parameters", "region")

    def __init__(
        self, name: str, binary: bool = False, class_count: int = 0, parameters: Parameters | None = None
    ) -> None:
        self.name = name
        self.binary = binary
        self.class_count = class_count
        self.parameters = parameters
        self.region: ClientRef | None = None


class InferRequest:
    """What a caller asks of a model.

    `model_version` is "" for the latest. `parameters` holds the caller's own ones only: the reserved ones are the
    attributes below. `timeout_us` and `priority` are 0 when not given, `correlation_id` 0 when there is no sequence.
    `binary_default` says how outputs not listed in `outputs` are to be encoded. `wants_empty_final` asks a stream for a
    last response even where the model has nothing more to say (`triton_enable_empty_final_response`).

    `traceparent` and `tracestate` are W3C's, "" where there are none: the caller's at the door, and behind it those of the
    request's own trace, if it is traced. `arrival` is what a door notes for a trace of when the request came: two of
    Triton's timestamps, each (name, unix nanoseconds). `deadline_ms` is unix time, 0 for none: nobody waits for the answer
    after it. `regions` names the shared-memory regions that its tensors lie in. `wants_moments` asks the worker to tell
    with the answer when the request passed the points of its way, which it does for traced requests anyway. `lane` says
    how it came, and so who goes first.

    `batch_size` (1 for models without batching) and `shape_key` (equal for requests that may share a batch; "" where
    all requests of the model may) are set by `RequestNormalizer`.
    """

    __slots__ = (
        "arrival",
        "batch_size",
        "binary_default",
        "correlation_id",
        "deadline_ms",
        "id",
        "inputs",
        "lane",
        "model_name",
        "model_version",
        "outputs",
        "parameters",
        "priority",
        "regions",
        "sequence_flags",
        "shape_key",
        "timeout_us",
        "traceparent",
        "tracestate",
        "wants_empty_final",
        "wants_moments",
    )

    def __init__(
        self,
        model_name: str,
        model_version: str = "",
        id: str = "",
        inputs: list[Tensor] | None = None,
        outputs: list[RequestedOutput] | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.inputs: list[Tensor] = [] if inputs is None else inputs
        self.outputs: list[RequestedOutput] = [] if outputs is None else outputs
        self.parameters = parameters
        self.binary_default = False
        self.priority = 0
        self.timeout_us = 0
        self.deadline_ms = 0
        self.correlation_id: int | str = 0
        self.sequence_flags = 0
        self.traceparent = ""
        self.tracestate = ""
        self.arrival: tuple[tuple[str, int], tuple[str, int]] | None = None
        self.wants_empty_final = False
        self.wants_moments = False
        self.regions: tuple[str, ...] = ()
        self.lane = Lane.LIVE
        self.batch_size = 1
        self.shape_key = ""


class InferResponse:
    """One answer of a model: the version that answered, the outputs, and response parameters if any."""

    __slots__ = ("id", "model_name", "model_version", "outputs", "parameters")

    def __init__(
        self,
        model_name: str,
        model_version: str,
        id: str = "",
        outputs: list[Tensor] | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.outputs: list[Tensor] = [] if outputs is None else outputs
        self.parameters = parameters

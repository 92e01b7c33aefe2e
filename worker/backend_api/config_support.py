"""`LIMITS`: the fields of a model configuration that are not supported, or behave differently than in Triton.

A field that would make responses wrong fails the load; a field that only tunes is logged and has no effect.
`docs/compatibility.md` is generated from this table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError

logger = logging.getLogger("weir.worker")

REFUSED = "refused"
IGNORED = "ignored"
SILENT = "silent"


class FieldLimit(NamedTuple):
    """One field that differs from Triton.

    `path` is its path in the configuration, without indexes. Its `effect` is REFUSED (fails the load), IGNORED (logs a
    warning) or SILENT (the field can't matter here). `why` is the reason in the message and in the documentation.
    """

    path: str
    effect: str
    why: str


LIMITS = (
    FieldLimit("input.format", SILENT, "it is information for clients, as in Triton"),
    FieldLimit("input.is_non_linear_format_io", REFUSED, "requests carry tensors in linear formats only"),
    FieldLimit("output.is_non_linear_format_io", REFUSED, "requests carry tensors in linear formats only"),
    FieldLimit("optimization.priority", IGNORED, "streams of all instances have the same priority"),
    FieldLimit(
        "optimization.cuda.graph_spec.graph_lower_bound",
        IGNORED,
        "a graph is launched only for the shapes for which it was captured",
    ),
    FieldLimit(
        "optimization.gather_kernel_buffer_threshold", IGNORED, "inputs are gathered on the host, into pinned memory"
    ),
    FieldLimit("optimization.eager_batching", IGNORED, "an instance has its next batch ahead of time in any case"),
    FieldLimit(
        "sequence_batching.state.use_same_buffer_for_input_output",
        SILENT,
        "states are kept on the host",
    ),
    FieldLimit("sequence_batching.state.use_growable_memory", SILENT, "states are kept on the host"),
    FieldLimit("sequence_batching.oldest.preserve_ordering", SILENT, "an instance runs one batch at a time, in order"),
    FieldLimit(
        "instance_group.secondary_devices",
        IGNORED,
        "deep learning accelerators, which some Jetson boards have, are not supported",
    ),
)


PYTHON = "python"
"""The Python backend, and the kind of backends in Triton's form that it runs."""

OWN_BACKEND = "own"
"""The kind of backends in Weir's form that users write."""

_DECOUPLED_KINDS = (PYTHON, OWN_BACKEND)
"""Kinds of backends whose models may be decoupled."""

_STATEFUL_KINDS = ("onnxruntime", "pytorch", "tensorrt", OWN_BACKEND)
"""Kinds of backends whose results have the states of sequences (`weir.worker.backend_api.interface.Result.states`)."""


def check_supported(config: ModelConfig, kind: str = "") -> None:
    """Raises WeirError (UNSUPPORTED) for a configuration that can't be served correctly; logs fields without effect.

    `kind` is the kind of the backend if it differs from the backend's name.
    """
    kind = kind or config.backend
    if config.is_decoupled and kind not in _DECOUPLED_KINDS:
        raise WeirError(
            ErrorCode.UNSUPPORTED,
            f"backend '{config.backend}' sends one response to each request, so model '{config.name}' can't be decoupled",
        )
    if config.sequence_batching is not None and config.sequence_batching.state and kind not in _STATEFUL_KINDS:
        raise WeirError(
            ErrorCode.UNSUPPORTED,
            f"backend '{config.backend}' does not support implicit states, which model '{config.name}' declares",
        )
    shape_tensors = [
        *(t.name for t in config.input if t.is_shape_tensor),
        *(t.name for t in config.output if t.is_shape_tensor),
    ]
    if config.max_batch_size > 0 and shape_tensors:
        raise WeirError(
            ErrorCode.UNSUPPORTED,
            f"shape tensors are supported without a batch dimension only: model '{config.name}' with shape tensor "
            f"'{shape_tensors[0]}' needs max_batch_size 0",
        )
    for limit in LIMITS:
        if limit.effect == SILENT or not any(map(_is_set, values_at(config, limit.path))):
            continue
        if limit.effect == REFUSED:
            message = f"model '{config.name}' can't be served: {limit.why} (field '{limit.path}')"
            raise WeirError(ErrorCode.UNSUPPORTED, message)
        logger.warning("model '%s': field '%s' has no effect: %s", config.name, limit.path, limit.why)


def values_at(message: Any, path: str) -> Iterator[Any]:
    """The values at `path` in a configuration: none if a message on the path is absent, several for lists."""
    if isinstance(message, (list, tuple)):
        for element in message:
            yield from values_at(element, path)
    elif not path:
        yield message
    elif message is not None:
        name, _, rest = path.partition(".")
        yield from values_at(getattr(message, name), rest)


def _is_set(value: Any) -> bool:
    if isinstance(value, BaseModel):
        return True
    return bool(value) and value not in ("REJECT", "PRIORITY_DEFAULT")

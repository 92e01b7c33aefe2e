"""Which fields of a configuration this worker can't do yet, or does otherwise than Triton: the one place that says so.

A field that would make answers wrong is refused at load; one that only tunes is reported and has no effect.
`docs/compatibility.md` is generated from this table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from schemas.errors import ErrorCode, WeirError
from schemas.model_config import ModelConfig

logger = logging.getLogger("weir.worker")

REFUSED = "refused"
IGNORED = "ignored"
SILENT = "silent"


class FieldLimit(NamedTuple):
    """One field that is not as in Triton.

    `path` names it from the configuration on, without indexes. `effect`: REFUSED fails the load, IGNORED warns at load,
    SILENT does neither, where the field can't matter here. `why` goes into the message and the documentation.
    """

    path: str
    effect: str
    why: str


LIMITS = (
    FieldLimit("input.format", SILENT, "it is information for clients, in Triton too"),
    FieldLimit("input.is_non_linear_format_io", REFUSED, "requests carry tensors in linear formats alone"),
    FieldLimit("output.is_non_linear_format_io", REFUSED, "requests carry tensors in linear formats alone"),
    FieldLimit("optimization.priority", IGNORED, "streams of all instances have the same priority"),
    FieldLimit(
        "optimization.cuda.graph_spec.graph_lower_bound",
        IGNORED,
        "a graph is launched for the shapes it was recorded for",
    ),
    FieldLimit(
        "optimization.gather_kernel_buffer_threshold", IGNORED, "inputs are gathered on the host, into pinned memory"
    ),
    FieldLimit("optimization.eager_batching", IGNORED, "batches are put together when they run"),
    FieldLimit(
        "sequence_batching.state.use_same_buffer_for_input_output",
        SILENT,
        "states lie on the host, where they are kept",
    ),
    FieldLimit("sequence_batching.state.use_growable_memory", SILENT, "states lie on the host, where they are kept"),
    FieldLimit("sequence_batching.oldest.preserve_ordering", SILENT, "an instance runs one batch at a time, in order"),
    FieldLimit("instance_group.secondary_devices", IGNORED, "deep learning accelerators are not served"),
    FieldLimit("model_repository_agents", REFUSED, "repository agents are not run"),
)


PYTHON = "python"
"""The Python backend, and the kind of those of Triton's form that it runs."""

OWN_BACKEND = "own"
"""The kind of backends of Weir's form that users have written."""

_ANSWER_OFTEN = (PYTHON, OWN_BACKEND)
"""Kinds of backends whose models may be decoupled."""

_KEEP_STATES = ("onnxruntime", "pytorch", "tensorrt", OWN_BACKEND)
"""Kinds of backends whose results hold the states of sequences (`worker.backend.Result.states`)."""


def check_supported(config: ModelConfig, kind: str = "") -> None:
    """Raises WeirError (UNSUPPORTED) for a configuration that would be served wrongly, and warns of what has no effect.

    `kind` is that of the backend, where its name in the configuration doesn't tell.
    """
    kind = kind or config.backend
    if config.is_decoupled and kind not in _ANSWER_OFTEN:
        raise WeirError(
            ErrorCode.UNSUPPORTED,
            f"backend '{config.backend}' answers each request once, so model '{config.name}' can't be decoupled",
        )
    if config.sequence_batching is not None and config.sequence_batching.state and kind not in _KEEP_STATES:
        raise WeirError(
            ErrorCode.UNSUPPORTED,
            f"backend '{config.backend}' keeps no implicit states, so model '{config.name}' can't have any",
        )
    shape_tensors = [
        *(t.name for t in config.input if t.is_shape_tensor),
        *(t.name for t in config.output if t.is_shape_tensor),
    ]
    if config.max_batch_size > 0 and shape_tensors:
        raise WeirError(
            ErrorCode.UNSUPPORTED,
            f"shape tensors are served without a batch dimension, so model '{config.name}', with shape tensor "
            f"'{shape_tensors[0]}', needs max_batch_size 0",
        )
    for limit in LIMITS:
        if limit.effect == SILENT or not any(map(_is_set, values_at(config, limit.path))):
            continue
        if limit.effect == REFUSED:
            message = f"model '{config.name}' can't be served: {limit.why} (field '{limit.path}')"
            raise WeirError(ErrorCode.UNSUPPORTED, message)
        logger.warning("model '%s': field '%s' has no effect: %s", config.name, limit.path, limit.why)


def values_at(message: Any, path: str) -> Iterator[Any]:
    """What stands at `path` in a configuration: nothing where a message on the way is absent, several in lists."""
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

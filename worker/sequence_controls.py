"""Sequence controls: the inputs by which a stateful model learns what its requests are to their sequences.

Source: Triton's `sequence_batching.control_input`. Each control is one more input of one element: whether a sequence
starts or ends with this request, whether the row holds a request at all, and the sequence's correlation id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from schemas.datatypes import BY_CONFIG_NAME
from schemas.model_config import ModelConfig
from schemas.requests import SEQUENCE_END, SEQUENCE_START, InferRequest
from schemas.scheduling_config import SequenceControl
from schemas.tensors import Tensor

_Value = Callable[[InferRequest, bool], Tensor]


class SequenceControls:
    """Adds a model's control inputs to requests; `is_needed` tells whether it has any."""

    def __init__(self, config: ModelConfig) -> None:
        shape = [1, 1] if config.max_batch_size > 0 else [1]
        control_inputs = config.sequence_batching.control_input if config.sequence_batching is not None else ()
        self._controls: list[_Value] = [
            _control(control_input.name, control, shape)
            for control_input in control_inputs
            for control in control_input.control
        ]

    @property
    def is_needed(self) -> bool:
        """Whether requests of the model get inputs from here."""
        return bool(self._controls)

    def add_to(self, requests: Iterable[InferRequest], ready: Iterable[bool]) -> None:
        """Adds the controls to each request; `ready` is False for a row that is nobody's."""
        for request, is_ready in zip(requests, ready, strict=True):
            request.inputs += [value(request, is_ready) for value in self._controls]


def _control(name: str, control: SequenceControl, shape: list[int]) -> _Value:
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        return _correlation_id(name, control, shape)
    if control.int32_false_true:
        datatype, values = "INT32", np.array(control.int32_false_true, np.int32)
    elif control.fp32_false_true:
        datatype, values = "FP32", np.array(control.fp32_false_true, np.float32)
    else:
        datatype, values = "BOOL", np.array(control.bool_false_true, np.bool_)
    off, on = (Tensor(name, datatype, shape, value.tobytes()) for value in values)
    flag = {"CONTROL_SEQUENCE_START": SEQUENCE_START, "CONTROL_SEQUENCE_END": SEQUENCE_END}.get(control.kind)
    if flag is None:
        return lambda request, is_ready: on if is_ready else off
    return lambda request, is_ready: on if is_ready and request.sequence_flags & flag else off


def _correlation_id(name: str, control: SequenceControl, shape: list[int]) -> _Value:
    datatype = BY_CONFIG_NAME[control.data_type]

    def value(request: InferRequest, is_ready: bool) -> Tensor:
        id = request.correlation_id if is_ready else 0
        if datatype.name == "BYTES":
            return Tensor.from_numpy(
                name, np.array(str(id).encode() if is_ready else b"", np.object_).reshape(shape), "BYTES"
            )
        # A narrower control gets the low bits, as in Triton.
        number = np.array([id if isinstance(id, int) else 0], np.uint64).astype(datatype.numpy)
        return Tensor(name, datatype.name, shape, number.tobytes())

    return value

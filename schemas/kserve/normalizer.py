"""`RequestNormalizer`: whether a request fits its model, decided before it costs anybody else anything.

Checks come in the order of Triton's core and with its texts, compared with a running Triton 2.51. Where Triton lets
a request pass that must fail in the model (a required input missing behind an optional one, a batch of nothing), Weir
refuses it: it would take the rest of its batch along.
"""

from __future__ import annotations

from collections.abc import Sequence

from weir.schemas.config.model_config import ModelConfig, ModelInput
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.request_limits import invalid_request
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import (
    BY_CONFIG_NAME,
    DATATYPES,
    MAX_WALKED_BYTES,
    Tensor,
    check_string_count,
    check_strings,
)


class RequestNormalizer:
    """The checks of every request that follow from a model's valid configuration, compiled once.

    Inputs the server itself supplies (sequence controls, states, batch inputs) are no part of a request.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._max_batch_size = config.max_batch_size
        self._outputs = frozenset(output.name for output in config.output)
        # In the direct strategy a sequence is a row of the batch, and an idle one a copy of a neighbour's: as in Triton,
        # those rows have the same shape, whatever the inputs are declared to be.
        ragged = config.sequence_batching is None or config.sequence_batching.oldest is not None
        self._rules = {
            declared.name: _InputRule(index, declared, config.max_batch_size > 0, ragged)
            for index, declared in enumerate(config.input)
        }
        self._required = frozenset(declared.name for declared in config.input if not declared.optional)
        self._has_optional = config.has_optional_inputs
        self._keyed = config.max_batch_size > 0 and (
            self._has_optional or any(rule.keyed for rule in self._rules.values())
        )
        self._correlation_control = _correlation_control(config)
        sequences = config.sequence_batching
        self._has_sequences = sequences is not None
        self._needs_correlation_id = sequences is not None and not sequences.iterative_sequence

    def normalize(self, request: InferRequest) -> None:
        """Check `request`, and set its `batch_size` and `shape_key`. Raises WeirError (INVALID_ARG).

        Strings in content that is still a reference, or larger than `MAX_WALKED_BYTES`, are left to the worker: only the
        size is checked.
        """
        for output in request.outputs:
            if output.name not in self._outputs:
                raise self._unknown_output(request)
        # The last input is looked at first, so that of several faulty ones the error names the one Triton names.
        inputs = request.inputs[::-1]
        if not len(self._required) <= len(inputs) <= len(self._rules):
            raise self._wrong_inputs(request, inputs)
        batch_size = self._batch_size(request, inputs) if self._max_batch_size > 0 else 1
        for tensor in inputs:
            self._check_input(request, tensor, batch_size)
        if len(inputs) > 1 or self._has_optional:
            self._check_names(request, inputs)
        if batch_size == 0:
            raise invalid_request(request.id, f"inference request batch-size must be >= 1 for '{self._model}'")
        if self._has_sequences:
            self._check_sequence(request, batch_size)
        if self._correlation_control and request.correlation_id:
            self._check_correlation_id(request, *self._correlation_control)
        request.batch_size = batch_size
        request.shape_key = self._shape_key(inputs) if self._keyed else ""

    def _batch_size(self, request: InferRequest, inputs: list[Tensor]) -> int:
        batch_size = -1
        for tensor in inputs:
            if self._rule(tensor).is_shape_tensor:
                continue
            if not tensor.shape:
                raise invalid_request(
                    request.id,
                    f"input '{tensor.name}' has no shape but model requires batch dimension for '{self._model}'",
                )
            if batch_size == -1:
                batch_size = tensor.shape[0]
                if batch_size < 0:
                    raise self._unspecified_dims(request, tensor)
            elif tensor.shape[0] != batch_size:
                raise invalid_request(
                    request.id, f"input '{tensor.name}' batch size does not match other inputs for '{self._model}'"
                )
        if batch_size > self._max_batch_size:
            raise invalid_request(
                request.id, f"inference request batch-size must be <= {self._max_batch_size} for '{self._model}'"
            )
        return batch_size if batch_size >= 0 else 1

    def _check_input(self, request: InferRequest, tensor: Tensor, batch_size: int) -> None:
        rule = self._rule(tensor)
        if tensor.datatype != rule.datatype:
            given = tensor.datatype if tensor.datatype in DATATYPES else "<invalid>"
            raise invalid_request(
                request.id,
                f"inference input '{tensor.name}' data-type is '{given}', but model '{self._model}' "
                f"expects '{rule.datatype}'",
            )
        elements = rule.elements_per_row(tensor.shape)
        if elements < 0:
            raise self._wrong_shape(request, tensor, rule)
        # An empty batch is measured as if it were one row, which is how Triton comes to refuse it.
        if rule.has_batch and batch_size:
            elements *= batch_size
        data = tensor.data
        size = data.size if isinstance(data, tuple) else len(data)
        if not rule.element_size:
            if size > MAX_WALKED_BYTES:
                check_string_count(size, elements, request.id, tensor.name, self._model)
            elif not isinstance(data, tuple):
                check_strings(data, elements, request.id, tensor.name, self._model)
        elif size != elements * rule.element_size:
            raise invalid_request(
                request.id,
                f"input byte size mismatch for input '{tensor.name}' for model '{self._model}'. "
                f"Expected {elements * rule.element_size}, got {size}",
            )

    def _check_names(self, request: InferRequest, inputs: list[Tensor]) -> None:
        """Refuse an input given twice, or a required one that hides behind optional ones."""
        names: set[str] = set()
        for tensor in inputs:
            if tensor.name in names:
                raise invalid_request(request.id, f"input '{tensor.name}' already exists in request")
            names.add(tensor.name)
        if not self._required <= names:
            raise self._wrong_inputs(request, inputs)

    def _check_sequence(self, request: InferRequest, batch_size: int) -> None:
        # Triton's sequence batcher refuses in this order, and does not name the request.
        if batch_size > 1:
            raise invalid(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of "
                "sequence batcher"
            )
        if self._needs_correlation_id and not request.correlation_id:
            raise invalid(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
            )

    def _check_correlation_id(self, request: InferRequest, name: str, wanted: str) -> None:
        given = "BYTES" if isinstance(request.correlation_id, str) else "UINT64"
        if (given == "BYTES") != (wanted == "BYTES"):
            raise invalid_request(
                request.id,
                f"sequence batching control '{name}' data-type is '{given}', but model '{self._model}' "
                f"expects '{wanted}'",
            )

    def _shape_key(self, inputs: list[Tensor]) -> str:
        if len(inputs) == 1:
            return self._rules[inputs[0].name].key(inputs[0])
        return ";".join(sorted(self._rules[tensor.name].key(tensor) for tensor in inputs))

    def _rule(self, tensor: Tensor) -> _InputRule:
        rule = self._rules.get(tensor.name)
        if rule is None:
            raise invalid(f"unexpected inference input '{tensor.name}' for model '{self._model}'")
        return rule

    def _unknown_output(self, request: InferRequest) -> WeirError:
        # Triton keeps the names in order, and so names the first in that order.
        name = min(output.name for output in request.outputs if output.name not in self._outputs)
        return invalid(f"unexpected inference output '{name}' for model '{self._model}'")

    def _wrong_inputs(self, request: InferRequest, inputs: list[Tensor]) -> WeirError:
        given = [tensor.name for tensor in inputs]
        lacking = [name for name in self._rules if name in self._required and name not in given]
        least, most = len(self._required), len(self._rules)
        wanted = f"expected number of inputs between {least} and {most}" if least < most else f"expected {most} inputs"
        return invalid_request(
            request.id,
            f"{wanted} but got {len(given)} inputs for model '{self._model}'. Got input(s) {_quoted(given)}, but "
            f"missing required input(s) {_quoted(lacking)}. Please provide all required input(s).",
        )

    def _wrong_shape(self, request: InferRequest, tensor: Tensor, rule: _InputRule) -> WeirError:
        if len(tensor.shape) == len(rule.full_dims) and min(tensor.shape, default=0) < 0:
            return self._unspecified_dims(request, tensor)
        note = (
            "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended "
            "to each input shape. If you want to specify the full shape including the batch dim in your input dims config, "
            "try setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
        )
        return invalid_request(
            request.id,
            f"unexpected shape for input '{tensor.name}' for model '{self._model}'. Expected {_dims(rule.full_dims)}, "
            f"got {_dims(tensor.shape)}. {note if self._max_batch_size > 0 else ''}",
        )

    def _unspecified_dims(self, request: InferRequest, tensor: Tensor) -> WeirError:
        return invalid_request(
            request.id,
            f"All input dimensions should be specified for input '{tensor.name}' for model '{self._model}', "
            f"got {_dims(tensor.shape)}",
        )


class _InputRule:
    """The requirements of one declared input for its tensor.

    `element_size` is in bytes, 0 for BYTES; `full_dims` includes the batch dimension, -1 is any size. `keyed`: tensors
    of this input may differ in ways that keep their requests out of one batch.
    """

    __slots__ = (
        "datatype",
        "element_size",
        "full_dims",
        "has_batch",
        "index",
        "is_shape_tensor",
        "keyed",
    )

    def __init__(self, index: int, declared: ModelInput, batching: bool, ragged: bool) -> None:
        datatype = BY_CONFIG_NAME[declared.data_type]
        self.index = index
        self.datatype = datatype.name
        self.element_size = datatype.size_bytes
        self.is_shape_tensor = declared.is_shape_tensor
        self.has_batch = batching and not declared.is_shape_tensor
        self.full_dims = [-1, *declared.dims] if self.has_batch else list(declared.dims)
        self.keyed = declared.is_shape_tensor or (-1 in declared.dims and not (ragged and declared.allow_ragged_batch))

    def elements_per_row(self, shape: Sequence[int]) -> int:
        """Elements of one row of a tensor of `shape`, -1 when the shape does not fit."""
        expected = self.full_dims
        if len(shape) != len(expected):
            return -1
        elements = 1
        first = 1 if self.has_batch else 0
        for position in range(first, len(expected)):
            dim = shape[position]
            if dim != expected[position] and (expected[position] != -1 or dim < 0):
                return -1
            elements *= dim
        return elements

    def key(self, tensor: Tensor) -> str:
        """The share that `tensor` has in its request's shape key."""
        if not self.keyed:
            return str(self.index)
        data = tensor.data
        meaning = "" if not self.is_shape_tensor else str(data) if isinstance(data, tuple) else data.hex()
        dims = tensor.shape[1:] if self.has_batch else tensor.shape
        return f"{self.index}:{','.join(map(str, dims))}{meaning}"


def _correlation_control(config: ModelConfig) -> tuple[str, str] | None:
    """(tensor name, datatype) of the control input that carries correlation ids, if the model has one."""
    for control_input in config.sequence_batching.control_input if config.sequence_batching else ():
        for control in control_input.control:
            if control.kind == "CONTROL_SEQUENCE_CORRID":
                return control_input.name, BY_CONFIG_NAME[control.data_type].name
    return None


def _quoted(names: Sequence[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _dims(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"

"""`generate_requests`: requests with random content for a model, from its configuration alone.

Numbers are those of `weir.schemas.kserve.sample_inputs`, which suit most networks. Strings are random lower-case
letters, so that no cache answers for the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weir.perf.inputs.model import InputError
from weir.schemas.config.model_config import ModelConfig, ModelInput
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import BY_CONFIG_NAME, Tensor, element_count
from weir.schemas.kserve.sample_inputs import sample_values

MAX_SAMPLES = 16
"""So many different requests are generated, and sent in turn."""

MAX_GENERATED_BYTES = 64 << 20
"""Fewer samples are generated where they would be larger than this together; one is always generated."""


@dataclass(frozen=True)
class InputOptions:
    """How content is generated.

    `shapes` replace the declared shapes of inputs by name, without the batch dimension. `string_length` is in
    characters. With `zeros` all numbers are 0 and all strings empty.
    """

    batch_size: int = 1
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    string_length: int = 16
    zeros: bool = False
    seed: int = 1


def generate_requests(model: ModelConfig, options: InputOptions) -> list[InferRequest]:
    """Up to `MAX_SAMPLES` requests with all required inputs, and with optional ones that `options.shapes` names.

    Raises InputError where a shape is unknown or does not fit.
    """
    check_options(model, options)
    required = [declared for declared in model.input if not declared.optional or declared.name in options.shapes]
    inputs = [(declared, full_shape(model, declared, options)) for declared in required or model.input]
    sample_bytes = sum(_size_bytes(declared, shape, options) for declared, shape in inputs)
    samples = max(1, min(MAX_SAMPLES, MAX_GENERATED_BYTES // max(1, sample_bytes)))
    random = np.random.default_rng(options.seed)
    return [
        InferRequest(model.name, inputs=[_tensor(declared, shape, options, random) for declared, shape in inputs])
        for _ in range(1 if options.zeros else samples)
    ]


def check_options(model: ModelConfig, options: InputOptions) -> None:
    """Raises InputError for a batch size that the model does not accept, and for shapes of inputs that it lacks."""
    most = max(1, model.max_batch_size)
    if not 1 <= options.batch_size <= most:
        why = f"at most {most}" if most > 1 else "1, because the model does not batch (max_batch_size is 0 or 1)"
        raise InputError(f"the batch size of model '{model.name}' may be {why}, not {options.batch_size}")
    names = [declared.name for declared in model.input]
    unknown = [name for name in options.shapes if name not in names]
    if unknown:
        raise InputError(f"model '{model.name}' has no input '{unknown[0]}'; its inputs are {', '.join(names)}")


def full_shape(model: ModelConfig, declared: ModelInput, options: InputOptions) -> list[int]:
    """The shape of an input in a request, with the batch dimension where the model has one. Raises InputError."""
    dims = list(options.shapes.get(declared.name, declared.dims))
    if -1 in dims:
        example = ",".join("1" if dim == -1 else str(dim) for dim in dims)
        raise InputError(
            f"input '{declared.name}' of model '{model.name}' has variable dimensions {dims}: "
            f"give its shape, as in --shape {declared.name}:{example}"
        )
    fits = len(dims) == len(declared.dims) and all(
        wanted in (-1, given) for given, wanted in zip(dims, declared.dims, strict=True)
    )
    if not fits:
        raise InputError(f"the shape of input '{declared.name}' must be {list(declared.dims)}, not {dims}")
    has_batch = model.max_batch_size > 0 and not declared.is_shape_tensor
    return [options.batch_size, *dims] if has_batch else dims


def _size_bytes(declared: ModelInput, shape: Sequence[int], options: InputOptions) -> int:
    size = BY_CONFIG_NAME[declared.data_type].size_bytes or options.string_length + 4
    return element_count(shape) * size


def _tensor(declared: ModelInput, shape: list[int], options: InputOptions, random: np.random.Generator) -> Tensor:
    datatype = BY_CONFIG_NAME[declared.data_type]
    if declared.is_shape_tensor:
        array = np.ones(shape, datatype.numpy)
    elif datatype.name == "BYTES":
        array = _strings(shape, 0 if options.zeros else options.string_length, random)
    elif options.zeros:
        array = np.zeros(shape, datatype.numpy)
    else:
        array = sample_values(datatype.name, shape, random)
    return Tensor.from_numpy(declared.name, array, datatype.name)


def _strings(shape: list[int], length: int, random: np.random.Generator) -> np.ndarray:
    count = element_count(shape)
    letters = random.integers(ord("a"), ord("z"), (count, length), np.uint8, endpoint=True)
    array = np.empty(count, np.object_)
    array[:] = [row.tobytes() for row in letters]
    return array.reshape(shape)

"""Inputs for a model, made from its configuration or metadata: for a first request, for load tests, for forms.

`declared_inputs` and `inputs_of_metadata` describe a model's inputs; `sample_tensors` fills them with values, and
`sample_body` writes these as the body of an infer request. The same arguments give the same values.

The values suit most networks: fractions between 0 and 1, bytes from 0 to 255, and 0 or 1 for other integers, because those
are often indices into a table of unknown length, or a mask. Sizes that the model leaves open can't be known: they are
`DEFAULT_VARIABLE_SIZE`, unless the caller names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import invalid
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, InferRequest
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES, Tensor, element_count
from weir.schemas.kserve.request import build_infer_request

DEFAULT_VARIABLE_SIZE = 8

MAX_SAMPLE_BYTES = 64 << 20
"""The largest sample of all inputs of a request together, by default. Strings count as 8 bytes each."""

MAX_JSON_ELEMENTS = 1 << 18
"""A sample with more elements is written as binary tensors: as JSON it would be several MiB of digits."""

_WITHOUT_JSON = frozenset({"FP16", "BF16"})
_TEXT = "sample"
_ONE_IN_BF16 = 0x3F80


class SampleInput(NamedTuple):
    """An input of a model. `shape` is whole, -1 a size that the request chooses; `batches`: the first one is the batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    batches: bool = False


def declared_inputs(config: ModelConfig) -> list[SampleInput]:
    """The inputs that a request of this model must have: without those that are optional."""
    batches = config.max_batch_size > 0
    return [
        SampleInput(
            tensor.name,
            BY_CONFIG_NAME[tensor.data_type].name,
            (*((-1,) if batches else ()), *tensor.dims),
            batches,
        )
        for tensor in config.input
        if not tensor.optional
    ]


def inputs_of_metadata(metadata: Mapping[str, Any]) -> list[SampleInput]:
    """The inputs in the metadata of a model (`GET /v2/models/<name>`, or the same over gRPC as a dictionary).

    Metadata does not say whether a model has a batch dimension. Where the first size of every input is open, it is taken
    for one. Raises WeirError (INVALID_ARG) for a document that is no metadata.
    """
    try:
        rows = [(row["name"], row["datatype"], tuple(map(int, row["shape"]))) for row in metadata["inputs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise invalid(f"the metadata of the model has no inputs with name, datatype and shape: {error!r}") from None
    for name, datatype, _ in rows:
        if datatype not in DATATYPES:
            raise invalid(f"input '{name}' has the datatype '{datatype}', expected one of {', '.join(DATATYPES)}")
    batches = all(shape[:1] == (-1,) for _, _, shape in rows)
    return [SampleInput(*row, batches) for row in rows]


def sample_tensors(  # noqa: PLR0913 - what a caller may choose, all of it with defaults
    inputs: Sequence[SampleInput],
    batch_size: int = 1,
    shapes: Mapping[str, Sequence[int]] | None = None,
    variable_size: int = DEFAULT_VARIABLE_SIZE,
    seed: int = 0,
    max_bytes: int = MAX_SAMPLE_BYTES,
) -> list[Tensor]:
    """A tensor for each input. Other seeds give other values.

    `shapes` are the sizes of inputs by name, without the batch. Other open sizes are `variable_size`. Raises WeirError
    (INVALID_ARG) for shapes that don't fit the inputs, and for tensors of more than `max_bytes` together.
    """
    given = dict(shapes or {})
    filled = [(row, _filled_shape(row, batch_size, given.pop(row.name, None), variable_size)) for row in inputs]
    if given:
        names = ", ".join(row.name for row in inputs)
        raise invalid(f"the model has no input '{next(iter(given))}', its inputs are: {names}")
    size = sum(element_count(shape) * (DATATYPES[row.datatype].size_bytes or 8) for row, shape in filled)
    if size > max_bytes:
        shown = ", ".join(f"{row.name} {list(shape)}" for row, shape in filled)
        raise invalid(f"a sample of {shown} has {size} bytes, at most {max_bytes} are made: name smaller shapes")
    generator = np.random.default_rng(seed)
    return [
        Tensor.from_numpy(row.name, sample_values(row.datatype, shape, generator), row.datatype)
        for row, shape in filled
    ]


def _filled_shape(row: SampleInput, batch_size: int, given: Sequence[int] | None, variable_size: int) -> list[int]:
    batch, own = ([batch_size], row.shape[1:]) if row.batches else ([], row.shape)
    if given is None:
        return batch + [variable_size if dim == -1 else dim for dim in own]
    fits = len(given) == len(own) and all(dim in (-1, size) and size >= 0 for dim, size in zip(own, given, strict=True))
    if not fits:
        without = " without the batch" if row.batches else ""
        raise invalid(f"the shape {list(given)} does not fit input '{row.name}', whose shape{without} is {list(own)}")
    return batch + list(given)


def sample_values(datatype: str, shape: Sequence[int], generator: np.random.Generator) -> np.ndarray:
    """Values of one tensor, as the module describes them. Strings are all the same, BF16 is an array of its bits."""
    if datatype == "BYTES":
        return np.full(shape, _TEXT, dtype=np.object_)
    if datatype == "BF16":
        return np.where(generator.integers(0, 2, shape), np.uint16(_ONE_IN_BF16), np.uint16(0))
    dtype = DATATYPES[datatype].numpy
    if dtype.kind == "f":
        return generator.random(shape, np.float32).round(3).astype(dtype)
    return generator.integers(0, 256 if datatype == "UINT8" else 2, shape).astype(dtype)


def needs_binary_outputs(config: ModelConfig) -> bool:
    """Whether the model has outputs that JSON does not carry, so that a response in JSON would be an error."""
    return any(BY_CONFIG_NAME[tensor.data_type].name in _WITHOUT_JSON for tensor in config.output)


def sample_body(
    tensors: Sequence[Tensor], is_sequence: bool = False, wants_binary: bool = False
) -> tuple[bytes, int | None]:
    """The body of an infer request with these tensors, and the bytes of its JSON that precede binary tensors.

    That length, which goes into the header `Inference-Header-Content-Length`, is None where the whole body is JSON: other
    than with FP16 and BF16, which JSON does not carry, and beyond `MAX_JSON_ELEMENTS`. `is_sequence` makes the request the
    only one of a sequence. `wants_binary` requests all outputs as binary tensors.
    """
    elements = sum(element_count(tensor.shape) for tensor in tensors)
    if elements > MAX_JSON_ELEMENTS or any(tensor.datatype in _WITHOUT_JSON for tensor in tensors):
        request = InferRequest("", inputs=list(tensors))
        if is_sequence:
            request.correlation_id, request.sequence_flags = 1, SEQUENCE_START | SEQUENCE_END
        request.binary_default = wants_binary
        chunks, length = build_infer_request(request)
        return b"".join(chunks), length
    parameters: dict[str, Any] = {"binary_data_output": True} if wants_binary else {}
    if is_sequence:
        parameters |= {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
    document: dict[str, Any] = {"parameters": parameters} if parameters else {}
    document["inputs"] = [
        {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape), "data": _json_values(tensor)}
        for tensor in tensors
    ]
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), None


def _json_values(tensor: Tensor) -> Any:
    array = tensor.to_numpy().ravel()
    return [element.decode() for element in array] if tensor.datatype == "BYTES" else array

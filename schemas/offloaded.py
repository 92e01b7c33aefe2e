"""Reading and writing of large bodies in two steps: the long one in a helper process (`runtime.offload`), the other here.

Reading: `read_json` and `read_msgpack` run in the helper. They make all checks of `kserve_request` and return the document
without what made it long: the content of its tensors is packed, and what means nothing is left out. `outline_document`
then reads that outline in the gateway, which alone knows its regions of shared memory, with the same checks.

Writing: `write_outputs` runs in the helper, and returns for each output its content as JSON, or its classes.

All functions that run in the helper take and return parts (see `runtime.offload_process`), the first of which is msgpack.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack

from schemas.classification import classify
from schemas.json_tensors import json_pieces
from schemas.json_text import load_json
from schemas.kserve_generate import build_generate_response, parse_generate_request
from schemas.kserve_msgpack import msgpack_document
from schemas.kserve_request import check_json_size, read_document
from schemas.kserve_response import MAX_WRITTEN_BYTES, Labels
from schemas.model_config import ModelConfig, ModelInput
from schemas.request_limits import RequestLimits
from schemas.requests import InferRequest, InferResponse, Parameters, RequestedOutput
from schemas.tensors import ClientRef, RegionRef, Tensor

Part = bytes | bytearray | memoryview

READ_JSON = "schemas.offloaded:read_json"
READ_MSGPACK = "schemas.offloaded:read_msgpack"
READ_GENERATE = "schemas.offloaded:read_generate"
ADD_PARAMETERS = "schemas.offloaded:add_parameters"
WRITE_OUTPUTS = "schemas.offloaded:write_outputs"
WRITE_GENERATE = "schemas.offloaded:write_generate"

_INPUT_MEMBERS = ("name", "datatype", "shape")
_INPUT_PARAMETERS = (
    "binary_data_size",
    "shared_memory_region",
    "shared_memory_offset",
    "shared_memory_byte_size",
)
_OUTPUT_PARAMETERS = ("classification", "binary_data", *_INPUT_PARAMETERS[1:])

# Reading, in the gateway


def json_job(model: str, version: str, text: Part, content_bytes: int, limits: RequestLimits) -> list[Part]:
    """The parts for `READ_JSON`: a document, followed in the body by `content_bytes` of binary tensors."""
    return [_pack([model, version, content_bytes, list(limits)]), text]


def msgpack_job(model: str, version: str, body: Part, limits: RequestLimits) -> list[Part]:
    """The parts for `READ_MSGPACK`."""
    return [_pack([model, version, 0, list(limits)]), body]


def generate_job(model: str, version: str, body: Part, config: ModelConfig, limits: RequestLimits) -> list[Part]:
    """The parts for `READ_GENERATE`, for a model with this configuration."""
    inputs = [[declared.name, declared.data_type, list(declared.dims)] for declared in config.input]
    return [_pack([model, version, config.max_batch_size, inputs, list(limits)]), body]


def outline_document(parts: Sequence[memoryview]) -> dict[str, Any]:
    """The document that `READ_JSON` or `READ_MSGPACK` has returned, for `read_document`; content are views over `parts`."""
    document: dict[str, Any] = _unpack(parts[0])
    contents = iter(parts[1:])
    for entry in document["inputs"]:
        if "data" in entry:
            entry["data"] = next(contents)
    return document


def outlined_request(model: str, version: str, parts: Sequence[memoryview]) -> InferRequest:
    """The request that `READ_GENERATE` has returned; content are views over `parts`."""
    id, parameters, inputs = _unpack(parts[0])
    return InferRequest(model, version, id, _tensors(inputs, parts[1:]), parameters=parameters)


# Reading, in the helper process


def read_json(parts: Sequence[memoryview]) -> list[Part]:
    """Checks a JSON request and returns its outline for `outline_document`. Raises WeirError, as `parse_infer_request`."""
    model, version, content_bytes, limits = _unpack(parts[0])
    limits = RequestLimits(*limits)
    check_json_size(parts[1], limits)
    return _outline(load_json(parts[1]), model, version, content_bytes, limits)


def read_msgpack(parts: Sequence[memoryview]) -> list[Part]:
    """The same of a msgpack request. Raises WeirError, as `parse_msgpack_request`."""
    model, version, content_bytes, limits = _unpack(parts[0])
    limits = RequestLimits(*limits)
    return _outline(msgpack_document(parts[1], limits), model, version, content_bytes, limits)


def read_generate(parts: Sequence[memoryview]) -> list[Part]:
    """Checks a generate request and returns its outline for `outlined_request`. Raises WeirError."""
    model, version, max_batch_size, inputs, limits = _unpack(parts[0])
    limits = RequestLimits(*limits)
    check_json_size(parts[1], limits)
    declared = [ModelInput.model_construct(name=name, data_type=kind, dims=dims) for name, kind, dims in inputs]
    config = ModelConfig.model_construct(max_batch_size=max_batch_size, input=declared)
    request = parse_generate_request(model, version, parts[1], config, limits)
    rows = [[tensor.name, tensor.datatype, list(tensor.shape)] for tensor in request.inputs]
    head = _pack([request.id, request.parameters, rows])
    return [head, *(tensor.data for tensor in request.inputs if not isinstance(tensor.data, tuple))]


def _outline(document: Any, model: str, version: str, content_bytes: int, limits: RequestLimits) -> list[Part]:
    # The binary content itself is not needed to see whether it is there.
    content = memoryview(bytes(content_bytes))
    request = read_document(model, version, document, content, limits, _any_region)
    outline: dict[str, Any] = {name: document[name] for name in ("id", "parameters") if name in document}
    contents: list[Part] = []
    outline["inputs"] = entries = []
    for source, tensor in zip(document["inputs"], request.inputs, strict=True):
        entry = {name: source[name] for name in _INPUT_MEMBERS}
        if "data" in source:
            entry["data"] = True
            contents.append(tensor.data)  # type: ignore[arg-type]  # it is no reference: it was in the document
        entry["parameters"] = _only(source.get("parameters"), _INPUT_PARAMETERS)
        entries.append(entry)
    if "outputs" in document:
        outline["outputs"] = [
            {"name": source["name"], "parameters": _only(source.get("parameters"), _OUTPUT_PARAMETERS)}
            for source in document["outputs"]
        ]
    return [_pack(outline), *contents]


def _only(parameters: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: parameters[name] for name in names if name in parameters} if type(parameters) is dict else {}


def _any_region(name: str, offset: int, size: int) -> ClientRef:
    return RegionRef(name, 0, offset, size)


# Parameters


def parameters_job(text: Part, parameters: Parameters) -> list[Part]:
    """The parts for `ADD_PARAMETERS`."""
    return [_pack(parameters), text]


def add_parameters(parts: Sequence[memoryview]) -> list[bytes]:
    """The document with these request parameters added to its own; empty where it has no place for them."""
    document: Any = load_json(parts[1])
    own = document.get("parameters", {}) if isinstance(document, dict) else None
    if not isinstance(own, dict):
        return [b""]
    document["parameters"] = {**own, **_unpack(parts[0])}
    return [json.dumps(document).encode()]


# Generate responses


def generate_response_job(response: InferResponse) -> list[Part]:
    """The parts for `WRITE_GENERATE`."""
    rows = [[tensor.name, tensor.datatype, list(tensor.shape)] for tensor in response.outputs]
    head = _pack([response.model_name, response.model_version, response.id, response.parameters, rows])
    return [head, *(tensor.data for tensor in response.outputs)]  # type: ignore[list-item]


def write_generate(parts: Sequence[memoryview]) -> list[Part]:
    """The text of `build_generate_response`. Raises WeirError as that does."""
    model, version, id, parameters, rows = _unpack(parts[0])
    return [build_generate_response(InferResponse(model, version, id, _tensors(rows, parts[1:]), parameters))]


# Writing


class OutputWish:
    """How an output is to be written: as JSON or `binary`, and with `class_count` > 0 its classes instead."""

    __slots__ = ("batching", "binary", "class_count", "labels", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        binary: bool = False,
        class_count: int = 0,
        batching: bool = False,
        labels: Sequence[str] | None = None,
    ) -> None:
        self.tensor = tensor
        self.binary = binary
        self.class_count = class_count
        self.batching = batching
        self.labels = labels


def long_wishes(
    request: InferRequest,
    response: InferResponse,
    labels: Labels | None = None,
    batching: bool = False,
    all_binary: bool = False,
) -> list[OutputWish]:
    """The outputs for which `build_infer_response` has raised LongOutputs, or a front end that has only binary outputs."""
    requested = {output.name: output for output in request.outputs} if request.outputs else None
    default = RequestedOutput("", request.binary_default)
    wishes: list[OutputWish] = []
    for tensor in response.outputs:
        wish = default if requested is None else requested.get(tensor.name)
        if wish is None or tensor.size_bytes <= MAX_WRITTEN_BYTES:
            continue
        if wish.class_count:
            names = labels(tensor.name) if labels else None
            wishes.append(OutputWish(tensor, wish.binary or all_binary, wish.class_count, batching, names))
        elif not (wish.binary or wish.region or all_binary):
            wishes.append(OutputWish(tensor))
    return wishes


def write_job(wishes: Sequence[OutputWish]) -> list[Part]:
    """The parts for `WRITE_OUTPUTS`."""
    rows = [
        [w.tensor.name, w.tensor.datatype, list(w.tensor.shape), w.binary, w.class_count, w.batching, w.labels]
        for w in wishes
    ]
    return [_pack(rows), *(wish.tensor.data for wish in wishes)]  # type: ignore[list-item]


def written_outputs(wishes: Sequence[OutputWish], parts: Sequence[memoryview]) -> dict[str, Tensor]:
    """What `WRITE_OUTPUTS` has returned: outputs by name, as the client gets them; content is JSON where that is wanted."""
    rows = _unpack(parts[0])
    return {
        wish.tensor.name: Tensor(wish.tensor.name, datatype, shape, content)
        for wish, (datatype, shape), content in zip(wishes, rows, parts[1:], strict=True)
    }


def write_outputs(parts: Sequence[memoryview]) -> list[Part | Iterable[Part]]:
    """Writes outputs as JSON or classes, for `written_outputs`. Raises WeirError for one that can't be written."""
    rows: list[Any] = []
    contents: list[Part | Iterable[Part]] = []
    for (name, datatype, shape, binary, class_count, batching, labels), data in zip(
        _unpack(parts[0]), parts[1:], strict=True
    ):
        tensor = Tensor(name, datatype, shape, data)
        if class_count:
            tensor = classify(tensor, class_count, batching, labels)
        rows.append([tensor.datatype, list(tensor.shape)])
        contents.append(tensor.data if binary else json_pieces(tensor.name, tensor.datatype, tensor.shape, tensor.data))  # type: ignore[arg-type]
    return [_pack(rows), *contents]


def _tensors(rows: Sequence[tuple[str, str, list[int]]], contents: Sequence[memoryview]) -> list[Tensor]:
    return [Tensor(name, kind, shape, content) for (name, kind, shape), content in zip(rows, contents, strict=True)]


def _pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))


def _unpack(part: memoryview) -> Any:
    return msgpack.unpackb(part, unicode_errors="surrogatepass", strict_map_key=False)

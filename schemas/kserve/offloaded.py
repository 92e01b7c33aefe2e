"""Reading and writing of large bodies in two steps: the long one in a helper process (`weir.runtime.offload`), a short one
here.

Reading: `read_json` and `read_msgpack` run in the helper process. They make all checks of `weir.schemas.kserve.request` and
return an outline: the document without members that have no meaning, and with the content of its tensors packed.
`outline_document` reads the outline in the gateway, which alone knows its regions of shared memory, with the same
checks.

Writing: `write_outputs` runs in the helper process, and returns the content of each output as JSON, or its classes.

All functions that run in the helper process take and return parts (`weir.runtime.offload_process`), the first in
MessagePack.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack

from weir.schemas.config.model_config import ModelConfig, ModelInput
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import InferRequest, InferResponse, Parameters, RequestedOutput
from weir.schemas.core.tensors import ClientRef, RegionRef, Tensor
from weir.schemas.kserve.generate import build_generate_response, parse_generate_request
from weir.schemas.kserve.json_documents import load_json
from weir.schemas.kserve.json_tensors import json_pieces
from weir.schemas.kserve.msgpack_documents import msgpack_document
from weir.schemas.kserve.request import check_json_size, read_document
from weir.schemas.kserve.response import MAX_WRITTEN_BYTES, Labels, classify

BodyPart = bytes | bytearray | memoryview


class Job(NamedTuple):
    """Work for a helper process: `operation` ("module:function") on `parts`, the first of which is MessagePack."""

    operation: str
    parts: Sequence[BodyPart]


READ_JSON = "weir.schemas.kserve.offloaded:read_json"
READ_MSGPACK = "weir.schemas.kserve.offloaded:read_msgpack"
READ_GENERATE = "weir.schemas.kserve.offloaded:read_generate"
ADD_PARAMETERS = "weir.schemas.kserve.offloaded:add_parameters"
WRITE_OUTPUTS = "weir.schemas.kserve.offloaded:write_outputs"
WRITE_GENERATE = "weir.schemas.kserve.offloaded:write_generate"

_INPUT_MEMBERS = ("name", "datatype", "shape")
_INPUT_PARAMETERS = (
    "binary_data_size",
    "shared_memory_region",
    "shared_memory_offset",
    "shared_memory_byte_size",
)
_OUTPUT_PARAMETERS = ("classification", "binary_data", *_INPUT_PARAMETERS[1:])

# Reading, in the gateway


def json_job(model: str, version: str, text: BodyPart, content_bytes: int, limits: RequestLimits) -> Job:
    """Reading of a JSON document, followed in the body by `content_bytes` of binary tensors."""
    return Job(READ_JSON, [_pack([model, version, content_bytes, list(limits)]), text])


def msgpack_job(model: str, version: str, body: BodyPart, limits: RequestLimits) -> Job:
    """Reading of a msgpack document."""
    return Job(READ_MSGPACK, [_pack([model, version, 0, list(limits)]), body])


def generate_job(model: str, version: str, body: BodyPart, config: ModelConfig, limits: RequestLimits) -> Job:
    """Reading of a generate request for a model with this configuration."""
    inputs = [[declared.name, declared.data_type, list(declared.dims)] for declared in config.input]
    return Job(READ_GENERATE, [_pack([model, version, config.max_batch_size, inputs, list(limits)]), body])


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


def read_json(parts: Sequence[memoryview]) -> list[BodyPart]:
    """Checks a JSON request and returns its outline for `outline_document`. Raises WeirError, as `parse_infer_request`."""
    model, version, content_bytes, limits = _unpack(parts[0])
    limits = RequestLimits(*limits)
    check_json_size(parts[1], limits)
    return _outline(load_json(parts[1]), model, version, content_bytes, limits)


def read_msgpack(parts: Sequence[memoryview]) -> list[BodyPart]:
    """The same of a msgpack request. Raises WeirError, as `parse_msgpack_request`."""
    model, version, content_bytes, limits = _unpack(parts[0])
    limits = RequestLimits(*limits)
    return _outline(msgpack_document(parts[1], limits), model, version, content_bytes, limits)


def read_generate(parts: Sequence[memoryview]) -> list[BodyPart]:
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


def _outline(document: Any, model: str, version: str, content_bytes: int, limits: RequestLimits) -> list[BodyPart]:
    # Zeros replace the binary content, whose size alone is checked.
    content = memoryview(bytes(content_bytes))
    request = read_document(model, version, document, content, limits, _any_region)
    outline: dict[str, Any] = {name: document[name] for name in ("id", "parameters") if name in document}
    contents: list[BodyPart] = []
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


def parameters_job(text: BodyPart, parameters: Parameters) -> Job:
    """Addition of request parameters to a document."""
    return Job(ADD_PARAMETERS, [_pack(parameters), text])


def add_parameters(parts: Sequence[memoryview]) -> list[bytes]:
    """The document with these request parameters added to its own; empty for a document that cannot have parameters."""
    document: Any = load_json(parts[1])
    own = document.get("parameters", {}) if isinstance(document, dict) else None
    if not isinstance(own, dict):
        return [b""]
    document["parameters"] = {**own, **_unpack(parts[0])}
    return [json.dumps(document).encode()]


# Generate responses


def generate_response_job(response: InferResponse) -> Job:
    """Writing of a generate response."""
    rows = [[tensor.name, tensor.datatype, list(tensor.shape)] for tensor in response.outputs]
    head = _pack([response.model_name, response.model_version, response.id, response.parameters, rows])
    return Job(WRITE_GENERATE, [head, *(tensor.data for tensor in response.outputs)])  # type: ignore[list-item]


def write_generate(parts: Sequence[memoryview]) -> list[BodyPart]:
    """The text of `build_generate_response`. Raises WeirError as that does."""
    model, version, id, parameters, rows = _unpack(parts[0])
    return [build_generate_response(InferResponse(model, version, id, _tensors(rows, parts[1:]), parameters))]


# Writing


def output_job(
    request: InferRequest,
    response: InferResponse,
    labels: Labels | None = None,
    batching: bool = False,
    all_binary: bool = False,
) -> Job | None:
    """Writing of the outputs of more than `MAX_WRITTEN_BYTES` that are wanted as JSON or as classes; None without any.

    `all_binary`: the frontend has only binary outputs. `batching` and `labels` as for `build_infer_response`.
    """
    requested = {output.name: output for output in request.outputs} if request.outputs else None
    default = RequestedOutput("", request.binary_default)
    rows: list[Any] = []
    contents: list[BodyPart] = []
    for tensor in response.outputs:
        output = default if requested is None else requested.get(tensor.name)
        if output is None or tensor.size_bytes <= MAX_WRITTEN_BYTES:
            continue
        binary = output.binary or all_binary
        if not output.class_count and (binary or output.region):
            continue
        names = labels(tensor.name) if labels and output.class_count else None
        rows.append([tensor.name, tensor.datatype, list(tensor.shape), binary, output.class_count, batching, names])
        contents.append(tensor.data)  # type: ignore[arg-type]  # it is no reference: those have been fetched
    return Job(WRITE_OUTPUTS, [_pack(rows), *contents]) if rows else None


def written_outputs(parts: Sequence[memoryview]) -> dict[str, Tensor]:
    """The result of `WRITE_OUTPUTS`: outputs by name as the client gets them, with JSON as content where that is wanted."""
    return {tensor.name: tensor for tensor in _tensors(_unpack(parts[0]), parts[1:])}


def write_outputs(parts: Sequence[memoryview]) -> list[BodyPart | Iterable[BodyPart]]:
    """Writes outputs as JSON or classes, for `written_outputs`. Raises WeirError for one that can't be written."""
    rows: list[Any] = []
    contents: list[BodyPart | Iterable[BodyPart]] = []
    for (name, datatype, shape, binary, class_count, batching, labels), data in zip(
        _unpack(parts[0]), parts[1:], strict=True
    ):
        tensor = Tensor(name, datatype, shape, data)
        if class_count:
            tensor = classify(tensor, class_count, batching, labels)
        rows.append([tensor.name, tensor.datatype, list(tensor.shape)])
        contents.append(tensor.data if binary else json_pieces(tensor.name, tensor.datatype, tensor.shape, tensor.data))  # type: ignore[arg-type]
    return [_pack(rows), *contents]


def _tensors(rows: Sequence[tuple[str, str, list[int]]], contents: Sequence[memoryview]) -> list[Tensor]:
    return [Tensor(name, kind, shape, content) for (name, kind, shape), content in zip(rows, contents, strict=True)]


def _pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))


def _unpack(part: memoryview) -> Any:
    return msgpack.unpackb(part, unicode_errors="surrogatepass", strict_map_key=False)

"""Requests of the KServe v2 HTTP protocol: from a body to an `InferRequest`, and back.

A body is JSON, or JSON followed by the content of binary tensors (`parse_infer_request`), or the content of one tensor
alone (`parse_raw_request`), or the same document in MessagePack (`weir.schemas.kserve.msgpack_documents`). Binary content
becomes views over the body. `build_infer_request` writes a request as such a body: requests that come over gRPC are
stored on disk so, in a form that producers may use too.

Texts, codes and the order of checks are Triton's, compared with a running Triton 2.51: a malformed document and a wrong
JSON type are INTERNAL errors there, and therefore here. A request beyond a limit that Triton lacks is INVALID_ARG.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import orjson

from weir.schemas.config.model_config import ModelConfig, ModelInput
from weir.schemas.core.errors import WeirError, internal, invalid
from weir.schemas.core.request_limits import (
    DEFAULT_LIMITS,
    RequestLimits,
    invalid_request,
    long_correlation_id,
    raw_too_large,
    too_large,
)
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, InferRequest, RequestedOutput
from weir.schemas.core.tensors import (
    BY_CONFIG_NAME,
    DATATYPES,
    MAX_ELEMENT_COUNT,
    Reference,
    Tensor,
    element_count,
    pack_bytes,
)
from weir.schemas.kserve.json_documents import (
    NO_MEMBERS,
    array_member,
    boolean,
    load_json,
    members_of,
    missing,
    parameter_value,
    string,
    string_member,
    unsigned,
    wrong_type,
)
from weir.schemas.kserve.json_tensors import pack_json_data
from weir.schemas.kserve.regions import FindRegion, no_regions, read_region_parameters, region_parameters

# What int() itself takes is wider: spaces, underscores, digits of other scripts.
_INTEGER = re.compile(r"-?[0-9]{1,19}")


def is_header_length(value: str) -> bool:
    """Whether `value` is a number that `parse_header_length` takes, and not negative."""
    return len(value) <= 19 and value.isascii() and value.isdigit()


def parse_header_length(value: str) -> int:
    """The number in an `Inference-Header-Content-Length` header. Raises WeirError (INVALID_ARG)."""
    if not _INTEGER.fullmatch(value):
        raise invalid(f"Unable to parse Inference-Header-Content-Length, got: {value[:200]}")
    return int(value)


def parse_infer_request(  # noqa: PLR0913 - the target, the two parts of a body, and two policies with defaults
    model_name: str,
    model_version: str,
    body: bytes | bytearray | memoryview,
    header_length: int | None,
    limits: RequestLimits = DEFAULT_LIMITS,
    find_region: FindRegion = no_regions,
) -> InferRequest:
    """The request in `body`, whose first `header_length` bytes are JSON (None: all of them).

    Tensors given as binary are views over `body`; those in shared memory are the references that `find_region` makes.
    Raises WeirError.
    """
    view = memoryview(body)
    if header_length is None:
        header_length = len(view)
    elif not 0 < header_length <= len(view):
        raise invalid(f"inference header size should be in range (0, {len(view)}), got: {header_length}")
    if header_length > limits.input_size or header_length > limits.json_values:
        check_json_size(view[:header_length], limits)
    document = load_json(view[:header_length])
    return read_document(model_name, model_version, document, view[header_length:], limits, find_region)


def read_document(  # noqa: PLR0913 - as `parse_infer_request`, whose second half it is
    model_name: str,
    model_version: str,
    document: Any,
    content: memoryview,
    limits: RequestLimits,
    find_region: FindRegion,
) -> InferRequest:
    """The request that a parsed `document` describes; `content` is what follows it in the body. Raises WeirError."""
    if type(document) is not dict:
        document = NO_MEMBERS
    request = InferRequest(model_name, model_version)
    if "id" in document:
        request.id = _short_text(document["id"], "id", limits)
    if "parameters" in document:
        _read_parameters(request, document["parameters"], limits)
    read_inputs(request, array_member(document, "inputs"), content, limits, find_region)
    if "outputs" in document:
        _read_outputs(request, array_member(document, "outputs"), limits, find_region)
    return request


def check_json_size(document: bytes | memoryview, limits: RequestLimits) -> None:
    """Refuses a document that is too long, or so long that it may hold too many values and does. Raises WeirError."""
    if len(document) > limits.input_size:
        raise too_large("request JSON size", len(document), limits.input_size)
    if len(document) <= limits.json_values:
        return
    text = bytes(document)
    if text.count(b",") + text.count(b"[") + text.count(b"{") > limits.json_values:
        raise invalid(f"request JSON holds more than {limits.json_values} values")


def _read_parameters(  # noqa: C901, PLR0912 - one branch for each reserved parameter
    request: InferRequest, parameters: Any, limits: RequestLimits
) -> None:
    """Reserved parameters become attributes of `request`, the others its parameters."""
    if type(parameters) is not dict:
        raise internal("failed to get request params.: attempt to get members for non-object")
    if len(parameters) > limits.parameters:
        raise invalid(f"request holds more than {limits.parameters} parameters")
    own: dict[str, Any] = {}
    for key, value in parameters.items():
        if key == "binary_data_output":
            request.binary_default = boolean(value, key)
        elif key == "sequence_id":
            request.correlation_id = _correlation_id(value, limits)
        elif key == "sequence_start":
            request.sequence_flags |= SEQUENCE_START * boolean(value, key)
        elif key == "sequence_end":
            request.sequence_flags |= SEQUENCE_END * boolean(value, key)
        elif key == "priority":
            request.priority = unsigned(value, key)
        elif key == "timeout":
            request.timeout_us = unsigned(value, key)
        elif key.startswith("triton_"):
            raise invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        elif isinstance(value, (str, int, float)):
            own[key] = parameter_value(value)
        else:
            raise invalid(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")
    if own:
        request.parameters = own


def _correlation_id(value: Any, limits: RequestLimits) -> int | str:
    if type(value) is int and value >= 0:
        return value
    text = string(value, "sequence_id")
    if len(text) > limits.correlation_id_length:
        raise long_correlation_id(limits)
    return text


def _short_text(value: Any, field: str, limits: RequestLimits) -> str:
    text = string(value, field)
    if len(text) > limits.id_length:
        raise invalid(f"request '{field}' cannot be longer than {limits.id_length} characters")
    return text


def _read_outputs(request: InferRequest, entries: list[Any], limits: RequestLimits, find_region: FindRegion) -> None:
    if len(entries) > limits.tensors:
        raise invalid(f"request holds more than {limits.tensors} outputs")
    names: set[str] = set()
    for entry in entries:
        members = members_of(entry)
        parameters = members_of(members.get("parameters"))
        if "shared_memory_region" in parameters:
            _check_shared_memory_output(parameters)
        output = RequestedOutput(string_member(members, "name"))
        if output.name in names:
            raise invalid_request(request.id, f"output '{output.name}' already exists in request")
        names.add(output.name)
        if "classification" in parameters:
            output.class_count = _class_count(parameters["classification"])
        if "shared_memory_region" in parameters:
            region = output.region = read_region_parameters(request, parameters, find_region)
            offset = parameters.get("shared_memory_offset", 0)
            output.parameters = region_parameters(request.regions[-1], offset, region.size)
        if "binary_data" in parameters:
            output.binary = boolean(parameters["binary_data"], "binary_data")
        request.outputs.append(output)


def _check_shared_memory_output(parameters: Mapping[str, Any]) -> None:
    if "classification" in parameters:
        raise invalid("Output can't set both 'shared_memory_region' and 'classification'")
    if parameters.get("binary_data") is True:
        raise invalid("Output can't set both 'shared_memory_region' and 'binary_data'")


def _class_count(value: Any) -> int:
    if type(value) is int and value >= 0:
        return value
    raise internal("Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer")


_INT64_MAX = 2**63 - 1


def read_inputs(  # noqa: C901, PLR0912 - one pass over every request: calls would cost more than the checks
    request: InferRequest,
    entries: list[Any],
    content: memoryview,
    limits: RequestLimits,
    find_region: FindRegion,
) -> None:
    """Add to `request` the tensors that `entries` describe; `content` is what follows the JSON in the body.

    Raises WeirError: INTERNAL for wrong JSON types and for `data` that does not fill its shape, NOT_FOUND for a region of
    shared memory that is not registered, else INVALID_ARG.
    """
    if len(entries) > limits.tensors:
        raise invalid(f"request holds more than {limits.tensors} inputs")
    names: set[str] = set()
    position, available = 0, len(content)
    # This runs for every request: common cases are checked inline, the others in functions that make the error.
    for entry in entries:
        members = entry if type(entry) is dict else NO_MEMBERS
        parameters = members.get("parameters")
        if type(parameters) is not dict:
            parameters = NO_MEMBERS
        is_binary = "binary_data_size" in parameters
        is_json = "data" in members
        if is_binary + is_json + ("shared_memory_region" in parameters) != 1:
            raise _not_one_source(members, parameters)
        name, datatype, shape = members.get("name"), members.get("datatype"), members.get("shape")
        if type(name) is not str or type(datatype) is not str or type(shape) is not list:
            raise _not_described(members)
        # Before anything is multiplied: the product of a million dimensions takes minutes.
        if len(shape) > limits.dims:
            raise invalid(f"invalid shape for input '{name}': more than {limits.dims} dimensions")
        count = 1
        for dim in shape:
            if type(dim) is not int or dim < 0:
                raise wrong_type("shape", "unsigned-integer")
            count *= dim
        if not 0 < count <= MAX_ELEMENT_COUNT:
            _check_size(name, datatype, shape)
        if name in names:
            raise invalid_request(request.id, f"input '{name}' already exists in request")
        names.add(name)
        data: bytes | memoryview | Reference
        if is_binary:
            start = position
            position += unsigned(parameters["binary_data_size"], "binary_data_size")
            if position > available:
                raise invalid(
                    f"unexpected size for input '{name}', expecting {position - available} additional bytes "
                    f"for model '{request.model_name}'"
                )
            data = content[start:position]
        elif is_json:
            data = _json_content(name, datatype, shape, members, limits)
        else:
            data = read_region_parameters(request, parameters, find_region)
        request.inputs.append(Tensor(name, datatype, shape, data))
    if position != available:
        raise invalid(f"unexpected additional input data for model '{request.model_name}'")


def _not_one_source(members: Mapping[str, Any], parameters: Mapping[str, Any]) -> WeirError:
    found = ["'data'"] if "data" in members else []
    found += [f"'{field}'" for field in ("binary_data_size", "shared_memory_region") if field in parameters]
    return invalid(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. But {'set ' + ' '.join(found) if found else 'no field is set'}"
    )


def _not_described(members: Mapping[str, Any]) -> WeirError:
    """The error for the first of an input's fields that is missing or of the wrong type."""
    for field in ("name", "datatype"):
        if type(members.get(field)) is not str:
            return wrong_type(field, "string") if field in members else missing(field)
    return wrong_type("shape", "array") if "shape" in members else missing("shape")


def _check_size(name: str, datatype: str, shape: list[int]) -> None:
    """Refuse a shape no tensor can have. A zero among the dimensions does not excuse the others."""
    start = f"invalid shape for input '{name}': shape [{','.join(map(str, shape))}]"
    if max(shape) > _INT64_MAX:
        raise invalid(f"{start} contains one or more invalid dimensions")
    count = math.prod(dim for dim in shape if dim)
    size = count * DATATYPES[datatype].size_bytes if datatype in DATATYPES else 0
    if count <= _INT64_MAX < size:
        raise invalid(f"byte size overflow for input '{name}'")
    if count > MAX_ELEMENT_COUNT:
        raise invalid(f"{start} causes total element count to exceed maximum size of {MAX_ELEMENT_COUNT}")


def _json_content(
    name: str, datatype: str, shape: list[int], members: Mapping[str, Any], limits: RequestLimits
) -> bytes | memoryview:
    data = members["data"]
    if isinstance(data, (bytes, memoryview)):
        return data  # no JSON has bytes: it is msgpack, where they are the content itself, or was packed before
    # Triton counts no dimensions as no elements, and does not look at `data` when there are none.
    count = math.prod(shape) if shape else 0
    if count == 0:
        return b""
    size = count * DATATYPES[datatype].size_bytes if datatype in DATATYPES else 0
    if size > limits.input_size:
        raise invalid(
            f"JSON input '{name}' has a byte_size ({size} bytes) that exceeds the maximum allowed value of "
            f"{limits.input_size} bytes. Use --http-max-input-size to increase the limit."
        )
    return pack_json_data(name, datatype, data, count)


def parse_raw_request(
    model_name: str,
    model_version: str,
    body: bytes | bytearray | memoryview,
    config: ModelConfig,
    limits: RequestLimits = DEFAULT_LIMITS,
) -> InferRequest:
    """The request whose whole `body` is its only input; every output is to come as binary.

    The batch size is 1, the size of a variable dimension follows from that of the body, and a BYTES input has one
    element: the body. Other content is a view over `body`. Raises WeirError (INVALID_ARG).
    """
    data = memoryview(body)
    if len(data) > limits.input_size:
        raise raw_too_large(len(data), limits.input_size)
    if len(config.input) != 1:
        raise invalid_request(
            "",
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(config.input)} inputs in "
            f"'{model_name}' model configuration",
        )
    declared = config.input[0]
    datatype = BY_CONFIG_NAME[declared.data_type]
    shape = _deduced_shape(declared, len(data))
    expected = element_count(shape) * datatype.size_bytes
    if datatype.name != "BYTES" and expected != len(data):
        # Triton calls it so: the check comes before the input gets its name from the configuration.
        raise invalid_request(
            "",
            f"input byte size mismatch for input 'raw_input' for model '{model_name}'. "
            f"Expected {expected}, got {len(data)}",
        )
    request = InferRequest(model_name, model_version)
    batch = [1] if config.max_batch_size > 0 else []
    content = pack_bytes([data]) if datatype.name == "BYTES" else data
    request.inputs.append(Tensor(declared.name, datatype.name, batch + shape, content))
    request.binary_default = True
    return request


def _deduced_shape(declared: ModelInput, size: int) -> list[int]:
    """The shape, without the batch dimension, of `size` bytes of content for the `declared` input."""
    shape = list(declared.dims)
    known = math.prod(dim for dim in shape if dim != -1)
    variable = shape.count(-1)
    if variable > 1:
        raise invalid_request(
            "",
            f"The shape of the raw input '{declared.name}' can not be deduced because there are more than one "
            "variable-sized dimension",
        )
    if declared.data_type == "TYPE_STRING":
        if variable or known != 1:
            raise invalid_request(
                "", f"For BYTE datatype raw input '{declared.name}', the model must have input shape [1]"
            )
    elif variable:
        shape[shape.index(-1)] = size // (known * BY_CONFIG_NAME[declared.data_type].size_bytes)
    return shape


def build_infer_request(request: InferRequest) -> tuple[list[bytes | memoryview], int]:
    """The chunks of the body, the first of which is JSON, and its length. The response is requested in the form that
    `request` names.

    Raises TypeError for content that is a reference: it would not be in the body.
    """
    chunks: list[bytes | memoryview] = [b""]
    rows: list[dict[str, Any]] = []
    for tensor in request.inputs:
        if isinstance(tensor.data, tuple):
            raise TypeError(f"the content of input '{tensor.name}' is elsewhere")
        size = {"binary_data_size": len(tensor.data)}
        rows.append({"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape, "parameters": size})
        if tensor.data:
            chunks.append(tensor.data)
    document: dict[str, Any] = {"id": request.id} if request.id else {}
    parameters = _parameters(request)
    if parameters:
        document["parameters"] = parameters
    document["inputs"] = rows
    if request.outputs:
        document["outputs"] = [_output(output) for output in request.outputs]
    chunks[0] = orjson.dumps(document)
    return chunks, len(chunks[0])


def _parameters(request: InferRequest) -> dict[str, Any]:
    parameters = dict(request.parameters or {})
    if request.binary_default:
        parameters["binary_data_output"] = True
    if request.correlation_id:
        parameters["sequence_id"] = request.correlation_id
    for name, flag in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
        if request.sequence_flags & flag:
            parameters[name] = True
    if request.priority:
        parameters["priority"] = request.priority
    if request.timeout_us:
        parameters["timeout"] = request.timeout_us
    return parameters


def _output(output: RequestedOutput) -> dict[str, Any]:
    row: dict[str, Any] = {"name": output.name}
    parameters: dict[str, Any] = {}
    if output.binary:
        parameters["binary_data"] = True
    if output.class_count:
        parameters["classification"] = output.class_count
    if parameters:
        row["parameters"] = parameters
    return row

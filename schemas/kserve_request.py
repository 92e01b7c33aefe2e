"""The request half of the KServe v2 HTTP protocol: from a body to an `InferRequest`.

A body is JSON, or JSON followed by the content of binary tensors, or (`kserve_raw`) the content of a tensor alone, or
(`kserve_msgpack`) the same document in msgpack.

Texts, codes and the order of checks are Triton's, compared with a running Triton 2.51: a malformed document and a
wrong JSON type are INTERNAL there, so they are here. Limits that Triton lacks answer INVALID_ARG.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from schemas.errors import internal, invalid
from schemas.json_fields import (
    NO_MEMBERS,
    array_member,
    boolean,
    members_of,
    parameter_value,
    string,
    string_member,
    unsigned,
)
from schemas.json_text import load_json
from schemas.kserve_inputs import read_inputs
from schemas.regions import FindRegion, no_regions, place_parameters, read_place
from schemas.request_errors import long_correlation_id, refused, too_large
from schemas.request_limits import DEFAULT_LIMITS, RequestLimits
from schemas.requests import SEQUENCE_END, SEQUENCE_START, InferRequest, RequestedOutput

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


def parse_infer_request(
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


def read_document(
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


def _read_parameters(request: InferRequest, parameters: Any, limits: RequestLimits) -> None:
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
            raise refused(request.id, f"output '{output.name}' already exists in request")
        names.add(output.name)
        if "classification" in parameters:
            output.class_count = _class_count(parameters["classification"])
        if "shared_memory_region" in parameters:
            region = output.region = read_place(request, parameters, find_region)
            offset = parameters.get("shared_memory_offset", 0)
            output.parameters = place_parameters(request.regions[-1], offset, region.size)
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

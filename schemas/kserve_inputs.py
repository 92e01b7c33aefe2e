"""The `inputs` of a KServe v2 request: what each is called and shaped like, and where its content lies.

Binary content is taken as views over the body, in the order of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from schemas.datatypes import DATATYPES
from schemas.errors import WeirError, invalid
from schemas.json_fields import NO_MEMBERS, missing, unsigned, wrong_type
from schemas.json_tensors import pack_json_data
from schemas.regions import FindRegion, read_place
from schemas.request_errors import refused
from schemas.request_limits import RequestLimits
from schemas.requests import InferRequest
from schemas.tensors import MAX_ELEMENT_COUNT, Reference, Tensor

_INT64_MAX = 2**63 - 1


def read_inputs(
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
    # Every request comes through here: what is usual is checked in place, what is not is named elsewhere.
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
            raise refused(request.id, f"input '{name}' already exists in request")
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
            data = read_place(request, parameters, find_region)
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

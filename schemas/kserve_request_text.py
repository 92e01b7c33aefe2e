"""The inverse of `kserve_request`: from an `InferRequest` to a body of the KServe v2 HTTP protocol, with binary tensors.

What came by gRPC is stored so: a request on disk is in one of the forms that producers may use too.
"""

from __future__ import annotations

from typing import Any

import orjson

from schemas.requests import SEQUENCE_END, SEQUENCE_START, InferRequest, RequestedOutput


def build_infer_request(request: InferRequest) -> tuple[list[bytes | memoryview], int]:
    """The chunks of the body, the first of which is JSON, and its length. The answer is wanted as `request` wants it.

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

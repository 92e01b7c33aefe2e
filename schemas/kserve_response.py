"""The response half of the KServe v2 HTTP protocol: from an `InferResponse` to the chunks of a body.

Binary outputs follow the JSON as the buffers they came in: nothing is joined here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from schemas.classification import classify
from schemas.json_tensors import json_data
from schemas.requests import InferRequest, InferResponse, RequestedOutput
from schemas.tensors import Tensor

Labels = Callable[[str], Sequence[str] | None]
"""The labels of an output by its name, in the order of class indexes; None for an output without labels."""


MAX_WRITTEN_BYTES = 256 * 1024
"""The largest content of an output that an event loop writes as JSON, or ranks for its classes, which takes up to 20 ms."""


class LongOutputs(Exception):
    """A response has outputs that take too long to be written in the event loop: see `schemas.offloaded`."""


def build_infer_response(
    request: InferRequest,
    response: InferResponse,
    labels: Labels | None = None,
    batching: bool = False,
    written: Mapping[str, Tensor] | None = None,
) -> tuple[list[bytes | memoryview], int | None]:
    """The chunks of the body that answers `request`, and the length of its JSON: None when there is nothing else.

    Outputs come in the model's order; where the request lists outputs, only those, each as it asks. `batching` (the
    model has a batch dimension) and `labels` matter to classification. Raises WeirError for an output that can't be
    written as asked, TypeError for content that is still a reference.

    `written` are the outputs of more than `MAX_WRITTEN_BYTES` that are wanted as JSON or as classes, by name, as
    `schemas.offloaded.written_outputs` returns them. Without it raises LongOutputs where there are any.
    """
    requested = {output.name: output for output in request.outputs} if request.outputs else None
    default = RequestedOutput("", request.binary_default)
    rows: list[dict[str, Any]] = []
    chunks: list[bytes | memoryview] = [b""]
    texts: dict[int, bytes | memoryview] = {}  # by the position of its row: JSON that is there already
    for tensor in response.outputs:
        wish = default if requested is None else requested.get(tensor.name)
        if wish is None:
            continue
        is_written = False
        if wish.class_count:
            is_written = tensor.size_bytes > MAX_WRITTEN_BYTES
            if not is_written:
                tensor = classify(tensor, wish.class_count, batching, labels(tensor.name) if labels else None)
            elif written is None:
                raise LongOutputs
            else:
                tensor = written[tensor.name]
        row: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        rows.append(row)
        if wish.region is not None:
            continue  # the caller finds the content there
        data = tensor.data
        if isinstance(data, tuple):
            raise TypeError(f"the content of output '{tensor.name}' has not been fetched")
        if wish.binary:
            row["parameters"] = {"binary_data_size": len(data)}
            if data:
                chunks.append(data)
        elif is_written:
            texts[len(rows) - 1] = data
        elif len(data) > MAX_WRITTEN_BYTES:
            if written is None:
                raise LongOutputs
            texts[len(rows) - 1] = written[tensor.name].data  # type: ignore[assignment]  # it is no reference
        else:
            row["data"] = json_data(tensor.name, tensor.datatype, tensor.shape, data)
    if texts:
        header_chunks = _long_header(request, response, rows, texts)
        has_binary = len(chunks) > 1
        return [*header_chunks, *chunks[1:]], sum(map(len, header_chunks)) if has_binary else None
    header = _header(request, response, rows)
    chunks[0] = header
    return chunks, len(header) if len(chunks) > 1 else None


def error_body(message: str) -> bytes:
    """The JSON body of an error."""
    return orjson.dumps({"error": message.encode(errors="replace").decode()})


def _long_header(
    request: InferRequest,
    response: InferResponse,
    rows: Sequence[dict[str, Any]],
    texts: Mapping[int, bytes | memoryview],
) -> list[bytes | memoryview]:
    """The chunks of `_header`, where the `data` of some rows is JSON already."""
    chunks: list[bytes | memoryview] = []
    piece = _header(request, response, [])[: -len(b"]}")]
    for position, row in enumerate(rows):
        piece += b"," if position else b""
        text = texts.get(position)
        if text is None:
            piece += orjson.dumps(row)
        else:
            chunks += (piece + orjson.dumps(row)[:-1] + b',"data":', text)
            piece = b"}"
    return [*chunks, piece + b"]}"]


def _header(request: InferRequest, response: InferResponse, rows: list[dict[str, Any]]) -> bytes:
    document: dict[str, Any] = {"id": request.id} if request.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = response.parameters
    document["outputs"] = rows
    return orjson.dumps(document)

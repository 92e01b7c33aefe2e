"""Responses of the KServe v2 HTTP protocol: from an `InferResponse` to the chunks of a body, with the classification
extension.

Binary outputs follow the JSON as the buffers they are: nothing is joined. The classification extension replaces an
output by its highest values and their labels.

Source: the classification extension of the KServe v2 protocol as Triton implements it, compared with a running Triton
2.51.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from weir.schemas.core.errors import invalid
from weir.schemas.core.requests import InferRequest, InferResponse, RequestedOutput
from weir.schemas.core.tensors import Tensor, pack_bytes
from weir.schemas.kserve.json_tensors import json_data

Labels = Callable[[str], Sequence[str] | None]
"""The labels of an output by its name, in the order of class indexes; None for an output without labels."""


MAX_WRITTEN_BYTES = 256 * 1024
"""The largest output that an event loop writes as JSON or ranks for its classes, which takes up to 20 ms."""


def build_infer_response(  # noqa: C901 - one pass over the outputs of every response
    request: InferRequest,
    response: InferResponse,
    labels: Labels | None = None,
    batching: bool = False,
    written: Mapping[str, Tensor] | None = None,
) -> tuple[list[bytes | memoryview], int | None]:
    """The chunks of the body that answers `request`, and the length of its JSON: None when there is nothing else.

    Outputs come in the model's order; where the request lists outputs, only those, each in its requested form.
    `batching` (the model has a batch dimension) and `labels` matter to classification. Raises WeirError for an output
    that can't be written in that form, TypeError for content that is still a reference.

    `written` are the outputs that a helper process has written as JSON or as classes, by name
    (`weir.schemas.kserve.offloaded.written_outputs`). In an event loop, it writes those of more than `MAX_WRITTEN_BYTES`.
    """
    requested = {output.name: output for output in request.outputs} if request.outputs else None
    default = RequestedOutput("", request.binary_default)
    rows: list[dict[str, Any]] = []
    chunks: list[bytes | memoryview] = [b""]
    texts: dict[int, bytes | memoryview] = {}  # finished JSON, by the position of its row
    for tensor in response.outputs:
        wanted = default if requested is None else requested.get(tensor.name)
        if wanted is None:
            continue
        done = written.get(tensor.name) if written else None
        if done is not None:
            tensor = done
        elif wanted.class_count:
            tensor = classify(tensor, wanted.class_count, batching, labels(tensor.name) if labels else None)
        row: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        rows.append(row)
        if wanted.region is not None:
            continue  # the caller finds the content there
        data = tensor.data
        if isinstance(data, tuple):
            raise TypeError(f"the content of output '{tensor.name}' has not been fetched")
        if wanted.binary:
            row["parameters"] = {"binary_data_size": len(data)}
            if data:
                chunks.append(data)
        elif done is not None:
            texts[len(rows) - 1] = data
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


MAX_CLASSIFIED_ELEMENTS = 1_000_000

_UNSUPPORTED = frozenset({"BOOL", "FP16", "BF16", "BYTES"})


def classify(tensor: Tensor, class_count: int, batching: bool, labels: Sequence[str] | None) -> Tensor:
    """The `class_count` highest values of `tensor` as BYTES "value:index" or "value:index:label", highest first.

    With `batching` the first dimension is the batch and each row is ranked by itself: the shape is [batch, k], else
    [k], where k is at most the number of elements ranked. Equal values come in the order of their indexes, NaN last;
    floats have six decimals. Raises WeirError (INVALID_ARG) for datatypes without an order and for huge outputs.
    """
    if tensor.datatype in _UNSUPPORTED:
        raise invalid(f"class result not available for output due to unsupported type '{tensor.datatype}'")
    values = tensor.to_numpy()
    if values.size > MAX_CLASSIFIED_ELEMENTS:
        raise invalid("classification output tensor too large")
    rows = values.reshape(values.shape[0], math.prod(values.shape[1:])) if batching else values.reshape(1, values.size)
    count = min(class_count, rows.shape[1])
    classes = [text for row in rows for text in _classes(row, count, labels)]
    shape = [len(rows), count] if batching else [count]
    return Tensor(tensor.name, "BYTES", shape, pack_bytes(classes))


def _classes(row: np.ndarray, count: int, labels: Sequence[str] | None) -> list[str]:
    # Both turn the order around without overflow, so that a stable ascending sort ranks equal values by index.
    descending = -row if row.dtype.kind == "f" else ~row
    indexes = np.argsort(descending, kind="stable")[:count].tolist()
    pattern = "%f:%d" if row.dtype.kind == "f" else "%d:%d"
    texts = []
    for index, value in zip(indexes, row[indexes].tolist(), strict=True):
        label = labels[index] if labels is not None and index < len(labels) else ""
        texts.append(pattern % (value, index) + (f":{label}" if label else ""))
    return texts

"""`ResponseTemplates`: the JSON headers of responses to requests with one header, so that each is packed once.

Responses with binary outputs to requests that differ in their tensors' content alone have the same JSON header, as long as
the outputs have the same names, datatypes and shapes. Whether a header depends on anything else is checked when it is
kept: its body must be the header followed by the content of all outputs, and no output may be a classification.
"""

from __future__ import annotations

from collections.abc import Sequence

from weir.calls.catalog import ServedModel
from weir.calls.inference.documents import Encoded, JsonCodec
from weir.schemas.core.requests import InferRequest, InferResponse

MAX_HEADERS = 16
"""Headers that are kept for one request header."""


class ResponseTemplates(JsonCodec):
    """The codec of requests with the header of `request`, which keeps the headers of their responses."""

    def __init__(self, request: InferRequest) -> None:
        self._may_keep = not request.id and not any(output.class_count for output in request.outputs or ())
        self._known: dict[tuple[object, ...], bytes] = {}

    def write(
        self, served: ServedModel, request: InferRequest, response: InferResponse, parts: Sequence[memoryview]
    ) -> Encoded:
        """Implements `Codec.write`."""
        if parts or response.parameters or not self._may_keep:
            return super().write(served, request, response, parts)
        outputs, version = response.outputs, response.model_version
        key: tuple[object, ...] = (version,)
        for tensor in outputs:
            key += (tensor.name, tensor.datatype, *tensor.shape, len(tensor.data))
        header = self._known.get(key)
        if header is not None:
            return [header, *(tensor.data for tensor in outputs)], len(header), version  # type: ignore[list-item]
        encoded = super().write(served, request, response, parts)
        self._keep(key, response, encoded)
        return encoded

    def _keep(self, key: tuple[object, ...], response: InferResponse, encoded: Encoded) -> None:
        content = [tensor.data for tensor in response.outputs]
        chunks, header_length, _ = encoded
        if header_length is None or not all(content) or chunks[1:] != content:
            return
        if len(self._known) >= MAX_HEADERS:
            self._known.clear()
        self._known[key] = bytes(chunks[0])

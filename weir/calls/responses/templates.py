"""`ResponseTemplates`: the JSON headers of responses to requests with one header, so that each is packed once.

Responses with binary outputs to requests that differ in their tensors' content alone have the same JSON header, as long as
the outputs have the same names, datatypes and shapes. Whether a header depends on anything else is checked when it is
kept: its body must be the header followed by the content of all outputs, and no output may be a classification.
"""

from __future__ import annotations

from weir.calls.catalog import ServedModel
from weir.calls.message_bodies import HEADER_LENGTH, BodyFormat, Headers, encode_response
from weir.schemas.core.requests import InferRequest, InferResponse

MAX_HEADERS = 16
"""Headers that are kept for one request header."""


class ResponseTemplates:
    """The headers of responses to `request`, of which all that use this object have the same JSON header."""

    __slots__ = ("_known", "_may_keep", "_request")

    def __init__(self, request: InferRequest) -> None:
        self._request = request
        self._may_keep = not request.id and not any(wish.class_count for wish in request.outputs or ())
        self._known: dict[tuple[object, ...], tuple[Headers, bytes]] = {}

    def encode(self, response: InferResponse, served: ServedModel) -> tuple[Headers, bytes]:
        """As `encode_response` for a body with binary tensors. The returned headers must not be changed."""
        outputs = response.outputs
        if response.parameters or not self._may_keep:
            return encode_response(self._request, response, served, BodyFormat.BINARY)
        key: tuple[object, ...] = (response.model_version,)
        for tensor in outputs:
            key += (tensor.name, tensor.datatype, *tensor.shape, len(tensor.data))
        known = self._known.get(key)
        if known is not None:
            headers, header = known
            if len(outputs) == 1:
                return headers, header + outputs[0].data  # type: ignore[operator]  # no reference: see `_keep`
            return headers, b"".join((header, *(tensor.data for tensor in outputs)))  # type: ignore[arg-type]
        headers, body = encode_response(self._request, response, served, BodyFormat.BINARY)
        self._keep(key, response, headers, body)
        return headers, body

    def _keep(self, key: tuple[object, ...], response: InferResponse, headers: Headers, body: bytes) -> None:
        content = [tensor.data for tensor in response.outputs]
        length = dict(headers).get(_HEADER_LENGTH)
        if length is None or not all(content) or body[int(length) :] != b"".join(content):  # type: ignore[arg-type]
            return
        if len(self._known) >= MAX_HEADERS:
            self._known.clear()
        self._known[key] = headers, body[: int(length)]


_HEADER_LENGTH = HEADER_LENGTH.title()

"""`PreparedRequests`: a request header that was seen before is not parsed and checked again.

Clients that send one tensor after another send the same JSON header each time, and only the tensors behind it differ.
What follows from the header alone (the parsed request, its validity, the packed form around the tensors) is kept, with
the model it was checked against: a new configuration starts empty. Headers with a request id are all different, and BYTES
content must be looked at, so neither is kept.
"""

from __future__ import annotations

from bus.payloads import INLINE_LIMIT_BYTES
from schemas.bodies import body_template
from schemas.requests import InferRequest

MAX_HEADERS = 256
MAX_HEADER_BYTES = 4096


class PreparedRequest:
    """A checked request whose tensors are to be replaced: `request` is shared by all that have this header."""

    __slots__ = ("_ends", "_pieces", "_starts", "body_length", "request")

    def __init__(self, request: InferRequest, header_length: int) -> None:
        self.request = request
        self._pieces = body_template(request)
        self._starts: list[int] = []
        self._ends: list[int] = []
        position = header_length
        for tensor in request.inputs:
            self._starts.append(position)
            position += tensor.size_bytes
            self._ends.append(position)
        self.body_length = position

    def pack(self, body: bytes | bytearray) -> bytes:
        """The packed form (`schemas.bodies.pack_body`) of the request with this HTTP body."""
        pieces = self._pieces
        if len(pieces) == 2:
            return pieces[0] + body[self._starts[0] :] + pieces[1]
        parts: list[bytes | bytearray] = []
        for piece, start, end in zip(pieces, self._starts, self._ends, strict=False):
            parts += (piece, body[start:end])
        parts.append(pieces[-1])
        return b"".join(parts)


class PreparedRequests:
    """The headers seen for one model with one configuration."""

    __slots__ = ("_by_header",)

    def __init__(self) -> None:
        self._by_header: dict[tuple[str, bytes], PreparedRequest] = {}

    def find(self, version: str, body: bytes | bytearray, header_length: int) -> PreparedRequest | None:
        """What is kept for the header of this body, if the body is as long as it asks for."""
        prepared = self._by_header.get((version, bytes(body[:header_length])))
        return prepared if prepared is not None and prepared.body_length == len(body) else None

    def keep(self, request: InferRequest, body: bytes | bytearray, header_length: int) -> None:
        """Keeps a request that was parsed from this body and found valid, where that may help."""
        if (
            request.id
            or request.regions  # which may be other ones the next time
            or header_length > MAX_HEADER_BYTES
            or len(body) > INLINE_LIMIT_BYTES
            or len(self._by_header) >= MAX_HEADERS
            or not request.inputs
            or any(t.datatype == "BYTES" or not isinstance(t.data, memoryview) for t in request.inputs)
        ):
            return
        header = bytes(body[:header_length])
        self._by_header[request.model_version, header] = PreparedRequest(_without_content(request), header_length)


def _without_content(request: InferRequest) -> InferRequest:
    # The views would keep this one body alive for as long as its header is.
    for tensor in request.inputs:
        tensor.data = bytes(len(tensor.data))
    return request

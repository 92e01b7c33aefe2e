"""`PreparedRequests`: a request header that was seen before is not parsed and checked again.

Clients that send one tensor after another send the same JSON header each time, and only the tensors behind it differ.
What follows from the header alone (the parsed request, its validity, the packed form around the tensors) is kept, with
the model it was checked against: a new configuration starts empty. Headers with a request id are all different, and BYTES
content must be looked at, so neither is kept.

A client whose headers never come twice must not take the place of others: once there is no room (`TemplateCache`), a header
is kept only when it comes again, in the place of one that has not been used for long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from bus.payloads import INLINE_LIMIT_BYTES
from schemas.bodies import body_template
from schemas.requests import InferRequest

MAX_HEADERS = 256
"""Headers kept for one model by HTTP, and for all models by gRPC."""

MAX_HEADER_BYTES = 4096
"""A longer header is not kept."""

MAX_KEPT_BYTES = 1 << 20
"""What the headers of one cache take up together, with what follows from them."""

MAX_SIGHTINGS = 1024
"""Headers remembered that came once while there was no room, by their hashes."""

_ENTRY_BYTES = 500
_NO_CONTENT = memoryview(bytes(INLINE_LIMIT_BYTES))


class PreparedRequest:
    """A checked request whose tensors are to be replaced: `request` is shared by all that have this header."""

    __slots__ = ("_ends", "_pieces", "_starts", "body_length", "is_used", "request", "size_bytes")

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
        self.is_used = False
        """Since `TemplateCache` looked for one to replace."""
        # The header, its packed form, and the parsed request, whose objects are larger than what they were parsed from.
        self.size_bytes = _ENTRY_BYTES + 4 * header_length

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


Key = TypeVar("Key", bound=Hashable)
Template = TypeVar("Template", bound=PreparedRequest)


class TemplateCache(Generic[Key, Template]):
    """At most `MAX_HEADERS` templates of `MAX_KEPT_BYTES` together, by key; what is used stays (CLOCK's second chance).

    `on_removed(key, template)` is called with each template that is kept no longer.
    """

    __slots__ = ("_on_removed", "_seen_once", "_size_bytes", "_templates")

    def __init__(self, on_removed: Callable[[Key, Template], None] = lambda key, template: None) -> None:
        self._templates: dict[Key, Template] = {}
        self._size_bytes = 0
        self._seen_once: set[int] = set()
        self._on_removed = on_removed

    def __len__(self) -> int:
        return len(self._templates)

    def find(self, key: Key) -> Template | None:
        """The template, which counts as used."""
        template = self._templates.get(key)
        if template is not None:
            template.is_used = True
        return template

    def takes(self, key: Key) -> bool:
        """Whether a template for `key` should be made and kept: there is room, or the key has come before."""
        if key in self._templates:
            return True
        if len(self._templates) < MAX_HEADERS and self._size_bytes < MAX_KEPT_BYTES:
            return True
        hashed = hash(key)
        if hashed in self._seen_once:
            self._seen_once.discard(hashed)
            return True
        if len(self._seen_once) >= MAX_SIGHTINGS:
            self._seen_once.clear()
        self._seen_once.add(hashed)
        return False

    def keep(self, key: Key, template: Template) -> None:
        """Keeps a template, in the place of those that were not used since they were looked at last."""
        self._remove(key)
        templates = self._templates
        while templates and (len(templates) >= MAX_HEADERS or self._size_bytes + template.size_bytes > MAX_KEPT_BYTES):
            oldest_key = next(iter(templates))
            oldest = templates[oldest_key]
            if oldest.is_used:
                oldest.is_used = False
                del templates[oldest_key]
                templates[oldest_key] = oldest  # to the end
            else:
                self._remove(oldest_key)
                self._on_removed(oldest_key, oldest)
        templates[key] = template
        self._size_bytes += template.size_bytes

    def remove_if(self, is_stale: Callable[[Template], bool]) -> None:
        """Removes the templates that are stale."""
        for key, template in [each for each in self._templates.items() if is_stale(each[1])]:
            self._remove(key)
            self._on_removed(key, template)

    def _remove(self, key: Key) -> None:
        template = self._templates.pop(key, None)
        if template is not None:
            self._size_bytes -= template.size_bytes


class PreparedRequests:
    """The headers seen for one model with one configuration."""

    __slots__ = ("_templates",)

    def __init__(self) -> None:
        self._templates: TemplateCache[tuple[str, bytes], PreparedRequest] = TemplateCache()

    def find(self, version: str, body: bytes | bytearray, header_length: int) -> PreparedRequest | None:
        """What is kept for the header of this body, if the body is as long as it asks for."""
        if header_length > MAX_HEADER_BYTES:
            return None
        prepared = self._templates.find((version, bytes(body[:header_length])))
        return prepared if prepared is not None and prepared.body_length == len(body) else None

    def keep(self, request: InferRequest, body: bytes | bytearray, header_length: int) -> None:
        """Keeps a request that was parsed from this body and found valid, where that may help."""
        if (
            request.id
            or request.regions  # which may be other ones the next time
            or header_length > MAX_HEADER_BYTES
            or len(body) > INLINE_LIMIT_BYTES
            or not request.inputs
            or any(t.datatype == "BYTES" or not isinstance(t.data, memoryview) for t in request.inputs)
        ):
            return
        key = request.model_version, bytes(body[:header_length])
        if self._templates.takes(key):
            self._templates.keep(key, PreparedRequest(without_content(request), header_length))


def without_content(request: InferRequest) -> InferRequest:
    """The request, whose tensors don't keep the body alive that they came in; they keep their sizes."""
    for tensor in request.inputs:
        tensor.data = _NO_CONTENT[: tensor.size_bytes]
    return request

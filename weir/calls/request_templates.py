"""`RequestTemplates`: the parsed and packed form of request headers, so that a repeated header is not parsed again.

Clients that send one tensor after another send the same header each time, with other tensors behind it: a JSON document,
or a protobuf message up to its first content. A template is what depends on the header alone: the parsed and checked
request, and its packed form around the tensors. Deadlines, sticky values and other headers of the transport come with
each request. Requests with an id have no template, since their headers all differ; nor have those with BYTES tensors,
whose content must be checked.

A client whose headers never repeat must not displace others: while there is no room, a header gets a template only when
it comes for the second time, which replaces one that was not used recently.
"""

from __future__ import annotations

from collections.abc import Sequence

from weir.bus.payloads.arena import REMOTE_INLINE_LIMIT_BYTES, Slot
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import PayloadRef
from weir.schemas.wire.request_body import body_template, pack_ref

MAX_HEADERS = 256
"""Templates for one model over HTTP, and for all models over gRPC."""

MAX_HEADER_BYTES = 4096
"""A longer header has no template."""

MAX_KEPT_BYTES = 1 << 20
"""Memory of all templates of one cache."""

MAX_SIGHTINGS = 1024
"""Hashes of headers that came once while the cache was full."""

Body = bytes | bytearray | memoryview

_ENTRY_BYTES = 500
_NO_CONTENT = memoryview(bytes(REMOTE_INLINE_LIMIT_BYTES))


class RequestTemplate:
    """A checked request without its tensors' content; all requests with this header share `request`.

    `gaps` are the bytes between the contents, if there are any. `refers`: its bodies lie in payload slots, and the packed
    form refers to the large tensors there. `owner` is its model, where templates of several are kept together.
    """

    __slots__ = (
        "_ends",
        "_pieces",
        "_starts",
        "body_length",
        "gaps",
        "is_used",
        "owner",
        "refers",
        "request",
        "size_bytes",
    )

    def __init__(
        self, request: InferRequest, header_length: int, gaps: Sequence[bytes] = (), owner: object = None
    ) -> None:
        self.request = request
        self.owner = owner
        self.gaps: list[tuple[int, int, bytes]] = []
        self._pieces = body_template(request)
        self._starts: list[int] = []
        self._ends: list[int] = []
        position = header_length
        for number, tensor in enumerate(request.inputs):
            if number and gaps:
                gap = gaps[number - 1]
                self.gaps.append((position, position + len(gap), gap))
                position += len(gap)
            self._starts.append(position)
            position += tensor.size_bytes
            self._ends.append(position)
        self.body_length = position
        self.refers = any(isinstance(tensor.data, PayloadRef) for tensor in request.inputs)
        self.is_used = False
        """Whether it was used since `RequestTemplates` last considered replacing it."""
        # The header, its packed form, and the parsed request, whose objects are larger than the text.
        self.size_bytes = _ENTRY_BYTES + 4 * header_length

    def pack(self, body: Body) -> bytes:
        """The packed form (`weir.schemas.wire.request_body.pack_body`) of the request with this body."""
        pieces = self._pieces
        content = memoryview(body)
        if len(pieces) == 2:
            return b"".join((pieces[0], content[self._starts[0] :], pieces[1]))
        parts: list[bytes | memoryview] = []
        for piece, start, end in zip(pieces, self._starts, self._ends, strict=False):
            parts += (piece, content[start:end])
        parts.append(pieces[-1])
        return b"".join(parts)

    def pack_in_slot(self, slot: Slot, offset: int) -> bytes:
        """As `pack`, for a body that begins at `offset` of a payload slot. Only for a template that `refers`."""
        parts: list[bytes | memoryview] = []
        for tensor, piece, start, end in zip(self.request.inputs, self._pieces, self._starts, self._ends, strict=False):
            if isinstance(tensor.data, PayloadRef):
                parts += (piece, pack_ref(slot.ref(offset + start, end - start)))
            else:
                parts += (piece, slot.view[offset + start : offset + end])
        parts.append(self._pieces[-1])
        return b"".join(parts)


class RequestTemplates:
    """At most `MAX_HEADERS` templates of `MAX_KEPT_BYTES` together, by version and header, replaced by the CLOCK algorithm.

    They belong to one model with one configuration, or each to its owner.
    """

    __slots__ = ("_seen_once", "_size_bytes", "_templates")

    def __init__(self) -> None:
        self._templates: dict[tuple[str, bytes], RequestTemplate] = {}
        self._size_bytes = 0
        self._seen_once: set[int] = set()

    def find(self, version: str, body: Body, header_length: int) -> RequestTemplate | None:
        """The template for the header of this body, which counts as used now, if the body fits."""
        if header_length > MAX_HEADER_BYTES:
            return None
        template = self._templates.get((version, bytes(body[:header_length])))
        if template is None or template.body_length != len(body):
            return None
        for start, end, gap in template.gaps:
            if body[start:end] != gap:
                return None
        template.is_used = True
        return template

    def keep(
        self,
        request: InferRequest,
        body: Body,
        header_length: int,
        gaps: Sequence[bytes] = (),
        owner: object = None,
    ) -> bool:
        """Makes a template of a request that was parsed from this body and is valid; False if it can't have one.

        With an `owner`, the header names the model and the version. Tensors of a `body` that is a view of a payload slot
        may be references to the slot; other references must not be.
        """
        if (
            request.id
            or request.owner  # the template would be for this owner alone
            or request.regions  # regions may be registered again under the same names
            or header_length > MAX_HEADER_BYTES
            or not request.inputs
            or any(t.datatype == "BYTES" or not isinstance(t.data, (memoryview, PayloadRef)) for t in request.inputs)
            or any(not isinstance(t.data, PayloadRef) and t.size_bytes > len(_NO_CONTENT) for t in request.inputs)
        ):
            return False
        key = "" if owner is not None else request.model_version, bytes(body[:header_length])
        if not self._takes(key):
            return False
        template = RequestTemplate(without_content(request), header_length, gaps, owner)
        fits = template.body_length == len(body)
        if fits:
            self._add(key, template)
        return fits

    def forget(self, owner: object) -> None:
        """Removes the templates of a model that has changed."""
        for key in [key for key, template in self._templates.items() if template.owner is owner]:
            self._remove(key)

    def _takes(self, key: tuple[str, bytes]) -> bool:
        """Whether to make a template for `key`: there is room, or the key comes for the second time."""
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

    def _add(self, key: tuple[str, bytes], template: RequestTemplate) -> None:
        """Adds a template, and removes as many others that were not used recently as it needs."""
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
        templates[key] = template
        self._size_bytes += template.size_bytes

    def _remove(self, key: tuple[str, bytes]) -> None:
        template = self._templates.pop(key, None)
        if template is not None:
            self._size_bytes -= template.size_bytes


def without_content(request: InferRequest) -> InferRequest:
    """Replaces the content of the request's tensors by zeros of the same sizes, so that the body is freed.

    References to payload slots become references to none.
    """
    for tensor in request.inputs:
        if isinstance(tensor.data, PayloadRef):
            tensor.data = PayloadRef("", 0, 0, 0, tensor.size_bytes)
        else:
            tensor.data = _NO_CONTENT[: tensor.size_bytes]
    return request

"""`MessageTemplateCache`: avoids parsing a gRPC request that differs from an earlier one only in its tensors' content.

The counterpart of `weir.calls.request_templates` for ModelInferRequest. Its raw contents come last, each after its tag and
length; the bytes before the first content are the header. A template costs 2 us where parsing, checking and packing cost
20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weir.calls.payload_store import SLOT_FROM_BYTES
from weir.calls.request_templates import MAX_HEADER_BYTES, RequestTemplate, TemplateCache, without_content
from weir.gateway.grpc.codec import decode_request
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest

if TYPE_CHECKING:
    from weir.calls.catalog import ServedModel

_RAW_INPUT_TAG = 0x3A  # ModelInferRequest.raw_input_contents: field 7, length-delimited

_Bytes = bytes | memoryview


class MessageTemplate(RequestTemplate):
    """A checked request for `served` whose raw contents can be replaced. `data` is the message that it came in."""

    __slots__ = ("_gaps", "served")

    def __init__(self, request: InferRequest, served: ServedModel, data: _Bytes, starts: Sequence[int]) -> None:
        super().__init__(request, starts[0])
        self._starts = list(starts)
        self._ends = [start + tensor.size_bytes for start, tensor in zip(starts, request.inputs, strict=True)]
        # The tag and length before each content except the first, whose tag belongs to the header.
        self._gaps = [
            (end, start, bytes(data[end:start])) for end, start in zip(self._ends[:-1], starts[1:], strict=True)
        ]
        self.served = served

    def fits(self, data: _Bytes) -> bool:
        """Whether a message with this header and length has its contents at the same offsets."""
        return all(data[end:start] == gap for end, start, gap in self._gaps)


class MessageTemplateCache:
    """The message templates of one gateway."""

    def __init__(self) -> None:
        self._templates: TemplateCache[tuple[int, bytes], MessageTemplate] = TemplateCache(self._on_removed)
        self._header_lengths: dict[int, int] = {}  # by the length of the message; the last one kept counts

    def find(self, data: bytes) -> MessageTemplate | None:
        """The template for a message, None if there is none."""
        length = len(data)
        header_length = self._header_lengths.get(length)
        if header_length is None:
            return None
        prepared = self._templates.find((length, data[:header_length]))
        return prepared if prepared is not None and prepared.fits(data) else None

    def forget(self, prepared: MessageTemplate) -> None:
        """Removes a template whose model has changed."""
        self._templates.remove_if(lambda kept: kept.served is prepared.served)

    def _on_removed(self, key: tuple[int, bytes], removed: MessageTemplate) -> None:
        length, header = key
        if self._header_lengths.get(length) == len(header):
            del self._header_lengths[length]

    def keep(self, request: InferRequest, served: ServedModel, data: bytes, raw_contents: Sequence[_Bytes]) -> None:
        """Keeps a valid request that was parsed from `data`, with these contents, as a template if it can be one."""
        if (
            request.id
            or request.regions
            or request.correlation_id
            or request.traceparent
            or len(data) > SLOT_FROM_BYTES
            or not request.inputs
            or len(request.inputs) != len(raw_contents)
            or any(t.datatype == "BYTES" or t.data is not c for t, c in zip(request.inputs, raw_contents, strict=True))
        ):
            return
        starts = _content_starts(data, raw_contents)
        if starts is None or starts[0] > MAX_HEADER_BYTES:
            return
        key = len(data), data[: starts[0]]
        if not self._templates.takes(key):
            return
        self._templates.keep(key, MessageTemplate(without_content(request), served, data, starts))
        self._header_lengths[len(data)] = starts[0]


def _content_starts(data: bytes, raw_contents: Sequence[_Bytes]) -> list[int] | None:
    """The offset of each of the contents in `data`; None if they are not the end of it."""
    starts: list[int] = []
    end = len(data)
    for content in reversed(raw_contents):
        starts.append(end - len(content))
        end = starts[-1] - 1 - (max(1, len(content).bit_length()) + 6) // 7
        if end < 0 or data[end] != _RAW_INPUT_TAG:
            return None
    try:
        _, contents_before = decode_request(data[:end])
    except WeirError:
        return None
    return None if contents_before else starts[::-1]

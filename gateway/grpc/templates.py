"""`MessageTemplates`: avoids parsing a gRPC request that differs from an earlier one only in its tensors' content.

The raw contents of a ModelInferRequest come last, each after its tag and length; the bytes before the first content are
the header. A template costs 2 us where parsing, checking and packing cost 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weir.calls.payload_store import SLOT_FROM_BYTES
from weir.calls.request_templates import MAX_HEADERS, RequestTemplate, RequestTemplates
from weir.gateway.grpc.codec import decode_request
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest

if TYPE_CHECKING:
    from weir.calls.catalog import ServedModel

_RAW_INPUT_TAG = 0x3A  # ModelInferRequest.raw_input_contents: field 7, length-delimited

_Bytes = bytes | memoryview


class MessageTemplates(RequestTemplates):
    """The templates of the messages of one gateway."""

    __slots__ = ("_header_lengths",)

    def __init__(self) -> None:
        super().__init__()
        self._header_lengths: dict[int, int] = {}  # by the length of the message; the last one kept counts

    def find_message(self, data: bytes) -> RequestTemplate | None:
        """The template for a message, None if there is none."""
        header_length = self._header_lengths.get(len(data))
        return None if header_length is None else self.find("", data, header_length)

    def keep_message(
        self, request: InferRequest, served: ServedModel, data: bytes, raw_contents: Sequence[_Bytes]
    ) -> None:
        """Keeps a valid request that was parsed from `data`, with these contents, as a template if it can be one."""
        if (
            request.correlation_id
            or request.traceparent
            or len(data) > SLOT_FROM_BYTES
            or len(request.inputs) != len(raw_contents)
            or any(t.data is not content for t, content in zip(request.inputs, raw_contents, strict=True))
        ):
            return
        starts = _content_starts(data, raw_contents)
        if starts:
            ends = [start + len(content) for start, content in zip(starts, raw_contents, strict=True)]
            gaps = [data[end:start] for end, start in zip(ends[:-1], starts[1:], strict=True)]
            if not self.keep(request, data, starts[0], gaps, served):
                return
            if len(self._header_lengths) >= MAX_HEADERS:
                self._header_lengths.clear()
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

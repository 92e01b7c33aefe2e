"""An error as HTTP tells it."""

from __future__ import annotations

import http

from schemas.errors import WeirError
from schemas.kserve_response import error_body

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}


def error_response(error: WeirError) -> tuple[bytes, bytes]:
    """Head, but for its last line, and body: Triton's status and text, and when to come again."""
    body = error_body(error.message)
    extra = b"Accept-Encoding: gzip, deflate\r\n" if error.message == "Unsupported compression type" else b""
    if error.retry_after_s:
        extra = b"Retry-After: %d\r\n" % error.retry_after_s
    head = b"%sContent-Type: application/json\r\n%sContent-Length: %d\r\n" % (
        _STATUS_LINES[error.http_status],
        extra,
        len(body),
    )
    return head, body

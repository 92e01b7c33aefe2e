"""`CallHead`: what the headers of a call mean (gRPC over HTTP/2, "Requests")."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.access import OPEN, Access
from gateway.async_requests.preferences import read_preferences
from gateway.grpc.compression import ENCODINGS, accepted_encoding
from gateway.grpc.status import CallError, Status, http_error
from gateway.http2.connection import ADVERTISED_HEADER_LIST_BYTES
from gateway.http2.headers import RequestHead
from schemas.errors import WeirError
from schemas.requests import Parameters

_CONTENT_TYPE = re.compile(rb"application/grpc(?:[+;].*)?", re.IGNORECASE | re.DOTALL)
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_INFER_METHODS = (b"/ModelInfer", b"/ModelStreamInfer")
_PREFER = (b"prefer", b"weir-prefer")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class CallHead:
    """Which method is called, and how.

    `handler` is the method's, None where there is none. `encoding` is how messages of the request may be compressed,
    `accepted_encoding` how those of the response are best compressed, "" for not at all. With `wants_grpc_errors`
    (`triton_grpc_error`) an error of one request is to end the whole call. `timeout_s` is None for a call without a
    deadline. `refusal` is the header block that answers a call that can't be, and empty otherwise. `forwarded` are the
    headers that become parameters of a request. `later` are all headers of an inference that is to be answered later, else
    None.
    """

    __slots__ = (
        "accepted_encoding",
        "encoding",
        "forwarded",
        "handler",
        "later",
        "refusal",
        "timeout_s",
        "traceparent",
        "tracestate",
        "wants_grpc_errors",
    )

    def __init__(self, head: RequestHead, handlers: Mapping[bytes, Any], access: Access = OPEN) -> None:
        fields = dict(head.fields)
        self.handler: Any = handlers.get(head.path)
        self.encoding = fields.get(b"grpc-encoding", b"identity").decode("latin-1")
        self.traceparent = fields.get(b"traceparent", b"").decode("latin-1")
        self.accepted_encoding = accepted_encoding(fields.get(b"grpc-accept-encoding", b"").decode("latin-1"))
        self.wants_grpc_errors = fields.get(b"triton_grpc_error") == b"true"
        self.tracestate = fields.get(b"tracestate", b"").decode("latin-1") if self.traceparent else ""
        self.timeout_s: float | None = None
        self.forwarded: Parameters = {}
        self.later: Sequence[tuple[bytes, bytes]] | None = None
        self.refusal = b""
        if head.method != b"POST":
            self.refusal = http_error(405)
        elif not _CONTENT_TYPE.fullmatch(fields.get(b"content-type", b"")):
            self.refusal = http_error(415)
        else:
            try:
                self._check(head, fields)
                self._admit(head, access)
            except CallError as error:
                self.refusal = error.response()

    def _check(self, head: RequestHead, fields: dict[bytes, bytes]) -> None:
        if head.size_bytes > ADVERTISED_HEADER_LIST_BYTES:
            raise CallError(Status.RESOURCE_EXHAUSTED, "received metadata size exceeds the limit")
        if self.handler is None:
            raise CallError(Status.UNIMPLEMENTED, f"unknown method {head.path.decode('latin-1')}")
        if self.encoding not in ENCODINGS:
            raise CallError(Status.UNIMPLEMENTED, f"unknown compression '{self.encoding}'")
        timeout = fields.get(b"grpc-timeout")
        if timeout is not None:
            self.timeout_s = _seconds(timeout)

    def _admit(self, head: RequestHead, access: Access) -> None:
        # A head is interpreted once for all calls that have it, so this costs most calls nothing.
        refusal = access.grpc_refusal(head.path, head.fields)
        if refusal:
            raise CallError(Status.UNAVAILABLE, refusal)
        if not head.path.endswith(_INFER_METHODS):
            return
        if head.path.endswith(b"/ModelInfer") and _wants_answer_later(head):
            self.later = head.fields
        try:
            self.forwarded = access.grpc_parameters(head.fields)
        except WeirError as error:
            raise CallError.of(error) from None


def _wants_answer_later(head: RequestHead) -> bool:
    preferences = [value for name, value in head.fields if name in _PREFER]
    return bool(preferences) and read_preferences(preferences).respond_async


def _seconds(timeout: bytes) -> float:
    match = _TIMEOUT.fullmatch(timeout)
    if match is None:
        raise CallError(Status.INTERNAL, "malformed grpc-timeout")
    return int(match[1]) * _UNIT_S[match[2]]

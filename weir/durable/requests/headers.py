"""`DurableHeaders`: the headers of a durable request, except those that describe the format of its body.

| header | meaning |
|---|---|
| `Nats-Msg-Id` | the request's id, which deduplicates it and names its result |
| `Weir-Tenant` | tenant of the request; tenants share a model fairly |
| `Weir-Deadline-Ms` | unix time in milliseconds after which the response is of no use |
| `Weir-Priority` | level of the model's queue, as parameter `priority` of KServe |
| `Weir-Reply-To` | subject to which the response is sent, in addition to stream RESULT |
| `Weir-Sequence-Id`, `Weir-Sequence-Start`, `Weir-Sequence-End` | as the parameters of KServe |
| `traceparent`, `tracestate` | W3C trace context |
| `Weir-Result-Ttl-Secs` | for how long the result is kept, at most as long as the server keeps results |
| `Weir-Object` | the body lies in object store `requests` under this name; the message has no body |
| `Content-Type`, `Inference-Header-Content-Length` | the format of the body (`weir.calls.inference.documents`) |

If the body has a parameter of the same meaning, the header takes precedence.

`HeaderCache`: parsed headers of earlier requests. A producer sends the same headers each time, except the message's id
and those that JetStream adds to a batch. So the header block without the broker's lines is looked up, and only the id
is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from weir.bus.naming.reserved_subjects import subject_problem
from weir.bus.nats.headers import parse_headers
from weir.calls.inference.documents import CONTENT_TYPE, HEADER_LENGTH
from weir.calls.request_headers import SHOWN_LENGTH, RequestHeaders, read_headers, read_number
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.request_limits import DEFAULT_LIMITS, RequestLimits

ID = "nats-msg-id"
REPLAYED_ID = "weir-id"
TENANT = "weir-tenant"
REPLY_TO = "weir-reply-to"
RESULT_TTL = "weir-result-ttl-secs"
OBJECT = "weir-object"
"""Names of headers, in lower case."""

MAX_NAME_LENGTH = 128
"""Characters of an id or of a tenant's name."""

MAX_OBJECT_NAME_LENGTH = 256

MAX_RESULT_TTL_S = 10 * 365 * 86400

_MAX_LENGTH_DIGITS = 9


class DurableHeaders(msgspec.Struct, frozen=True, gc=False):
    """The parsed headers. `common` are those of any NATS request; "" and 0 stand for missing headers."""

    id: str = ""
    tenant: str = ""
    reply_to: str = ""
    result_ttl_s: int = 0
    object_name: str = ""
    common: RequestHeaders = msgspec.field(default_factory=RequestHeaders)
    content_headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Headers that describe the format of the body, for `weir.calls.inference.documents.parse_body`."""
    template_length: int = 0
    """Bytes of the JSON header of a body that a request template may pack; 0 where none may."""

    @property
    def deadline_ms(self) -> int:
        """Unix time in milliseconds after which the response is of no use; 0 for never."""
        return self.common.deadline_ms or 0


def read_durable_headers(headers: Mapping[str, str], limits: RequestLimits = DEFAULT_LIMITS) -> DurableHeaders:
    """Parses headers (names in lower case). `common.apply(request)` copies those of any request into it.

    Raises WeirError (INVALID_ARG) for an invalid value; `read_valid_headers` returns the valid ones nevertheless.
    """
    common, object_name = read_headers(headers, limits), _named_header(headers, OBJECT, MAX_OBJECT_NAME_LENGTH)
    return DurableHeaders(
        id=check_id(_id_in(headers)),
        tenant=_named_header(headers, TENANT, MAX_NAME_LENGTH),
        reply_to=_reply_to(headers),
        result_ttl_s=_result_ttl_s(headers),
        object_name=object_name,
        common=common,
        content_headers=_content_headers(headers),
        template_length=0 if object_name else _template_length(headers.get(HEADER_LENGTH, ""), common),
    )


def _template_length(text: str, common: RequestHeaders) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > _MAX_LENGTH_DIGITS:
        return 0
    if common.priority is not None or common.correlation_id is not None or common.traceparent:
        return 0
    if common.sequence_start is not None or common.sequence_end is not None:
        return 0
    return int(text)


def read_valid_headers(headers: Mapping[str, str]) -> DurableHeaders:
    """The valid ones of the headers that are needed to reply to a request with invalid headers. Never raises."""
    terms: dict[str, Any] = {"content_headers": _content_headers(headers)}
    with suppress(WeirError):
        terms["id"] = check_id(_id_in(headers))
    with suppress(WeirError):
        terms["tenant"] = _named_header(headers, TENANT, MAX_NAME_LENGTH)
    with suppress(WeirError):
        terms["reply_to"] = _reply_to(headers)
    with suppress(WeirError):
        terms["result_ttl_s"] = _result_ttl_s(headers)
    with suppress(WeirError):
        terms["object_name"] = _named_header(headers, OBJECT, MAX_OBJECT_NAME_LENGTH)
    return DurableHeaders(**terms)


def _id_in(headers: Mapping[str, str]) -> str:
    # A dead letter is replayed with its id, but another `Nats-Msg-Id`: else it would be dropped as a duplicate.
    return headers.get(REPLAYED_ID) or headers.get(ID, "")


def check_id(id: str) -> str:
    """Returns `id` if it is a valid id of a durable request, or "". Raises WeirError (INVALID_ARG) if not."""
    problem = _name_problem(id, MAX_NAME_LENGTH)
    if problem:
        raise invalid(f"the id of a durable request {problem}, got: {_escaped(id)}")
    return id


def _named_header(headers: Mapping[str, str], name: str, max_length: int) -> str:
    value = headers.get(name, "")
    problem = _name_problem(value, max_length)
    if problem:
        raise invalid(f"header '{name}' {problem}, got: {_escaped(value)}")
    return value


def _name_problem(value: str, max_length: int) -> str:
    if len(value) > max_length:
        return f"cannot be longer than {max_length} characters"
    # Bytes that are not UTF-8 were decoded as U+FFFD: different values would be equal.
    if not value.isprintable() or "\ufffd" in value:
        return "must be printable text"
    return ""


def _reply_to(headers: Mapping[str, str]) -> str:
    subject = headers.get(REPLY_TO, "")
    problem = subject_problem(subject) if subject else ""
    if problem:
        raise invalid(f"header '{REPLY_TO}' {problem}, got: {_escaped(subject)}")
    return subject


def _result_ttl_s(headers: Mapping[str, str]) -> int:
    if RESULT_TTL not in headers:
        return 0
    seconds = read_number(headers, RESULT_TTL)
    if not 1 <= seconds <= MAX_RESULT_TTL_S:
        raise invalid(f"header '{RESULT_TTL}' must be in range [1, {MAX_RESULT_TTL_S}], got: {seconds}")
    return seconds


def _content_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in (CONTENT_TYPE, HEADER_LENGTH) if name in headers}


def _escaped(value: str) -> str:
    return value[:SHOWN_LENGTH].encode("unicode_escape").decode()


MAX_BLOCKS = 256
"""Header blocks that are cached for one lane of a model."""

MAX_BLOCK_BYTES = 1024

_without_broker_lines = re.compile(rb"\r\nNats-[A-Za-z-]+: ?[!-~]*(?=\r\n)").sub
_find_ids = re.compile(rb"\r\nNats-Msg-Id: ?([!-~]*)(?=\r\n)").findall


class HeaderCache:
    """Parses header blocks, and caches the results."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._terms: dict[bytes, DurableHeaders] = {}

    def read(self, block: bytes) -> tuple[DurableHeaders, WeirError | None]:
        """The headers in a message's block; with an error (INVALID_ARG) the valid ones."""
        rest = _without_broker_lines(b"", block)
        known = self._terms.get(rest)
        headers: dict[str, str] = {}
        try:
            if known is not None:
                ids = _find_ids(block)
                return replace(known, id=check_id(ids[0].decode()) if ids else ""), None
            headers = parse_headers(block)
            terms = read_durable_headers(headers, self._limits)
        except WeirError as error:
            return read_valid_headers(headers or parse_headers(block)), error
        self._keep(rest, terms)
        return terms, None

    def _keep(self, rest: bytes, terms: DurableHeaders) -> None:
        if len(rest) > MAX_BLOCK_BYTES:
            return
        lowered = rest.lower()
        # Other spellings of the id, and headers that differ from request to request.
        if b"nats-" in lowered or b"weir-id" in lowered or terms.common.traceparent or terms.deadline_ms:
            return
        if len(self._terms) >= MAX_BLOCKS:
            self._terms.clear()  # most blocks in it were seen once
        self._terms[rest] = terms

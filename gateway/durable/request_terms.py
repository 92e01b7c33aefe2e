"""`DurableTerms`: what the headers of a durable request say of it, besides how its body is to be read.

| header | meaning |
|---|---|
| `Nats-Msg-Id` | the request's id, which deduplicates it and names its result |
| `Weir-Tenant` | on whose behalf; tenants share a model fairly |
| `Weir-Deadline-Ms` | unix time in milliseconds after which the answer is of no use |
| `Weir-Priority` | level of the model's queue, as parameter `priority` of KServe |
| `Weir-Reply-To` | subject to which the answer is sent, besides stream RESULT |
| `Weir-Sequence-Id`, `Weir-Sequence-Start`, `Weir-Sequence-End` | as the parameters of KServe |
| `traceparent`, `tracestate` | W3C trace context |
| `Weir-Result-Ttl-Secs` | for how long the result is kept, at most as long as the server keeps any |
| `Weir-Object` | the body lies in object store `requests` under this name; the message's own is empty |
| `Content-Type`, `Inference-Header-Content-Length` | the form of the body (`gateway.durable.bodies`) |

Where the body says the same by a parameter, the header holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from bus.reserved_subjects import subject_problem
from gateway.durable.bodies import CONTENT_TYPE, HEADER_LENGTH
from gateway.request_headers import SHOWN_LENGTH, RequestHeaders, read_headers, read_number
from schemas.errors import WeirError, invalid
from schemas.request_limits import DEFAULT_LIMITS, RequestLimits

ID = "nats-msg-id"
REPLAYED_ID = "weir-id"
TENANT = "weir-tenant"
REPLY_TO = "weir-reply-to"
RESULT_TTL = "weir-result-ttl-secs"
OBJECT = "weir-object"
"""Names of headers, in lower case."""

MAX_NAME_LENGTH = 128
"""Characters of an id, or of a tenant's name."""

MAX_OBJECT_NAME_LENGTH = 256

MAX_RESULT_TTL_S = 10 * 365 * 86400


@dataclass(slots=True)
class DurableTerms:
    """See the module. `said` is what holds for requests of any door; "" and 0 stand for what nobody said."""

    id: str = ""
    tenant: str = ""
    reply_to: str = ""
    result_ttl_s: int = 0
    object_name: str = ""
    said: RequestHeaders = field(default_factory=RequestHeaders)
    content_headers: dict[str, str] = field(default_factory=dict)
    """Those that tell the form of the body, for `gateway.durable.bodies.parse_body`."""

    @property
    def deadline_ms(self) -> int:
        """Unix time after which the answer is of no use; 0 for never."""
        return self.said.deadline_ms or 0

    def with_id(self, id: str) -> DurableTerms:
        """The same for another request, with which all but the id is shared."""
        return DurableTerms(
            id, self.tenant, self.reply_to, self.result_ttl_s, self.object_name, self.said, self.content_headers
        )


def read_terms(headers: Mapping[str, str], limits: RequestLimits = DEFAULT_LIMITS) -> DurableTerms:
    """What `headers` (names in lower case) say. `terms.said.apply(request)` tells a request what concerns it.

    Raises WeirError (INVALID_ARG) for a value that can't be one; `readable_terms` has what can be read nevertheless.
    """
    return DurableTerms(
        id=check_id(_id_in(headers)),
        tenant=_name(headers, TENANT, MAX_NAME_LENGTH),
        reply_to=_reply_to(headers),
        result_ttl_s=_result_ttl_s(headers),
        object_name=_name(headers, OBJECT, MAX_OBJECT_NAME_LENGTH),
        said=read_headers(headers, limits),
        content_headers=_content_headers(headers),
    )


def readable_terms(headers: Mapping[str, str]) -> DurableTerms:
    """What is needed to answer a request whose headers are refused, as far as it makes sense. Never raises."""
    terms = DurableTerms(content_headers=_content_headers(headers))
    with suppress(WeirError):
        terms.id = check_id(_id_in(headers))
    with suppress(WeirError):
        terms.tenant = _name(headers, TENANT, MAX_NAME_LENGTH)
    with suppress(WeirError):
        terms.reply_to = _reply_to(headers)
    with suppress(WeirError):
        terms.result_ttl_s = _result_ttl_s(headers)
    with suppress(WeirError):
        terms.object_name = _name(headers, OBJECT, MAX_OBJECT_NAME_LENGTH)
    return terms


def _id_in(headers: Mapping[str, str]) -> str:
    # A dead letter is replayed under its id, and published under another name, or it would be taken for a duplicate.
    return headers.get(REPLAYED_ID) or headers.get(ID, "")


def check_id(id: str) -> str:
    """`id`, which may be the id of a durable request, or "" for none. Raises WeirError (INVALID_ARG) where it can't."""
    problem = _name_problem(id, MAX_NAME_LENGTH)
    if problem:
        raise invalid(f"the id of a durable request {problem}, got: {_shown(id)}")
    return id


def _name(headers: Mapping[str, str], name: str, max_length: int) -> str:
    value = headers.get(name, "")
    problem = _name_problem(value, max_length)
    if problem:
        raise invalid(f"header '{name}' {problem}, got: {_shown(value)}")
    return value


def _name_problem(value: str, max_length: int) -> str:
    if len(value) > max_length:
        return f"cannot be longer than {max_length} characters"
    # U+FFFD is what bytes that are no UTF-8 were read as: different ones would be the same.
    if not value.isprintable() or "\ufffd" in value:
        return "must be printable text"
    return ""


def _reply_to(headers: Mapping[str, str]) -> str:
    subject = headers.get(REPLY_TO, "")
    problem = subject_problem(subject) if subject else ""
    if problem:
        raise invalid(f"header '{REPLY_TO}' {problem}, got: {_shown(subject)}")
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


def _shown(value: str) -> str:
    return value[:SHOWN_LENGTH].encode("unicode_escape").decode()

"""`AsyncRequestOptions`: the headers of an asynchronous request, validated, as they are stored with it.

The names are those of NATS producers (docs/events.md), the same in HTTP and in gRPC metadata.

`Preferences`: the preferences `respond-async` and `wait` in a `Prefer` header. Malformed values are ignored; of several
with the same name the first counts.
Source: RFC 7240 (Prefer Header for HTTP).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from weir.access.gate import Gate
from weir.access.principal import Principal
from weir.durable.api.callback_rules import CallbackRules
from weir.durable.api.stored_results import ResultsLimit
from weir.durable.requests.headers import DurableHeaders, read_durable_headers
from weir.schemas.core.errors import invalid
from weir.schemas.core.request_limits import DEFAULT_LIMITS
from weir.schemas.core.requests import InferRequest

MAX_KEY_LENGTH = 255
"""Characters of an idempotency key."""

_MAX_SUBJECT_LENGTH = 255
_MAX_TRACE_LENGTH = 512  # W3C requires to forward this much of a tracestate; a longer one is dropped

_FORWARDED = {
    "weir-deadline-ms": "Weir-Deadline-Ms",
    "weir-priority": "Weir-Priority",
    "weir-sequence-id": "Weir-Sequence-Id",
    "weir-sequence-start": "Weir-Sequence-Start",
    "weir-sequence-end": "Weir-Sequence-End",
    "weir-tenant": "Weir-Tenant",
    "weir-result-ttl-secs": "Weir-Result-Ttl-Secs",
    "traceparent": "traceparent",
    "tracestate": "tracestate",
}
_READ = frozenset([*_FORWARDED, "idempotency-key", "weir-callback-url", "weir-callback-subject", "weir-reply-to"])

_PRINTABLE = re.compile(r"[\x20-\x7e]+")
_SUBJECT = re.compile(r"(?:answers|_INBOX)(?:\.[^\s.*>\x00-\x20\x7f]+)+")


@dataclass(slots=True)
class AsyncRequestOptions:
    """`headers` are stored with the request; `key` is the idempotency key, "" without one.

    The response is also posted to `callback_url`, or published on `reply_to`, if given.
    """

    headers: dict[str, str] = field(default_factory=dict)
    key: str = ""
    parsed: DurableHeaders = field(default_factory=DurableHeaders)
    callback_url: str = ""
    reply_to: str = ""
    owner: str = ""
    results_limit: ResultsLimit | None = None

    @classmethod
    def of(
        cls,
        fields: Iterable[tuple[bytes, bytes]],
        rules: CallbackRules,
        sticky_header: str = "",
        principal: Principal | None = None,
    ) -> AsyncRequestOptions:
        """Parses headers (names in lower case). Raises WeirError (INVALID_ARG) for invalid ones.

        The value of `sticky_header`, which keeps a caller on one version of the model, is stored with the request. The
        tenant and the owner are those of `principal`, which has proved them; without it, the client says its tenant.
        """
        found: dict[str, str] = {}
        for name, value in fields:
            text = name.decode("latin-1")
            if text in _READ or (text == sticky_header and text):
                found.setdefault(text, value.decode("latin-1").strip())
        asked = cls()
        if principal is not None:
            asked.owner = principal.owner
            found.pop("weir-tenant", None)
            if principal.tenant:
                found["weir-tenant"] = principal.tenant
        for known, travels_as in _FORWARDED.items():
            if known in found and not (known.startswith("trace") and len(found[known]) > _MAX_TRACE_LENGTH):
                asked.headers[travels_as] = found[known]
        if sticky_header in found and sticky_header not in _READ:
            asked.headers[sticky_header] = _checked_text(sticky_header, found[sticky_header], MAX_KEY_LENGTH)
        # Parsed as the consumer of the queue does, so that it rejects no accepted request.
        asked.parsed = read_durable_headers(
            {name.lower(): value for name, value in asked.headers.items()}, DEFAULT_LIMITS
        )
        asked.key = _checked_text("Idempotency-Key", found.get("idempotency-key", ""), MAX_KEY_LENGTH)
        if "idempotency-key" in found and not asked.key:
            raise invalid("Idempotency-Key must not be empty")
        asked._read_callbacks(found, rules)
        return asked

    def limit_results(self, gate: Gate, principal: Principal) -> None:
        """Has the request refused if what is stored for the owner of `principal` has reached its limit."""
        limit = gate.limits_of(principal).stored_results
        if limit is not None:
            what = f"{limit} stored requests and results"
            refusal = partial(gate.used_up, principal, "stored_results", what)
            self.results_limit = ResultsLimit(self.owner, limit, refusal)

    @property
    def tenant(self) -> str:
        """The tenant, "" if none is given."""
        return self.parsed.tenant

    def read_into(self, request: InferRequest) -> None:
        """Copies the headers into `request`, so that it can be validated."""
        self.parsed.common.apply(request)

    def _read_callbacks(self, found: dict[str, str], rules: CallbackRules) -> None:
        self.callback_url = found.get("weir-callback-url", "")
        self.reply_to = found.get("weir-callback-subject") or found.get("weir-reply-to", "")
        if self.callback_url and self.reply_to:
            raise invalid("give either a callback URL or a callback subject, not both")
        if self.callback_url:
            rules.check_url(self.callback_url)
        # A client that may infer must not be able to publish on arbitrary subjects of the bus.
        if self.reply_to and not (len(self.reply_to) <= _MAX_SUBJECT_LENGTH and _SUBJECT.fullmatch(self.reply_to)):
            raise invalid("a callback subject must begin with 'answers.' or '_INBOX.' and must not contain wildcards")


def _checked_text(name: str, value: str, limit: int) -> str:
    if value and not (len(value) <= limit and _PRINTABLE.fullmatch(value)):
        raise invalid(f"{name} must be at most {limit} printable ASCII characters")
    return value


_MAX_HEADER_LENGTH = 1024  # characters of one header that are parsed
_ITEM = re.compile(r'(?:[^,"]|"[^"]*")+')
_SECONDS = re.compile(r"[0-9]{1,9}")

MAX_WAIT_S = 60.0
"""The maximum of the preference `wait`."""


class Preferences(NamedTuple):
    """Whether the response is fetched later, and how long to wait for it now (`wait_s`, at most `MAX_WAIT_S`)."""

    respond_async: bool = False
    wait_s: float | None = None


def read_preferences(values: Iterable[bytes]) -> Preferences:
    """The preferences in the values of `Prefer` headers."""
    found: dict[str, str] = {}
    for value in values:
        text = value.decode("latin-1")
        for item in _ITEM.findall(text) if len(text) <= _MAX_HEADER_LENGTH else ():
            name, _, argument = item.partition(";")[0].partition("=")
            found.setdefault(name.strip().lower(), argument.strip().strip('"'))
    wait = found.get("wait", "")
    wait_s = min(float(wait), MAX_WAIT_S) if _SECONDS.fullmatch(wait) else None
    return Preferences("respond-async" in found, wait_s)


def prefers_async(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request with these headers (names in lower case) is asynchronous."""
    return read_preferences(value for name, value in headers if name == b"prefer").respond_async

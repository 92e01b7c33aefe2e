"""`AskedLater`: what the headers of a request say that is answered later, checked, as it travels with the request.

The names are those of producers' messages (docs/events.md), and are the same in HTTP and in the metadata of gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.async_requests.callback_rules import CallbackRules
from gateway.durable.request_terms import DurableTerms, read_terms
from schemas.errors import invalid
from schemas.request_limits import DEFAULT_LIMITS
from schemas.requests import InferRequest

MAX_KEY_LENGTH = 255
"""Characters of an idempotency key."""

_MAX_SUBJECT_LENGTH = 255
_MAX_TRACE_LENGTH = 512  # of what W3C's tracestate promises to pass on; a longer one is left out

_PASSED_ON = {
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
_READ = frozenset([*_PASSED_ON, "idempotency-key", "weir-callback-url", "weir-callback-subject", "weir-reply-to"])

_PRINTABLE = re.compile(r"[\x20-\x7e]+")
_SUBJECT = re.compile(r"(?:answers|_INBOX)(?:\.[^\s.*>\x00-\x20\x7f]+)+")


@dataclass(slots=True)
class AskedLater:
    """See the module. `headers` are those of the message that is stored; `key` is the idempotency key, "" without one.

    The answer is also posted to `callback_url`, or published on `reply_to`, where they are given.
    """

    headers: dict[str, str] = field(default_factory=dict)
    key: str = ""
    terms: DurableTerms = field(default_factory=DurableTerms)
    callback_url: str = ""
    reply_to: str = ""

    @classmethod
    def of(cls, fields: Iterable[tuple[bytes, bytes]], rules: CallbackRules) -> AskedLater:
        """What these headers (names in lower case) say. Raises WeirError (INVALID_ARG) for what makes no sense."""
        found: dict[str, str] = {}
        for name, value in fields:
            text = name.decode("latin-1")
            if text in _READ:
                found.setdefault(text, value.decode("latin-1").strip())
        asked = cls()
        for known, travels_as in _PASSED_ON.items():
            if known in found and not (known.startswith("trace") and len(found[known]) > _MAX_TRACE_LENGTH):
                asked.headers[travels_as] = found[known]
        # As the one reads them who takes the request up: what is accepted is not refused there.
        asked.terms = read_terms({name.lower(): value for name, value in asked.headers.items()}, DEFAULT_LIMITS)
        asked.key = _text("Idempotency-Key", found.get("idempotency-key", ""), MAX_KEY_LENGTH)
        if "idempotency-key" in found and not asked.key:
            raise invalid("Idempotency-Key must not be empty")
        asked._read_callbacks(found, rules)
        return asked

    @property
    def tenant(self) -> str:
        """On whose behalf, "" where nobody is named."""
        return self.terms.tenant

    def read_into(self, request: InferRequest) -> None:
        """Has `request` say what the headers say, so that it can be checked."""
        self.terms.said.apply(request)

    def _read_callbacks(self, found: dict[str, str], rules: CallbackRules) -> None:
        self.callback_url = found.get("weir-callback-url", "")
        self.reply_to = found.get("weir-callback-subject") or found.get("weir-reply-to", "")
        if self.callback_url and self.reply_to:
            raise invalid("give either a callback URL or a callback subject, not both")
        if self.callback_url:
            rules.check_url(self.callback_url)
        # Whoever may ask for inference is not to speak to all of the bus.
        if self.reply_to and not (len(self.reply_to) <= _MAX_SUBJECT_LENGTH and _SUBJECT.fullmatch(self.reply_to)):
            raise invalid("a callback subject must begin with 'answers.' or '_INBOX.', and have no wildcards")


def _text(name: str, value: str, limit: int) -> str:
    if value and not (len(value) <= limit and _PRINTABLE.fullmatch(value)):
        raise invalid(f"{name} must be at most {limit} printable ASCII characters")
    return value

"""`KnownHeaders`: headers of durable requests that came before are not read and checked again.

A producer sends the same headers each time but for the message's id and what JetStream put into a batch. So what is left of
a block without the broker's own lines is looked up, and only the id is read.
"""

from __future__ import annotations

import re

from bus.headers import parse_headers
from gateway.durable.request_terms import DurableTerms, check_id, read_terms, readable_terms
from schemas.errors import WeirError
from schemas.request_limits import RequestLimits

MAX_BLOCKS = 256
"""Blocks of headers that are remembered for one lane of a model."""

MAX_BLOCK_BYTES = 1024

_without_broker_lines = re.compile(rb"\r\nNats-[A-Za-z-]+: ?[!-~]*(?=\r\n)").sub
_find_ids = re.compile(rb"\r\nNats-Msg-Id: ?([!-~]*)(?=\r\n)").findall


class KnownHeaders:
    """See the module."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._terms: dict[bytes, DurableTerms] = {}

    def read(self, block: bytes) -> tuple[DurableTerms, WeirError | None]:
        """What the headers in a message's block say; with an error (INVALID_ARG) what can be read nevertheless."""
        rest = _without_broker_lines(b"", block)
        known = self._terms.get(rest)
        headers: dict[str, str] = {}
        try:
            if known is not None:
                ids = _find_ids(block)
                return known.with_id(check_id(ids[0].decode()) if ids else ""), None
            headers = parse_headers(block)
            terms = read_terms(headers, self._limits)
        except WeirError as error:
            return readable_terms(headers or parse_headers(block)), error
        self._keep(rest, terms)
        return terms, None

    def _keep(self, rest: bytes, terms: DurableTerms) -> None:
        if len(rest) > MAX_BLOCK_BYTES:
            return
        lowered = rest.lower()
        # Other spellings of the id, and what differs from request to request anyway.
        if b"nats-" in lowered or b"weir-id" in lowered or terms.said.traceparent or terms.deadline_ms:
            return
        if len(self._terms) >= MAX_BLOCKS:
            self._terms.clear()  # of many that came once
        self._terms[rest] = terms

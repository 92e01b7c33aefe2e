"""`JobIds`: ids of requests that are answered later. Whoever knows such an id may read the answer, and delete it.

An id is 128 random bits and a code that only gateways can compute (HMAC with the cluster's secret): so no id
can be derived from an idempotency key, and an id that a NATS producer has chosen for a request of its own is none of these.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable

NONCE_DIGITS = 32
CODE_DIGITS = 16
ID_DIGITS = NONCE_DIGITS + CODE_DIGITS
"""Hexadecimal digits of an id: the unguessable part and the code that proves its origin."""


class JobIds:
    """Makes and checks ids of jobs. `secret` returns the cluster's secret, which is the same at every gateway."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self._secret = secret

    def new(self) -> str:
        """An id for a request without an idempotency key."""
        return self._signed(secrets.token_hex(NONCE_DIGITS // 2))

    def of_key(self, model: str, version: str, tenant: str, key: str) -> str:
        """The id of the request with this idempotency key; the same on every gateway."""
        return self._signed(self._code("key", (model, version, tenant, key))[:NONCE_DIGITS])

    def is_genuine(self, id: str) -> bool:
        """Whether a gateway of this cluster has made the id."""
        if len(id) != ID_DIGITS or not id.isascii():
            return False
        return hmac.compare_digest(self._signed(id[:NONCE_DIGITS]), id)

    def _signed(self, nonce: str) -> str:
        return nonce + self._code("id", (nonce,))[:CODE_DIGITS]

    def _code(self, purpose: str, parts: Iterable[str]) -> str:
        code = hmac.new(self._secret(), digestmod=hashlib.sha256)
        for part in (purpose, *parts):
            data = part.encode()
            code.update(len(data).to_bytes(8, "big"))  # so that no two lists of parts read the same
            code.update(data)
        return code.hexdigest()

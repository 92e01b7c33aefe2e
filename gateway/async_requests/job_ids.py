"""Ids of requests that are answered later."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from uuid import uuid4


def new_id() -> str:
    """An id that nobody can guess: whoever knows it may read the answer."""
    return uuid4().hex


def id_of_key(model: str, version: str, tenant: str, key: str) -> str:
    """The id of the request with this idempotency key; the same on every gateway."""
    return _hash((b"weir-idempotency", model.encode(), version.encode(), tenant.encode(), key.encode()))[:32]


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))  # so that no two lists of parts read the same
        digest.update(part)
    return digest.hexdigest()

"""`SigningKeys`: the public keys of an issuer, from its JSON web key set.

Source: RFC 7517 (key sets), RFC 7518 (RS256, ES256), RFC 8037 (EdDSA). Three algorithms are pinned, all with a public key:
a token can't choose one with a shared secret, or none, and each needs a key of its own type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from jwt import PyJWK, PyJWTError

MAX_SET_BYTES = 1 << 20
"""The size of a key set that is read."""

MAX_KEYS = 100
"""Keys of a set that are read; the others are left out."""

MAX_KEYS_OF_ID = 2
"""Keys of one id, or without one, that are tried for a token."""

RSA_BITS = range(2048, 8192 + 1)
"""Sizes of RSA keys that are taken: smaller ones are broken, larger ones cost a request milliseconds."""

ALGORITHMS = {"RS256": ("RSA", None), "ES256": ("EC", "P-256"), "EdDSA": ("OKP", "Ed25519")}
"""The algorithms of tokens, with the type and curve of the key that each needs."""


class MalformedKeySet(ValueError):
    """A document that is no key set, or has no key that can be used."""


class SigningKey(NamedTuple):
    """One key of an issuer; `id` is "" for a key without one."""

    id: str
    algorithm: str
    key: PyJWK


class _Row(msgspec.Struct):
    """The fields of a key that decide whether it is used."""

    kty: str
    kid: str = ""
    crv: str | None = None
    use: str = "sig"
    alg: str = ""


class SigningKeys:
    """The keys of one set that can verify tokens."""

    def __init__(self, keys: list[SigningKey]) -> None:
        self._by_id: dict[str, list[SigningKey]] = {}
        for key in keys:
            self._by_id.setdefault(key.id, []).append(key)
        self._all = keys

    @classmethod
    def parse(cls, document: bytes) -> SigningKeys:
        """The usable keys of a key set in JSON. Raises MalformedKeySet."""
        if len(document) > MAX_SET_BYTES:
            raise MalformedKeySet(f"the key set has {len(document)} bytes, and may have {MAX_SET_BYTES}")
        try:
            rows = msgspec.json.decode(document, type=dict[str, Any]).get("keys")
        except msgspec.DecodeError as error:
            raise MalformedKeySet(f"the key set is not JSON: {error}") from None
        if not isinstance(rows, list):
            raise MalformedKeySet('the key set has no list "keys"')
        keys = [key for row in rows[:MAX_KEYS] if (key := _usable(row)) is not None]
        if not keys:
            raise MalformedKeySet(f"none of {len(rows)} keys can verify {', '.join(ALGORITHMS)}")
        return cls(keys)

    def for_token(self, id: str | None, algorithm: str) -> list[SigningKey]:
        """The keys to try for a token of this algorithm that names the key `id`, None for a token that names none."""
        named = self._all if id is None else self._by_id.get(id, [])
        return [key for key in named if key.algorithm == algorithm][:MAX_KEYS_OF_ID]

    def __len__(self) -> int:
        return len(self._all)


def _usable(row: Any) -> SigningKey | None:
    """The key of a row of a set; None for one of another kind, for another use, or malformed."""
    try:
        fields = msgspec.convert(row, _Row)
    except msgspec.ValidationError:
        return None
    fitting = [name for name, (kind, curve) in ALGORITHMS.items() if fields.kty == kind and curve in (None, fields.crv)]
    if fields.use != "sig" or not fitting or fields.alg not in ("", *fitting):
        return None
    try:
        key = PyJWK(row, fitting[0])
    except (PyJWTError, ValueError, TypeError, KeyError):  # what the library raises for numbers that make no key
        return None
    if fields.kty == "RSA" and getattr(key.key, "key_size", 0) not in RSA_BITS:
        return None
    if hasattr(key.key, "private_numbers") or hasattr(key.key, "private_bytes"):
        return None  # whoever publishes a private key lets everybody sign
    return SigningKey(fields.kid, fitting[0], key)

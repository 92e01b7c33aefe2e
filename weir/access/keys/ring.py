"""`KeyRing`: the keys of principals. A key is shown once, when it is made; its hash and its id are stored.

A key is `weir_<id>_<secret>`: the id names it in logs and listings, the secret has 256 random bits. So many that a plain
SHA-256 of it, which costs microseconds, can't be turned back by trying.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Mapping
from hashlib import sha256

import msgspec

PREFIX = "weir_"
_ID_CHARACTERS = 10
_SECRET_BYTES = 32
MAX_KEY_CHARACTERS = 128
"""A longer text is no key, and is not hashed."""

MAX_LIVE_KEYS = 2
"""Keys of one name that may be valid at the same time: the one in use, and the one that replaces it."""


class KeyRecord(msgspec.Struct, frozen=True):
    """What is stored of a key. Times are Unix seconds; `expires_s` is 0 for a key that does not expire."""

    id: str
    name: str
    roles: tuple[str, ...]
    hash: str
    created_s: int
    expires_s: int = 0
    tenant: str = ""

    def is_live(self, now_s: float) -> bool:
        """Whether the key lets its principal in."""
        return not self.expires_s or now_s < self.expires_s


class KeyProblem(ValueError):
    """A change of keys that can't be made, with the reason."""


class KeyRing:
    """The keys by id. Changes return the ring with the change; a ring never changes."""

    def __init__(self, records: Iterable[KeyRecord] = ()) -> None:
        self._records: Mapping[str, KeyRecord] = {record.id: record for record in records}

    @property
    def records(self) -> list[KeyRecord]:
        """All keys, the expired ones too, the oldest first."""
        return sorted(self._records.values(), key=lambda record: (record.created_s, record.id))

    def find(self, shown: str, now_s: float) -> KeyRecord | None:
        """The record of the key that a request has shown; None for one that is unknown, malformed or expired.

        Takes the same time for a wrong secret of a known id as for a right one.
        """
        id, secret = _parts(shown)
        record = self._records.get(id)
        stored = record.hash if record is not None else _NO_HASH
        is_right = hmac.compare_digest(_hash(secret), stored)
        return record if record is not None and is_right and record.is_live(now_s) else None

    def create(
        self, name: str, roles: Iterable[str], now_s: float, expires_s: int = 0, tenant: str = ""
    ) -> tuple[KeyRing, str]:
        """The ring with a new key, and the key itself. Raises KeyProblem if the name has as many as may be valid.

        The expired keys of the name are left out, so that rotations do not add up.
        """
        live = [record for record in self._records.values() if record.name == name and record.is_live(now_s)]
        if len(live) >= MAX_LIVE_KEYS:
            ids = " and ".join(sorted(record.id for record in live))
            raise KeyProblem(f"'{name}' has {len(live)} valid keys, {ids}: revoke one of them first")
        id = secrets.token_hex(_ID_CHARACTERS // 2)
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        record = KeyRecord(id, name, tuple(sorted(set(roles))), _hash(secret), int(now_s), expires_s, tenant)
        kept = [each for each in self._records.values() if each.name != name or each.is_live(now_s)]
        return KeyRing([*kept, record]), f"{PREFIX}{id}_{secret}"

    def rotate(self, name: str, now_s: float, overlap_s: int) -> tuple[KeyRing, str]:
        """The ring with a second key like the valid one of this name, which expires after `overlap_s`; and the key.

        Raises KeyProblem if the name has no valid key, or two already.
        """
        live = [record for record in self._records.values() if record.name == name and record.is_live(now_s)]
        if not live:
            raise KeyProblem(f"'{name}' has no valid key: create one")
        ring, key = self.create(name, live[0].roles, now_s, live[0].expires_s, live[0].tenant)
        ends_s = int(now_s) + overlap_s
        old = live[0]
        expires_s = min(old.expires_s, ends_s) if old.expires_s else ends_s
        return ring._with(msgspec.structs.replace(old, expires_s=expires_s)), key

    def revoke(self, name_or_id: str) -> KeyRing:
        """The ring without the key of this id, or without all keys of this name. Raises KeyProblem if there is none."""
        kept = [record for record in self._records.values() if name_or_id not in (record.id, record.name)]
        if len(kept) == len(self._records):
            raise KeyProblem(f"there is no key of the name or id '{name_or_id}'")
        return KeyRing(kept)

    def _with(self, record: KeyRecord) -> KeyRing:
        return KeyRing([*(each for each in self._records.values() if each.id != record.id), record])


def _hash(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


_NO_HASH = _hash("")


def _parts(shown: str) -> tuple[str, str]:
    """Id and secret of a key; ("", "?") for another text, which has no hash that is stored."""
    if len(shown) > MAX_KEY_CHARACTERS or not shown.startswith(PREFIX):
        return "", "?"
    id, _, secret = shown.removeprefix(PREFIX).partition("_")
    return id, secret or "?"

"""`nats://NAME`: the address of a model repository that lies in NATS."""

from __future__ import annotations

import re

ADDRESS_PREFIX = "nats://"
"""What such an address begins with."""

_REPOSITORY = re.compile(r"[A-Za-z0-9_-]{1,64}")


def repository_of(address: object) -> str | None:
    """The name in `nats://NAME`, the address of a repository that lies in NATS; None for what is no such address.

    Raises ValueError for a name that can't be one.
    """
    if not isinstance(address, str) or not address.startswith(ADDRESS_PREFIX):
        return None
    name = address.removeprefix(ADDRESS_PREFIX)
    check_repository_name(name)
    return name


def check_repository_name(name: str) -> None:
    """Raises ValueError unless `name` may name a repository: 1 to 64 letters, digits, `_` and `-`."""
    if not _REPOSITORY.fullmatch(name):
        raise ValueError(f"'{name}' is no name of a repository: 1 to 64 letters, digits, '_' and '-'")

"""Names and addresses: identities of models, addresses of repositories in NATS, and addresses at which a role listens."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

_SEPARATOR = ":" * 2  # not an address to listen at

ADDRESS_PREFIX = "nats://"
"""The prefix of the address of a model repository that lies in NATS."""

_REPOSITORY = re.compile(r"[A-Za-z0-9_-]{1,64}")

_STAYS_ENCODED = re.compile("%(?=2[Ff]|25)")

_LISTEN_ADDRESS = re.compile(
    r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?|(?P<bare>[^\[\]]*:[^\[\]]*:[^\[\]]*)"
)


def model_identity(name: str, namespace: str = "") -> str:
    """The identity of a model among the roles: its name, or `<namespace>::<name>`.

    With `--model-namespacing`, a model's namespace is the path of its repository as configured. A name that only one
    repository has is an identity already, and has namespace "" here. The form is that of Triton's log.
    """
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def plain_name(identity: str) -> str:
    """The model's name without the namespace, as clients request it."""
    return identity.rpartition(_SEPARATOR)[2]


def namespace_of(identity: str) -> str:
    """The namespace that is part of an identity, "" for an identity without one."""
    return identity.rpartition(_SEPARATOR)[0]


def model_path(name: str, version: str = "") -> str:
    """The path in the HTTP API of a model, by its identity or its plain name, or of one of its versions."""
    path = f"/v2/models/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def routed_path(raw_path: str) -> str:
    """The path by which a request for the percent-encoded `raw_path` is routed: the `path` of its ASGI scope.

    It is decoded except for `%2F` and `%25`, so that a name with a slash stays one segment. Routes decode these.
    """
    return unquote(_STAYS_ENCODED.sub("%25", raw_path)) if "%" in raw_path else raw_path


def repository_of(address: object) -> str | None:
    """The name in `nats://NAME`, the address of a repository that lies in NATS; None for anything else.

    Raises ValueError for an invalid name.
    """
    if not isinstance(address, str) or not address.startswith(ADDRESS_PREFIX):
        return None
    name = address.removeprefix(ADDRESS_PREFIX)
    check_repository_name(name)
    return name


def check_repository_name(name: str) -> None:
    """Raises ValueError unless `name` may name a repository: 1 to 64 letters, digits, `_` and `-`."""
    if not _REPOSITORY.fullmatch(name):
        raise ValueError(f"'{name}' is not a repository name: use 1 to 64 letters, digits, '_' and '-'")


class ListenAddress(NamedTuple):
    """The address at which a role listens; port 0: any free port."""

    host: str
    port: int = 0

    @classmethod
    def of(cls, text: str) -> Self:
        """The address in `HOST[:PORT]`, with an IPv6 address in brackets where a port follows. Raises ValueError."""
        found = _LISTEN_ADDRESS.fullmatch(text)
        if found is None or int(found["port"] or 0) > 0xFFFF:
            raise ValueError(f"'{text}' is not HOST[:PORT]")
        host, port = found["bracketed"] or found["bare"] or found["name"], found["port"]
        return cls(host, int(port or 0))

    @property
    def is_any(self) -> bool:
        """Whether it means all addresses of the host."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

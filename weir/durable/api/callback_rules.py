"""`CallbackRules`: the URLs to which responses may be posted (`--callback-allow`), and the addresses that may be connected.

URLs are compared part by part, never as text. The addresses that a name resolves to are checked too, because a name can be
made to point to a host that only this server reaches.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from weir.schemas.core.errors import WeirError, invalid

MAX_URL_LENGTH = 700
"""Characters of a callback URL, which is encoded in a subject."""

_PORTS = {"http": 80, "https": 443}
_CLEAN = re.compile(r"[\x21-\x7e]+")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192")))
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class CallbackUrl(NamedTuple):
    """A parsed URL; `target` is that of the request line."""

    scheme: str
    host: str
    port: int
    path: str
    target: str

    @property
    def authority(self) -> str:
        """The host, and the port unless it is the default of the scheme."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class CallbackRules:
    """The rules from the given URL `prefixes`; without any, nothing may be posted."""

    def __init__(self, prefixes: Iterable[str] = ()) -> None:
        self._prefixes = [read_url(prefix) for prefix in prefixes]

    @property
    def allow_any(self) -> bool:
        """Whether any URL is allowed."""
        return bool(self._prefixes)

    def check_url(self, text: str) -> CallbackUrl:
        """The parsed URL. Raises WeirError (INVALID_ARG) if it is invalid or not allowed."""
        if not self._prefixes:
            raise invalid("callback URLs are not allowed on this server")
        url = read_url(text)
        if not any(_is_below(url, prefix) for prefix in self._prefixes):
            raise invalid("the callback URL is not allowed on this server")
        return url

    @staticmethod
    def admits_address(url: CallbackUrl, address: str) -> bool:
        """Whether a connection to `address`, to which the URL's host resolves, is allowed.

        An address in the URL itself (and so in its prefix) is; otherwise loopback, link-local and metadata addresses are
        not.
        """
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        if _address_literal(url.host) == found:
            return True
        if url.host == "localhost":
            return found.is_loopback
        return not any(map(_is_internal, (found, *_embedded_addresses(found))))


def read_url(text: str) -> CallbackUrl:
    """Parses `text`. Raises WeirError (INVALID_ARG) unless it is a plain HTTP URL."""
    try:
        if len(text) > MAX_URL_LENGTH or not _CLEAN.fullmatch(text) or "\\" in text or "#" in text:
            raise ValueError
        parts = urlsplit(text)
        if parts.scheme not in _PORTS or "@" in parts.netloc or not parts.hostname or parts.netloc.endswith(":"):
            raise ValueError
        port = parts.port if parts.port is not None else _PORTS[parts.scheme]
        path = parts.path or "/"
        decoded = unquote(path)
        if any(segment in (".", "..") for segment in re.split(r"[/\\]", decoded)) or "%" in decoded:
            raise ValueError  # receivers would interpret it differently
        target = f"{path}?{parts.query}" if parts.query else path
        return CallbackUrl(parts.scheme, parts.hostname.rstrip("."), port, path, target)
    except (ValueError, WeirError):
        raise invalid("the callback URL must be a plain http or https URL") from None


def _is_below(url: CallbackUrl, prefix: CallbackUrl) -> bool:
    if (url.scheme, url.host, url.port) != (prefix.scheme, prefix.host, prefix.port):
        return False
    path = prefix.path if prefix.path.endswith("/") else f"{prefix.path}/"
    return url.path == prefix.path or url.path.startswith(path)


def _address_literal(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_internal(address: _Address) -> bool:
    """Whether it is loopback, link-local, multicast, unspecified, or a metadata service of a cloud."""
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address in _METADATA
    )


def _embedded_addresses(address: _Address) -> list[_Address]:
    """The IPv4 addresses that an IPv6 address embeds."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[_Address] = [a for a in (address.ipv4_mapped, address.sixtofour) if a is not None]
    if address in _NAT64 or int(address) >> 32 == 0:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return found

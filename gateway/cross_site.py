"""`CrossSiteCheck`: rejects requests that a foreign web page makes a browser send.

Any web page can make a browser on this machine, or in this network, POST to the server: a form or a `text/plain` body
needs no permission from the server. The page could then load a model, and so run code. Two headers that scripts can't
forge identify such requests: `Origin` (Fetch standard; browsers send it with each request other than GET and HEAD) and
`Sec-Fetch-Site` (Fetch Metadata Request Headers; sent to trustworthy addresses only, localhost among them). A page whose
domain name is made to resolve to this server (DNS rebinding) is same-origin to a browser; its `Host` header is a name that
this server does not have. Programs send neither header, so they are rejected for their `Host` alone, and only if the
server listens on loopback.

Routes that change nothing and the inference routes are not checked: a page can't read their responses.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from weir.durable.api.options import prefers_async
from weir.http_server.own_hosts import OwnHosts, is_address, without_port

_SAFE_METHODS = frozenset(["GET", "HEAD", "OPTIONS"])
_INFERENCE = re.compile(r"/v2/models/[^/]+(?:/versions/[0-9]+)?/(?:infer|generate|generate_stream)", re.DOTALL)

Headers = Iterable[tuple[bytes, bytes]]


class CrossSiteCheck:
    """`allowed_hosts` are names of this server: "weir.example.com", "*.example.com" for its subdomains, "*" for all.

    `allowed_origins` are web origins such as "https://console.example.com", "*" for all. The server listens on `address`.
    Raises ValueError for an origin without scheme or host, or a host with anything besides a name.
    """

    __slots__ = ("_allows_any_origin", "_checks_programs", "_hosts", "_origins")

    def __init__(
        self, allowed_hosts: Sequence[str] = (), allowed_origins: Sequence[str] = (), address: str = "127.0.0.1"
    ) -> None:
        self._hosts = OwnHosts(allowed_hosts, address)
        for origin in allowed_origins:
            if origin != "*" and _normalized_origin(origin) is None:
                raise ValueError(f"--allowed-origins: '{origin}' is not an origin such as https://console.example.com")
        self._allows_any_origin = "*" in allowed_origins
        self._origins = frozenset(_normalized_origin(origin) for origin in allowed_origins if origin != "*")
        self._checks_programs = _is_loopback(address)

    def rejection(self, method: str, path: str, headers: Headers) -> str:
        """The reason to answer a request with 403; "" if it is admitted. `headers` are (name in lower case, value)."""
        if method in _SAFE_METHODS or (_INFERENCE.fullmatch(path) and not prefers_async(headers)):
            return ""
        host = origin = site = None
        for name, value in headers:
            if name == b"host":
                host = value.decode("latin-1").strip().lower()
            elif name == b"origin":
                origin = value.decode("latin-1").strip()
            elif name == b"sec-fetch-site":
                site = value.decode("latin-1").strip().lower()
        if origin is not None and (self._allows_any_origin or _normalized_origin(origin) in self._origins):
            return ""
        is_foreign_site = site not in (None, "same-origin", "none")
        is_foreign_origin = (
            origin is not None and host is not None and _host_and_port(origin) != _with_port(host, origin)
        )
        if is_foreign_site or is_foreign_origin:
            page = (origin or site or "")[:200]
            return f"a request from another site ('{page}') is refused; --allowed-origins admits web origins"
        if host and (origin is not None or site is not None or self._checks_programs) and not self._hosts.accepts(host):
            return f"the host '{host[:200]}' is not a name of this server; --allowed-hosts admits further names"
        return ""


def _normalized_origin(origin: str) -> tuple[str, str] | None:
    """(scheme, host and port) of "https://host[:port]"; None for "null" and anything else that is not an origin."""
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        return None
    return parts.scheme, f"{parts.hostname}:{port or (443 if parts.scheme == 'https' else 80)}"


def _host_and_port(origin: str) -> str | None:
    normalized = _normalized_origin(origin)
    return None if normalized is None else normalized[1]


def _with_port(host: str, origin: str) -> str:
    """`host` with an explicit port (the default one of `origin`'s scheme), as `_host_and_port` writes it."""
    has_port = re.search(r"(\]|^[^:]*):([0-9]{1,5})$", host)
    port = has_port[2] if has_port else "443" if origin.lower().startswith("https:") else "80"
    return f"{without_port(host)}:{int(port)}"


def _is_loopback(address: str) -> bool:
    return address == "localhost" or (is_address(address) and ipaddress.ip_address(address).is_loopback)


LOCAL = CrossSiteCheck()
"""The check of a server on loopback without options."""

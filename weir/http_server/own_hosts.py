"""`OwnHosts`: which names in a `Host` header are names of this server.

A foreign page whose domain name is made to resolve to this server (DNS rebinding) is same-origin to a browser; its `Host`
header is a name that this server does not have. IP addresses and names without a dot, as of containers and services, can't
be registered in the DNS, so no foreign page has them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence


class OwnHosts:
    """The names of a server that listens on `address`; `allowed_hosts` are further ones.

    "*.example.com" stands for all subdomains, "*" for every name. Raises ValueError for a host with more than a name.
    """

    __slots__ = ("_names", "_suffixes")

    def __init__(self, allowed_hosts: Sequence[str] = (), address: str = "127.0.0.1") -> None:
        for host in allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", host):
                raise ValueError(f"--allowed-hosts: '{host}' is not a host name without port, such as weir.example.com")
        names = {
            address.lower(),
            socket.gethostname().lower(),
            socket.getfqdn().lower(),
            *map(str.lower, allowed_hosts),
        }
        # "*" leaves "", which any name ends with.
        self._suffixes = (".localhost", *(name[1:] for name in names if name.startswith("*")))
        self._names = frozenset(name for name in names if not name.startswith("*"))

    def accepts(self, host: str) -> bool:
        """Whether `host`, the value of a `Host` header in lower case, is a name of this server."""
        name = without_port(host)
        return "." not in name or name in self._names or name.endswith(self._suffixes) or is_address(name)


def without_port(host: str) -> str:
    """The name or address in the value of a `Host` header."""
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.rpartition(":")[0] if re.search(r":[0-9]*$", host) and host.count(":") == 1 else host


def is_address(name: str) -> bool:
    """Whether `name` is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

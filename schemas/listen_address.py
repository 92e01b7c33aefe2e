"""Where a role listens, as `HOST[:PORT]`."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple, Self

_FORM = re.compile(
    r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?|(?P<bare>[^\[\]]*:[^\[\]]*:[^\[\]]*)"
)


class ListenAddress(NamedTuple):
    """See the module; port 0: any that is free."""

    host: str
    port: int = 0

    @classmethod
    def of(cls, text: str) -> Self:
        """What `HOST[:PORT]` says, with an IPv6 address in brackets where a port follows. Raises ValueError."""
        found = _FORM.fullmatch(text)
        if found is None or int(found["port"] or 0) > 0xFFFF:
            raise ValueError(f"'{text}' is not HOST[:PORT]")
        host, port = found["bracketed"] or found["bare"] or found["name"], found["port"]
        return cls(host, int(port or 0))

    @property
    def is_any(self) -> bool:
        """Whether it stands for all addresses of the host."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

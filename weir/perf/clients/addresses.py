"""`ServerAddress`: the place of a server, from the text of an option."""

from __future__ import annotations

from typing import NamedTuple, Self
from urllib.parse import urlsplit

_SECURE = {"http": False, "https": True, "grpc": False, "grpcs": True}


class ServerAddress(NamedTuple):
    """Host and port; `prefix` is the path before `/v2` of an HTTP server, "" without one. `pinned` is the certificate (PEM)
    that the server must have, "" for one that an authority has signed.
    """

    host: str
    port: int
    is_secure: bool = False
    prefix: str = ""
    pinned: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The address in `host:port`, with or without a scheme (http, https, grpc, grpcs). Raises ValueError."""
        parts = urlsplit(text if "://" in text else f"http://{text}")
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme not in _SECURE or not parts.hostname or port is None:
            raise ValueError(f"the address of a server must be host:port, not {text!r}")
        return cls(parts.hostname, port, _SECURE[parts.scheme], parts.path.rstrip("/"))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether it is an address of this machine that no other machine can reach."""
        return self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"

"""`BrokerAccess`: TLS and credentials for connections to nats-server. `ServerPool`: the servers to connect to.

Files are read at each connection, so a renewed certificate or credential takes effect with the next one. Secrets are in
files, in the environment or in a URL, and in nothing that is logged or reported.

`ServerPool` is a state machine without a clock or a socket: which server of a cluster is tried next, and whether one has
left the cluster.
Source: the NATS client protocol (CONNECT: user, pass, auth_token, jwt, nkey, sig; INFO: `connect_urls`, `cluster`),
decentralized JWT credentials files.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import random
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from weir.runtime.extras import is_installed, missing_extra

USER_VARIABLE = "WEIR_NATS_USER"
PASSWORD_VARIABLE = "WEIR_NATS_PASSWORD"  # noqa: S105 - a name
"""The environment variables of the user and the password, which keep them out of the command line."""

_SECTION = re.compile(r"-----BEGIN ([A-Z ]+)-----\s*([A-Za-z0-9_.\-=]+)\s*-+END [A-Z ]+-+")
_AUTHORIZATION_ERRORS = ("authorization", "authentication", "permissions", "account", "maximum account")


class BrokerRefused(ConnectionError):
    """The broker rejects the credentials, or its certificate is not valid. A retry does not help."""


class BrokerServer(NamedTuple):
    """One server of a URL. `user` is a token if `password` is None, and "" if the URL has none."""

    host: str
    port: int
    is_tls: bool = False
    user: str = ""
    password: str | None = None

    @classmethod
    def of(cls, url: str) -> Self:
        """The server at `[nats:// | tls://][user:password@ | token@]host[:port]`. Raises ValueError for another text."""
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        if parts.scheme not in ("nats", "tls"):
            raise ValueError(f"the URL of a NATS server begins with nats:// or tls://, not {parts.scheme}://")
        password = None if parts.password is None else unquote(parts.password)
        try:
            port = parts.port or 4222
        except ValueError as error:
            raise ValueError(f"the port in the URL of a NATS server is not valid: {error}") from error
        return cls(parts.hostname or "127.0.0.1", port, parts.scheme == "tls", unquote(parts.username or ""), password)

    @property
    def place(self) -> str:
        """Host and port, without secrets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def without_secrets(urls: str) -> str:
    """The servers of a comma-separated list of URLs, without users and passwords."""
    return ",".join(part.rsplit("@", 1)[-1] for part in urls.split(","))


def without_user(url: str) -> str:
    """The URL of one server without user and password: "nats://host:port"."""
    return f"nats://{BrokerServer.of(url).place}"


def is_refusal(error: str) -> bool:
    """Whether an error of nats-server says that it rejects the credentials."""
    text = error.lower()
    return any(word in text for word in _AUTHORIZATION_ERRORS) and "timeout" not in text


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAccess:
    """How a process connects to nats-server. The first five are paths of files, "" for none.

    `ca` signs the servers' certificates; `cert` and `key` are this process's; `credentials` holds a JWT and the seed of its
    nkey, `nkey` a seed alone. `user` and `password` apply to URLs without any. `replicas` is the number of servers that
    store each stream; 0: it follows from the size of the cluster.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    credentials: str = ""
    nkey: str = ""
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    replicas: int = 0

    @classmethod
    def of(cls, fields: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Self:
        """From the values of options (`nats_ca`, ...; None: not given), with user and password of the environment."""
        files = {name: fields.get(f"nats_{name}") or "" for name in ("ca", "cert", "key", "credentials", "nkey")}
        return cls(
            **files,
            user=environment.get(USER_VARIABLE, ""),
            password=environment.get(PASSWORD_VARIABLE, ""),
            replicas=int(fields.get("nats_replicas") or 0),
        )

    def check(self) -> None:
        """Raises BrokerRefused with one line for files that are missing or malformed."""
        if bool(self.cert) != bool(self.key):
            raise BrokerRefused("--nats-cert and --nats-key are given together, or neither")
        if self.credentials and self.nkey:
            raise BrokerRefused("--nats-credentials and --nats-nkey exclude each other")
        if self.ca or self.cert:
            self.tls_context()
        if self.credentials or self.nkey:
            self._signed(b"")

    def tls_context(self) -> ssl.SSLContext:
        """For connections to the broker. Raises BrokerRefused for files that can't be used."""
        named = f"--nats-ca {self.ca}"
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            named = f"--nats-cert {self.cert}, --nats-key {self.key}"
            if self.cert:
                # An empty password: an encrypted key is an error, not a prompt on the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise BrokerRefused(f"{named}: {_reason(error)}") from error
        return context

    def wants_tls(self, server: BrokerServer, info: Mapping[str, Any]) -> bool:
        """Whether the connection is encrypted: by the options, by the URL, or because the server's INFO requires it."""
        return server.is_tls or bool(self.ca or self.cert) or bool(info.get("tls_required"))

    def identity(self, server: BrokerServer, info: Mapping[str, Any]) -> dict[str, str]:
        """The credentials as fields of CONNECT. Raises BrokerRefused for files that can't be used."""
        if self.credentials or self.nkey:
            return self._signed(str(info.get("nonce", "")).encode())
        if server.user:
            if server.password is None:
                return {"auth_token": server.user}
            return {"user": server.user, "pass": server.password}
        if self.user:
            return {"user": self.user, "pass": self.password}
        return {}

    def _signed(self, nonce: bytes) -> dict[str, str]:
        file = self.credentials or self.nkey
        option = "--nats-credentials" if self.credentials else "--nats-nkey"
        if not is_installed("nkeys"):
            raise BrokerRefused(missing_extra(option, "nkeys"))
        import nkeys  # loads libsodium, which only these credentials need

        try:
            text = Path(file).read_text()
            sections = dict(_SECTION.findall(text))
            jwt = sections.get("NATS USER JWT", "")
            seed = sections.get("USER NKEY SEED", "") if self.credentials else text.strip()
            if self.credentials and not (jwt and seed):
                raise ValueError("no JWT and no seed")
            pair = nkeys.from_seed(bytearray(seed.encode()))
            signature = base64.urlsafe_b64encode(pair.sign(nonce)).rstrip(b"=").decode()
            public = pair.public_key.decode()
        except OSError as error:
            raise BrokerRefused(f"{option} {file}: {_reason(error)}") from error
        except Exception as error:  # nkeys raises many kinds of errors, whose texts may contain the secret
            raise BrokerRefused(f"{option} {file}: it does not hold {self._expected}") from error
        return {"jwt": jwt, "sig": signature} if self.credentials else {"nkey": public, "sig": signature}

    @property
    def _expected(self) -> str:
        return "a JWT and the seed of its nkey" if self.credentials else "the seed of an nkey"


NO_ACCESS = BrokerAccess()
"""For a server without authentication, or with the credentials in its URL."""


def tls_name(server: BrokerServer, first: BrokerServer) -> str:
    """The name that the certificate of `server` must have: servers announce each other's addresses, not their names."""
    try:
        ipaddress.ip_address(server.host)
    except ValueError:
        return server.host
    return first.host


def refused_by_tls(place: str, error: OSError) -> OSError:
    """The error for a failed TLS handshake; not BrokerRefused where the server died during it."""
    kind = OSError if isinstance(error, ssl.SSLEOFError) else BrokerRefused
    return kind(f"no encrypted connection to nats-server at {place}: {_reason(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


MAX_DISCOVERED = 64
"""Servers that are only known from announcements of other servers."""

_CLUSTER_REPLICAS = 3


class ServerPool:
    """The servers of a cluster: those of `urls`, in random order so that processes spread over them, and announced ones."""

    def __init__(self, urls: Sequence[str], shuffle: Any = random.shuffle) -> None:
        self._configured = list(dict.fromkeys(BrokerServer.of(url) for url in urls))
        self.first = self._configured[0]
        self._order = list(self._configured)
        shuffle(self._order)
        self._listed = 0
        self._is_cluster = False
        self.current: BrokerServer | None = None

    @property
    def hosts(self) -> list[str]:
        """The hosts of the configured URLs."""
        return [server.host for server in self._configured]

    @property
    def is_clustered(self) -> bool:
        """Whether there is more than one server."""
        return len(self._order) > 1 or self._listed > 1

    @property
    def replicas(self) -> int:
        """How many servers should store each stream: three if the cluster has as many, else one."""
        known = max(len(self._configured), self._listed) if self._is_cluster else 1
        return _CLUSTER_REPLICAS if known >= _CLUSTER_REPLICAS else 1

    def candidates(self) -> list[BrokerServer]:
        """All servers in the order to try them now: the one that was lost comes last, because it may hang."""
        if self.current is not None and self.current in self._order:
            self._order.remove(self.current)
            self._order.append(self.current)
        return list(self._order)

    def learn(self, info: Mapping[str, Any]) -> bool:
        """Takes the INFO of the connected server; returns whether a server has left its cluster."""
        listed = info.get("connect_urls")
        self._is_cluster = self._is_cluster or bool(info.get("cluster"))
        if not isinstance(listed, list):
            return False
        read = map(self._read, listed[:MAX_DISCOVERED])
        servers = list(dict.fromkeys(server for server in read if server is not None))
        has_left = len(servers) < self._listed
        self._listed = len(servers)
        addresses = {(server.host, server.port) for server in self._configured}
        found = [server for server in servers if (server.host, server.port) not in addresses]
        self._order = [s for s in self._order if s in self._configured or s in found or s == self.current]
        self._order += [server for server in found if server not in self._order]
        return has_left

    def _read(self, url: Any) -> BrokerServer | None:
        try:
            server = BrokerServer.of(url) if isinstance(url, str) and url else None
        except ValueError:
            return None
        # Servers announce addresses only: TLS and credentials are those of the first configured URL.
        first = self.first
        return server and server._replace(is_tls=first.is_tls, user=first.user, password=first.password)

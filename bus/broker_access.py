"""`BrokerAccess`: how nats-server is spoken to: encrypted or not, and who we say that we are.

Files are read at each connection, so that a certificate or a credential that was renewed holds from the next one on. What
is secret stands in files, in the environment or in a URL, and in nothing that is logged or told.
Source: the NATS client protocol (CONNECT: user, pass, auth_token, jwt, nkey, sig), decentralized JWT credentials files.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

USER_VARIABLE = "WEIR_NATS_USER"
PASSWORD_VARIABLE = "WEIR_NATS_PASSWORD"  # noqa: S105 - a name
"""The environment variables of a user and a password, for those who would not have them in a command line."""

_SECTION = re.compile(r"-----BEGIN ([A-Z ]+)-----\s*([A-Za-z0-9_.\-=]+)\s*-+END [A-Z ]+-+")
_REFUSALS = ("authorization", "authentication", "permissions", "account", "maximum account")


class BrokerRefused(ConnectionError):
    """The broker is there and will not have us, or is not who it should be: to try again does not help."""


class BrokerServer(NamedTuple):
    """One server, as a URL names it. `user` stands for a token where `password` is None; "": none was named."""

    host: str
    port: int
    is_tls: bool = False
    user: str = ""
    password: str | None = None

    @classmethod
    def of(cls, url: str) -> Self:
        """The server at `[nats:// | tls://][user:password@ | token@]host[:port]`. Raises ValueError for what is none."""
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        if parts.scheme not in ("nats", "tls"):
            raise ValueError(f"the URL of a NATS server begins with nats:// or tls://, not {parts.scheme}://")
        password = None if parts.password is None else unquote(parts.password)
        try:
            port = parts.port or 4222
        except ValueError as error:
            raise ValueError("the URL of a NATS server names a port that is none") from error
        return cls(parts.hostname or "127.0.0.1", port, parts.scheme == "tls", unquote(parts.username or ""), password)

    @property
    def place(self) -> str:
        """Where it is, without secrets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def without_secrets(urls: str) -> str:
    """The servers of a comma-separated list of URLs, as they may be told to anybody."""
    return ",".join(part.rsplit("@", 1)[-1] for part in urls.split(","))


def without_user(url: str) -> str:
    """The URL of one server without user and password: "nats://host:port"."""
    return f"nats://{BrokerServer.of(url).place}"


def is_refusal(error: str) -> bool:
    """Whether an error that nats-server told says that it will not have us."""
    told = error.lower()
    return any(word in told for word in _REFUSALS) and "timeout" not in told


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAccess:
    """See the module. All but `replicas` are files, "" where there is none.

    `ca` signs the servers' certificates; `cert` and `key` are ours; `credentials` holds a JWT and the seed of its nkey,
    `nkey` a seed alone. `user` and `password` hold where no URL names any. `replicas` is how many servers keep what
    is stored; 0: as many as follows from the size of the cluster.
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
        """What options say (`nats_ca`, ...; None: not given), with user and password of the environment."""
        files = {name: fields.get(f"nats_{name}") or "" for name in ("ca", "cert", "key", "credentials", "nkey")}
        return cls(
            **files,
            user=environment.get(USER_VARIABLE, ""),
            password=environment.get(PASSWORD_VARIABLE, ""),
            replicas=int(fields.get("nats_replicas") or 0),
        )

    def check(self) -> None:
        """Raises BrokerRefused in one line for files that are missing or are not what they should be."""
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
                # An empty password: a key that has one is an error, not a question on the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise BrokerRefused(f"{named}: {_reason(error)}") from error
        return context

    def wants_tls(self, server: BrokerServer, info: Mapping[str, Any]) -> bool:
        """Whether the connection is to be encrypted: we say so, or the server does in its INFO."""
        return server.is_tls or bool(self.ca or self.cert) or bool(info.get("tls_required"))

    def identity(self, server: BrokerServer, info: Mapping[str, Any]) -> dict[str, str]:
        """Who we are, as fields of CONNECT. Raises BrokerRefused for files that can't be used."""
        if self.credentials or self.nkey:
            return self._signed(str(info.get("nonce", "")).encode())
        if server.user:
            if server.password is None:
                return {"auth_token": server.user}
            return {"user": server.user, "pass": server.password}
        if self.user:
            return {"user": self.user, "pass": self.password}
        return {}

    def nats_py_options(self, server: BrokerServer) -> dict[str, Any]:
        """The same as arguments of nats-py's `connect`, for all of a cluster's servers."""
        options: dict[str, Any] = {"tls": self.tls_context()}
        if self.credentials:
            return {**options, "user_credentials": self.credentials}
        if self.nkey:
            return {**options, "nkeys_seed": self.nkey}
        names = {"user": "user", "pass": "password", "auth_token": "token"}
        return options | {names[field]: value for field, value in self.identity(server, {}).items()}

    def _signed(self, nonce: bytes) -> dict[str, str]:
        import nkeys  # with libsodium, for those alone who have such files

        file = self.credentials or self.nkey
        option = "--nats-credentials" if self.credentials else "--nats-nkey"
        try:
            text = Path(file).read_text()
            sections = dict(_SECTION.findall(text))
            jwt = sections.get("NATS USER JWT", "")
            seed = sections.get("USER NKEY SEED", "") if self.credentials else text.strip()
            if self.credentials and not (jwt and seed):
                raise ValueError("it does not hold a JWT and a seed")
            pair = nkeys.from_seed(bytearray(seed.encode()))
            signature = base64.urlsafe_b64encode(pair.sign(nonce)).rstrip(b"=").decode()
            public = pair.public_key.decode()
        except OSError as error:
            raise BrokerRefused(f"{option} {file}: {_reason(error)}") from error
        except Exception as error:  # nkeys has errors of many kinds, whose texts may hold what is in the file
            raise BrokerRefused(f"{option} {file}: it does not hold {self._expected}") from error
        return {"jwt": jwt, "sig": signature} if self.credentials else {"nkey": public, "sig": signature}

    @property
    def _expected(self) -> str:
        return "a JWT and the seed of its nkey" if self.credentials else "the seed of an nkey"


NO_ACCESS = BrokerAccess()
"""Of a server that lets everybody in, or says in its URL who it is for."""


def tls_name(server: BrokerServer, first: BrokerServer) -> str:
    """The name that the certificate of `server` must have: servers tell each other's addresses, not their names."""
    try:
        ipaddress.ip_address(server.host)
    except ValueError:
        return server.host
    return first.host


def refused_by_tls(place: str, error: OSError) -> OSError:
    """What is told of a handshake that failed; a server that went in its midst has not refused us."""
    kind = OSError if isinstance(error, ssl.SSLEOFError) else BrokerRefused
    return kind(f"no encrypted connection to nats-server at {place}: {_reason(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

"""`ServerTls`: the TLS context of a process's ports, and the certificate files that it follows.

Sources: Python's `ssl`, whose context for servers has safe ciphers and no compression; RFC 7301 (ALPN).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from weir.access.gate import CertificateNames, certificate_names
from weir.runtime.certificates import fingerprint
from weir.runtime.ticks import next_tick

logger = logging.getLogger("weir.connections")

REQUIRE, REQUEST = "require", "request"
"""What clients are asked for where there is an authority for them: a certificate, or one if they have one."""

HTTP_PROTOCOLS = ("http/1.1",)
GRPC_PROTOCOLS = ("h2",)

CHECK_INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The options of TLS in the settings of a role: files in the PEM format, "" for none."""

    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tls_client_auth: str = REQUIRE

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.tls_cert or self.tls_key or self.tls_client_ca)

    def tls_files(self, protocols: tuple[str, ...] = HTTP_PROTOCOLS) -> TlsFiles | None:
        """The files for ports that speak `protocols`, None without TLS."""
        if not self.has_tls:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca or None, self.tls_client_auth, protocols)


class TlsFiles(NamedTuple):
    """The files of a TLS context. With `client_ca`, clients show a certificate that it has signed: all of them, or with
    `client_auth` REQUEST those that have one. `owner` and `options` (of the three files) are named in errors.
    """

    cert: str
    key: str
    client_ca: str | None = None
    client_auth: str = REQUIRE
    protocols: tuple[str, ...] = HTTP_PROTOCOLS
    owner: str = "Weir"
    options: tuple[str, str, str] = ("--tls-cert", "--tls-key", "--tls-client-ca")

    def context(self) -> ssl.SSLContext:
        """The context for a server. Raises OSError that names the option, for a file that can't be read or used."""
        cert_option, key_option, ca_option = self.options
        self._check_readable(cert_option, self.cert)
        self._check_readable(key_option, self.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(list(self.protocols))
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise OSError(
                f"{self.owner} can't use the certificate of {cert_option} with the key of {key_option}: {_reason(error)}"
            ) from error
        if self.client_ca is not None:
            self._check_readable(ca_option, self.client_ca)
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise OSError(f"{self.owner} can't use the certificates of {ca_option}: {_reason(error)}") from error
            context.verify_mode = ssl.CERT_OPTIONAL if self.client_auth == REQUEST else ssl.CERT_REQUIRED
        return context

    def state(self) -> tuple[tuple[int, ...], ...]:
        """Differs after a change of any of the files, also of where a symbolic link leads."""
        return tuple(_file_state(path) for path in (self.cert, self.key, self.client_ca) if path)

    def _check_readable(self, option: str, path: str) -> None:
        if not path:
            raise OSError(f"{self.owner} with TLS needs {option}")
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise OSError(f"{self.owner} can't read the file of {option}, {path}: {error.strerror}") from error


class ServerTls:
    """`context` is the one for new connections: made from the files at first, and again after each change of theirs.

    Raises OSError as `TlsFiles.context`.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._state = files.state()
        self.context = files.context()

    def check_files(self) -> None:
        """Uses the files for connections from now on if they have changed. Files that can't be used, as while they are
        being replaced one after the other, change nothing; the log says so once for each change.
        """
        state = self._files.state()
        if state == self._state:
            return
        self._state = state  # read before the files: one that changes meanwhile is read again at the next check
        spoken = ", ".join(self._files.protocols)
        try:
            context, shown = self._files.context(), fingerprint(Path(self._files.cert).read_text())
        except (OSError, ValueError) as error:
            logger.warning(
                "the changed TLS files are not used, new connections (%s) get the former certificate: %s", spoken, error
            )
            return
        self.context = context
        logger.info(
            "the TLS files have changed: new connections (%s) get the certificate of %s, SHA-256 %s",
            spoken,
            self._files.options[0],
            shown,
        )


async def follow_files(followed: Sequence[ServerTls]) -> None:
    """Checks the files of all once a second, until it is cancelled."""
    while True:
        await next_tick(CHECK_INTERVAL_S)
        for tls in followed:
            # In a thread: the files may lie on a file system that responds slowly.
            await asyncio.to_thread(tls.check_files)


def certificate_of(transport: Any) -> CertificateNames | None:
    """The names in the certificate that the client at the other end of `transport` has shown, None without one."""
    shown = transport.get_extra_info("peercert")
    if not shown:
        return None
    return certificate_names(shown.get("subject", ()), shown.get("subjectAltName", ()))


def _file_state(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _no_password() -> str:
    """The password of a key: none, rather than a question in the terminal."""
    return ""


def _reason(error: ssl.SSLError | ValueError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason) if reason else "not in the PEM format"

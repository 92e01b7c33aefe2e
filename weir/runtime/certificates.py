"""Certificates in the PEM format, and how clients of Weir check that of a server."""

from __future__ import annotations

import hashlib
import os
import ssl
from pathlib import Path

CLIENT_CERT_VARIABLE, CLIENT_KEY_VARIABLE = "WEIR_CLIENT_CERT", "WEIR_CLIENT_KEY"
"""The environment variables with the files of the certificate and of the key that commands show to a server."""

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def first_certificate(pem: str) -> str:
    """The first certificate in this text: in the file of a server its own. Raises ValueError."""
    _, begin, rest = pem.partition(_BEGIN)
    body, end, _ = rest.partition(_END)
    if not (begin and end):
        raise ValueError("not a certificate in the PEM format")
    return f"{_BEGIN}{body}{_END}\n"


def fingerprint(pem: str) -> str:
    """The SHA-256 of the first certificate in this text, as `openssl x509 -fingerprint` writes it. Raises ValueError."""
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(first_certificate(pem))).hexdigest().upper()
    return ":".join(digest[at : at + 2] for at in range(0, len(digest), 2))


def client_context(pinned: str = "") -> ssl.SSLContext:
    """The context of a client: for the server that has the certificate `pinned` (PEM), whatever its name is; without it for
    servers whose certificate an authority of the system, or of `SSL_CERT_FILE`, has signed.

    The client shows the certificate of the environment, if there is one. Raises OSError.
    """
    context = ssl.create_default_context(cadata=pinned or None)
    if pinned:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False
    if (own := client_files()) is not None:
        context.load_cert_chain(*own, password=lambda: "")
    return context


def client_files() -> tuple[str, str] | None:
    """The files of the certificate and of the key that commands show to a server, None for no certificate."""
    cert = os.environ.get(CLIENT_CERT_VARIABLE)
    return (cert, os.environ.get(CLIENT_KEY_VARIABLE) or cert) if cert else None


def trusted_pem(pinned: str = "") -> bytes | None:
    """The certificates that a gRPC client trusts: `pinned`, else those of `SSL_CERT_FILE`, None for gRPC's own choice.

    Raises OSError.
    """
    if pinned:
        return pinned.encode()
    named = os.environ.get("SSL_CERT_FILE")
    return Path(named).read_bytes() if named else None

"""Authentication of connections between processes: a shared secret, and certificates.

The owner of payloads draws a secret and sends it through the broker to readers that are permitted to ask it there. The
secret is never sent on the connection itself: each end sends a nonce, and a code over both nonces that only the secret
produces.
Source: RFC 2104 (HMAC); challenge and response with the ends' roles in the signed text, so that neither can be
replayed.

With TLS both ends present the certificates that they use for the broker. Names in certificates are not checked, because
processes have changing addresses: an owner sends the fingerprint of its certificate with its address through the
broker, and a reader accepts no other. Files are read for each connection, so a renewed certificate takes effect with
the next one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
from pathlib import Path

from bus.nats.access import BrokerAccess, BrokerRefused
from bus.nats.connection import Bus

SECRET_BYTES = 32
NONCE_BYTES = 16
PROOF_BYTES = 32


def new_secret() -> bytes:
    """A new secret of a listening process."""
    return secrets.token_bytes(SECRET_BYTES)


def new_nonce() -> bytes:
    """A new nonce of one end of a connection."""
    return secrets.token_bytes(NONCE_BYTES)


def reader_proof(secret: bytes, owner_nonce: bytes, reader_nonce: bytes) -> bytes:
    """The code that the connecting end sends."""
    return hmac.digest(secret, b"weir payload reader" + owner_nonce + reader_nonce, "sha256")


def owner_proof(secret: bytes, owner_nonce: bytes, reader_nonce: bytes) -> bytes:
    """The code that the listening end sends."""
    return hmac.digest(secret, b"weir payload owner" + owner_nonce + reader_nonce, "sha256")


def is_proof(given: bytes | memoryview, expected: bytes) -> bool:
    """Compares two codes in constant time."""
    return hmac.compare_digest(given, expected)


def is_encrypted(bus: Bus) -> bool:
    """Whether connections between processes are encrypted: as the one to the broker."""
    server = bus.servers.current or bus.servers.first
    return bus.access.wants_tls(server, bus.server_info)


def listening_context(access: BrokerAccess) -> ssl.SSLContext:
    """The listening end's context. Raises BrokerRefused for files that can't be used, or without a certificate."""
    if not access.cert:
        raise BrokerRefused(
            "--payload-listen: connections to NATS are encrypted, so those between processes must be; that takes a "
            "certificate of our own, --nats-cert and --nats-key"
        )
    access.tls_context()  # raises a readable error for malformed files
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=access.ca or None)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(access.cert, access.key, password=lambda: "")
    return context


def connecting_context(access: BrokerAccess) -> ssl.SSLContext:
    """The connecting end's context. Raises BrokerRefused."""
    context = access.tls_context()
    context.check_hostname = False  # the fingerprint is checked instead
    return context


def renew(context: ssl.SSLContext, access: BrokerAccess) -> None:
    """Loads the certificate from its files again. Raises OSError."""
    context.load_cert_chain(access.cert, access.key, password=lambda: "")


def own_fingerprint(access: BrokerAccess) -> bytes:
    """The fingerprint of this process's certificate, the first in its file. Raises OSError or ValueError."""
    text = Path(access.cert).read_text()
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    first = begin + text.split(begin, 1)[1].split(end, 1)[0] + end if begin in text else text
    return fingerprint(ssl.PEM_cert_to_DER_cert(first))


def fingerprint(certificate: bytes) -> bytes:
    """The fingerprint of a certificate in DER."""
    return hashlib.sha256(certificate).digest()
